// Requests to the API. The token, if one is required, is kept in the session storage of this tab.

const BASE = new URL("api/v1/", document.baseURI);
const KEY = "batchmill.token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  // Whether there was no response at all, as opposed to an error response.
  get unreachable() {
    return this.status === 0;
  }
}

let memory = null;

export const token = {
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? memory;
    } catch {
      return memory;
    }
  },
  set(value) {
    memory = value;
    try {
      if (value === null) sessionStorage.removeItem(KEY);
      else sessionStorage.setItem(KEY, value);
    } catch {
      // Storage is not allowed: the token is kept until the page is closed.
    }
  },
};

export async function request(path, parameters = {}, options = {}) {
  const url = new URL(path, BASE);
  for (const [name, given] of Object.entries(parameters)) {
    for (const value of Array.isArray(given) ? given : [given]) {
      if (value !== null && value !== undefined && value !== "") url.searchParams.append(name, value);
    }
  }
  const headers = { ...options.headers };
  const bearer = token.get();
  if (bearer !== null) headers.authorization = `Bearer ${bearer}`;
  let response;
  try {
    response = await fetch(url, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not respond.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const { error } = await response.json();
    if (typeof error === "string") return error;
  } catch {
    // Not a response of batchmill, but of a proxy for example.
  }
  return `The server responded with ${response.status} ${response.statusText}`.trim();
}

export async function get(path, parameters, options) {
  const response = await request(path, parameters, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The response was incomplete.");
  }
}
