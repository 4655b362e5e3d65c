// The layout of the map of services: in layers, callers before callees. Does not use the document.

export const BOX = { width: 172, height: 52 };
const MOST_BENDS = 2000;
const GAP = { layer: 92, row: 26 };

// nodes: [{id}], edges: [{from, to}] -> {width, height, places: Map(id -> {x, y}), bends: Map(edge -> points)}
export function layered(nodes, edges, vertical = false) {
  const ids = nodes.map((node) => node.id);
  const known = new Set(ids);
  const links = edges.filter(({ from, to }) => known.has(from) && known.has(to) && from !== to);
  const forward = withoutCycles(ids, links);
  const rank = ranks(ids, forward);
  // An edge over several layers gets a dummy node in each of them, so that it passes between boxes.
  const layers = [];
  const put = (layer, item) => (layers[layer] ??= []).push(item);
  for (const id of ids) put(rank.get(id), id);
  const parts = [];
  const chains = new Map();
  const long = forward.reduce((sum, { from, to }) => sum + rank.get(to) - rank.get(from) - 1, 0);
  forward.forEach(({ from, to, edge }, index) => {
    let last = from;
    const chain = [];
    for (let layer = rank.get(from) + 1; layer < rank.get(to) && long <= MOST_BENDS; layer += 1) {
      const dummy = `\u0000${index}.${layer}`;
      put(layer, dummy);
      chain.push(dummy);
      parts.push([last, dummy]);
      last = dummy;
    }
    parts.push([last, to]);
    chains.set(edge, { chain, reversed: edge.from !== from });
  });
  order(layers, parts);
  return place(layers, known, chains, vertical);
}

// Reverses edges that would close a cycle, for the layout only.
function withoutCycles(ids, links) {
  const out = new Map(ids.map((id) => [id, []]));
  for (const edge of links) out.get(edge.from).push(edge);
  const incoming = new Map(ids.map((id) => [id, 0]));
  for (const edge of links) incoming.set(edge.to, incoming.get(edge.to) + 1);
  const state = new Map();
  const forward = [];
  const visit = (root) => {
    const stack = [[root, 0]];
    state.set(root, 1);
    while (stack.length) {
      const top = stack.at(-1);
      const edge = out.get(top[0])[top[1]];
      if (!edge) {
        state.set(top[0], 2);
        stack.pop();
        continue;
      }
      top[1] += 1;
      const visited = state.get(edge.to);
      forward.push(visited === 1 ? { from: edge.to, to: edge.from, edge } : { from: edge.from, to: edge.to, edge });
      if (visited === undefined) {
        state.set(edge.to, 1);
        stack.push([edge.to, 0]);
      }
    }
  };
  // Starting with services without callers; the remaining ones are in cycles.
  const roots = [...ids].sort((a, b) => incoming.get(a) - incoming.get(b));
  for (const id of roots) if (!state.has(id)) visit(id);
  return forward;
}

function ranks(ids, links) {
  const rank = new Map(ids.map((id) => [id, 0]));
  const waits = new Map(ids.map((id) => [id, 0]));
  const out = new Map(ids.map((id) => [id, []]));
  for (const { from, to } of links) {
    waits.set(to, waits.get(to) + 1);
    out.get(from).push(to);
  }
  const ready = ids.filter((id) => waits.get(id) === 0);
  while (ready.length) {
    const id = ready.shift();
    for (const next of out.get(id)) {
      rank.set(next, Math.max(rank.get(next), rank.get(id) + 1));
      waits.set(next, waits.get(next) - 1);
      if (waits.get(next) === 0) ready.push(next);
    }
  }
  return rank;
}

// Reduces crossings: moves each node to the mean position of its neighbours, in several sweeps.
function order(layers, parts) {
  const before = new Map();
  const after = new Map();
  for (const [a, b] of parts) {
    (after.get(a) ?? after.set(a, []).get(a)).push(b);
    (before.get(b) ?? before.set(b, []).get(b)).push(a);
  }
  const sweep = (layer, neighbours, beside) => {
    const at = new Map(beside.map((id, index) => [id, index]));
    const key = new Map(
      layer.map((id, index) => {
        const positions = (neighbours.get(id) ?? []).map((other) => at.get(other)).filter((position) => position !== undefined);
        return [id, positions.length ? positions.reduce((a, b) => a + b, 0) / positions.length : index];
      }),
    );
    layer.sort((a, b) => key.get(a) - key.get(b));
  };
  for (let round = 0; round < 6; round += 1) {
    for (let i = 1; i < layers.length; i += 1) sweep(layers[i], before, layers[i - 1]);
    for (let i = layers.length - 2; i >= 0; i -= 1) sweep(layers[i], after, layers[i + 1]);
  }
}

function place(layers, known, chains, vertical) {
  const along = vertical ? BOX.height : BOX.width;
  const across = vertical ? BOX.width : BOX.height;
  const thin = across * 0.35;
  const size = (layer) => layer.reduce((sum, id) => sum + (known.has(id) ? across : thin) + GAP.row, -GAP.row);
  const breadth = Math.max(across, ...layers.map(size));
  const spots = new Map();
  const gap = vertical ? 64 : GAP.layer;
  layers.forEach((layer, index) => {
    let offset = (breadth - size(layer)) / 2;
    for (const id of layer) {
      const own = known.has(id) ? across : thin;
      const far = index * (along + gap);
      const near = offset + (own - across) / 2;
      spots.set(id, vertical ? { x: near, y: far } : { x: far, y: near });
      offset += own + GAP.row;
    }
  });
  const depth = layers.length * (along + gap) - gap;
  const bends = new Map();
  for (const [edge, { chain, reversed }] of chains) {
    const points = chain.map((id) => ({ x: spots.get(id).x + BOX.width / 2, y: spots.get(id).y + BOX.height / 2 }));
    bends.set(edge, reversed ? points.reverse() : points);
  }
  const places = new Map([...spots].filter(([id]) => known.has(id)));
  return { width: vertical ? breadth : depth, height: vertical ? depth : breadth, places, bends };
}
