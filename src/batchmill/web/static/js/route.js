// The address of a view: #/page/argument?from=now-1h&grain=auto…, so that it can be shared.

const PAGES = {
  service: "service",
  instance: "instance",
  endpoint: "endpoint",
  service_relation: "relation",
  instance_relation: "instance-relation",
  endpoint_relation: "endpoint-relation",
  given: "entity",
};
// The kind of entity that a page shows; some kinds have several names.
export const KINDS = {
  ...Object.fromEntries(Object.entries(PAGES).map(([kind, page]) => [page, kind])),
  database: "service",
  cache: "service",
  queue: "service",
  topic: "endpoint",
};
const SHARED = ["range", "from", "to", "grain", "compare"];

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page, ...parts] = path.split("/");
  const argument = parts.join("/"); // an id may hold a slash
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
  for (const name of SHARED) {
    if (query.has(name)) shared.set(name, query.get(name));
  }
  return shared;
}

export const entityAddress = (kind, id, query) => format({ page: PAGES[kind] ?? "entity", argument: id, query: kept(query) });

export const serviceAddress = (id, query) => entityAddress("service", id, query);

export const relationAddress = (from, to, query) => entityAddress("service_relation", `${from}-${to}`, query);

// The search for traces with these parameters, in the same time.
export function tracesAddress(parameters, query) {
  const both = kept(query);
  for (const name of ["grain", "compare"]) both.delete(name);
  for (const [name, value] of Object.entries(parameters)) both.set(name, value);
  return format({ page: "traces", query: both });
}

export const traceAddress = (id) => format({ page: "trace", argument: id });

export function exploreAddress(metric, entities, query) {
  const wanted = kept(query);
  if (metric) wanted.set("metric", metric);
  for (const id of entities) wanted.append("entity", id);
  return format({ page: "explore", query: wanted });
}
