// Where we are: #/page/argument?range=1h&grain=auto…, so that an address can be handed on.

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", argument = ""] = path.split("/", 2);
  let name = "";
  try {
    name = decodeURIComponent(argument);
  } catch {
    name = argument; // somebody wrote it by hand
  }
  return { page: page || "services", argument: name, query: new URLSearchParams(query) };
}

export function format({ page, argument = "", query = new URLSearchParams() }) {
  const path = argument ? `${page}/${encodeURIComponent(argument)}` : page;
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

// The parameters that go along from page to page.
export function kept(query) {
  const found = new URLSearchParams();
  for (const name of ["range", "from", "to", "grain"]) {
    if (query.has(name)) found.set(name, query.get(name));
  }
  return found;
}

export const serviceAddress = (id, query) => format({ page: "service", argument: id, query: kept(query) });
