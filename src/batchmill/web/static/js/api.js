// Questions to the server. The token, where one is needed, stays in this tab's session.

const BASE = new URL("api/v1/", document.baseURI);
const KEY = "batchmill.token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  // No answer at all, as opposed to one that says what is wrong.
  get gone() {
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
      // Storage is not allowed: it is kept until the page is left.
    }
  },
};

export async function ask(path, parameters = {}, options = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const headers = { ...options.headers };
  const shown = token.get();
  if (shown !== null) headers.authorization = `Bearer ${shown}`;
  let response;
  try {
    response = await fetch(url, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const { error } = await response.json();
    if (typeof error === "string") return error;
  } catch {
    // Not an answer of ours; a proxy's, say.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim();
}

export async function get(path, parameters, options) {
  const response = await ask(path, parameters, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server's answer broke off.");
  }
}
