// What the map of services shows: all, the neighbourhood of some, or groups where there are many.
// Does not use the document.

export const MOST_BOXES = 80; // more are not readable
const DEEPEST = 4;

// nodes and edges as in the API -> {nodes, edges, hits: ids that were searched for, groups: how many
// boxes are groups}. focus: the id of a service; search: a part of names; open: the name of a group.
// Of what is not there, nothing is shown.
export function view({ nodes, edges }, { focus = "", search = "", open = "" }, most = MOST_BOXES) {
  let centre = null;
  if (focus) centre = nodes.filter(({ id }) => id === focus).map(({ id }) => id);
  else if (search) centre = nodes.filter(({ name }) => name.toLowerCase().includes(search.toLowerCase())).map(({ id }) => id);
  const hits = new Set(search ? centre : []);
  let shown = { nodes, edges };
  if (centre) shown = around({ nodes, edges }, new Set(centre));
  else if (open) shown = around({ nodes, edges }, new Set(nodes.filter(({ name }) => within(name, open)).map(({ id }) => id)));
  if (shown.nodes.length <= most) return { ...shown, hits, groups: 0 };
  return { ...grouped(shown, most, open), hits };
}

// Some services with their callers and callees, and all relations between these.
function around({ nodes, edges }, centre) {
  const near = new Set(centre);
  for (const { from, to } of edges) {
    if (centre.has(from)) near.add(to);
    if (centre.has(to)) near.add(from);
  }
  return {
    nodes: nodes.filter(({ id }) => near.has(id)),
    edges: edges.filter(({ from, to }) => (centre.has(from) || centre.has(to)) && near.has(from) && near.has(to)),
  };
}

// The first parts of a name: "shop-eu" of "shop-eu-cart" at a depth of 2.
export function prefix(name, depth) {
  const parts = name.split(/([-._/:])/);
  return parts.slice(0, 2 * depth - 1).join("");
}

const within = (name, group) => name === group || (name.startsWith(group) && /^[-._/:]/.test(name.slice(group.length)));

// Services with the same first parts of their names become one box: as many parts as will fit.
export function grouped({ nodes, edges }, most = MOST_BOXES, open = "") {
  // The services of an open group are told apart by the parts after its name.
  const extra = open ? open.split(/[-._/:]/).length : 0;
  let boxes = null;
  for (let depth = DEEPEST; depth > 0 && (boxes === null || boxes.size > most); depth -= 1) {
    boxes = new Map();
    for (const node of nodes) {
      const inside = open && within(node.name, open);
      const key = prefix(node.name, inside ? extra + depth : depth);
      (boxes.get(key) ?? boxes.set(key, []).get(key)).push(node);
    }
  }
  if (boxes.size > most) {
    const sorted = [...boxes].sort(([, a], [, b]) => (load(b) ?? 0) - (load(a) ?? 0));
    const rest = sorted.slice(most - 1).flatMap(([, members]) => members);
    boxes = new Map([...sorted.slice(0, most - 1), ["", rest]]);
  }
  const box = new Map();
  const made = [...boxes].map(([key, members]) => {
    const node = members.length === 1 ? members[0] : groupNode(key, members);
    for (const { id } of members) box.set(id, node.id);
    return node;
  });
  return { nodes: made, edges: between(edges, box), groups: made.filter(({ members }) => members).length };
}

// null and null is null: there is no number to add up.
const sum = (a, b) => (a === null ? b : b === null ? a : a + b);
const load = (members) => members.reduce((total, { cpm }) => sum(total, cpm), null);

function groupNode(key, members) {
  const shares = members.map(({ success }) => success).filter((share) => share !== null);
  return {
    id: `group:${key}`,
    group: key,
    name: key || "other services",
    members: members.length,
    layers: [],
    cpm: load(members),
    avg: null,
    success: shares.length ? Math.min(...shares) : null,
  };
}

// The relations between boxes: calls are added up, shares and averages weighted by calls.
function between(edges, box) {
  const sums = new Map();
  for (const edge of edges) {
    const [from, to] = [box.get(edge.from), box.get(edge.to)];
    if (!from || !to || from === to) continue;
    const key = `${from} ${to}`;
    const known = sums.get(key);
    if (!known) sums.set(key, { ...edge, from, to });
    else sums.set(key, added(known, edge));
  }
  return [...sums.values()];
}

function added(one, other) {
  const side = (name) => (one[name] && other[name] ? together(one[name], other[name]) : (one[name] ?? other[name] ?? null));
  return { ...together(one, other), caller: side("caller"), callee: side("callee") };
}

function together(one, other) {
  const [a, b] = [one.cpm ?? 0, other.cpm ?? 0]; // the weights
  const mean = (key) => {
    if (one[key] === null || other[key] === null) return one[key] ?? other[key];
    return a + b ? (one[key] * a + other[key] * b) / (a + b) : one[key];
  };
  const ranks = [one.p99, other.p99].filter((n) => n !== null);
  return { ...one, cpm: sum(one.cpm, other.cpm), avg: mean("avg"), success: mean("success"), p99: ranks.length ? Math.max(...ranks) : null };
}
