// The address of a view: #/page/argument?range=1h&grain=auto…, so that it can be shared.

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", argument = ""] = path.split("/", 2);
  let name = "";
  try {
    name = decodeURIComponent(argument);
  } catch {
    name = argument; // not encoded
  }
  return { page: page || "services", argument: name, query: new URLSearchParams(query) };
}

export function format({ page, argument = "", query = new URLSearchParams() }) {
  const path = argument ? `${page}/${encodeURIComponent(argument)}` : page;
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

// The parameters that all pages share.
export function kept(query) {
  const shared = new URLSearchParams();
  for (const name of ["range", "from", "to", "grain"]) {
    if (query.has(name)) shared.set(name, query.get(name));
  }
  return shared;
}

export const serviceAddress = (id, query) => format({ page: "service", argument: id, query: kept(query) });

// The search for traces with these parameters, in the same time.
export function tracesAddress(parameters, query) {
  const both = kept(query);
  both.delete("grain");
  for (const [name, value] of Object.entries(parameters)) both.set(name, value);
  return format({ page: "traces", query: both });
}
