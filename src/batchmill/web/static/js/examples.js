// Which spans are behind the numbers of an entity, as parameters of the search for traces.

// Which of them are examples of a number.
const OF_NUMBER = {
  p99: (value) => (Number.isFinite(value) && value > 0 ? { min_ms: Math.floor(value * 0.98) } : null),
  success: (value) => (value !== null && value < 1 ? { status: "error" } : null),
};
const QUEUES = ["Message queue", "Topic"]; // their latency is that of messages, not of spans
const OUTSIDE = "User"; // the caller of requests from outside, which sends no spans

// A name in an id is in base64; ids of parts begin with that of their service.
export function nameIn(id) {
  try {
    return new TextDecoder().decode(Uint8Array.from(atob(id.split(".")[0]), (char) => char.charCodeAt(0)));
  } catch {
    return "";
  }
}

const encoded = (name, limit) => btoa(String.fromCharCode(...new TextEncoder().encode([...name].slice(0, limit).join(""))));

// The ids of a service that sends spans, and of its endpoints and instances.
export const serviceId = (name) => `${encoded(name, 70)}.1`;
export const endpointId = (service, name) => `${serviceId(service)}_${encoded(name, 150)}`;
export const instanceId = (service, name) => `${serviceId(service)}_${encoded(name, 70)}`;

// Databases, caches, queues and hosts outside send no spans: those who call them do.
const isPeer = (id) => id.split("_")[0].endsWith(".0");

// Those of the calls to it, and of its messages that were processed; of a caller, its calls.
const peer = (name) => (name === OUTSIDE ? null : { peer: name });

// One of several instances; one without a name of its own has that of its service.
const instance = (service, name) => ({ service, ...(name === service ? {} : { attribute: `service.instance.id=${name}` }) });

// null if spans do not name it.
export function spansOf({ kind, id, name, ends, role }) {
  const [from, to] = ends;
  if (kind === "service") return isPeer(id) ? peer(name) : { service: name };
  if (kind === "endpoint" && role === "Topic") return { attribute: `messaging.destination.name=${name}` };
  if (kind === "instance" && role === "Model") return { attribute: `gen_ai.response.model=${name}` };
  if (isPeer(id) && !kind.endsWith("_relation")) return null;
  if (kind === "endpoint") return { service: from.name, name };
  if (kind === "instance") return instance(from.name, name);
  if (!to) return null;
  // Of calls, those that the callee served: they name it, and their traces have the caller.
  const caller = nameIn(from.id);
  const callee = nameIn(to.id);
  if (isPeer(to.id)) return { service: caller, ...peer(callee) };
  if (kind === "service_relation") return { service: callee, kind: "server" };
  if (kind === "instance_relation") return { ...instance(callee, to.name), kind: "server" };
  return { service: callee, name: to.name, kind: "server" };
}

// The same for a number of an entity: a service's own are of what it serves; null if there are none.
export function examplesOf(entity, measure, value) {
  const spans = spansOf(entity);
  const some = QUEUES.includes(entity.role) && measure === "p99" ? null : OF_NUMBER[measure]?.(value ?? null);
  if (!spans || !some) return null;
  return { ...(spans.service && !spans.peer ? { kind: "server" } : {}), ...spans, ...some };
}
