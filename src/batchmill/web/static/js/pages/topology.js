// The calls between services, as a map and as a table.

import { get } from "../api.js";
import { h, panel, setAttribute, setChildren, setText, svg } from "../dom.js";
import { nameIn } from "../examples.js";
import { averageMs, count, countOf, grade, percent, plain, rankMs, rate } from "../format.js";
import { view } from "../grouping.js";
import { BOX, layered } from "../layout.js";
import { controls, parameters, read, write } from "../range.js";
import { format, kept, relationAddress, serviceAddress } from "../route.js";
import { panelShape } from "../skeleton.js";
import { bothSides, DataTable, link, number } from "../table.js";
import { noData } from "./states.js";

const MARGIN = 16;
const MOST_ROWS = 500; // of the table; more take a browser too long
const ZOOMS = [0.4, 0.55, 0.7, 0.85, 1, 1.25, 1.6, 2];

export function topology({ query, amend, run }) {
  const range = controls((chosen) => amend((to) => write(to, chosen)), { withGrain: false });
  const map = picture(() => query);
  const table = callTable(() => query);
  const shown = h("span", { class: "shown", role: "status" });
  const search = h("input", { type: "search", placeholder: "Search services", "aria-label": "Search services", spellcheck: "false", oninput: typed });
  const back = h("a", { class: "back-to-all", hidden: true }, "Show all services");
  const body = h("div", { class: "page" }, panelShape(460));
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "head" }, h("h1", {}, "Topology"), shown, h("label", { class: "search" }, search), back, h("span", { class: "push" }), range.element),
    body,
  );
  let typing = null;
  let latest = null;
  const none = h("div", { class: "panel" }, h("p", { class: "empty" }));
  const nothing = h("div", { class: "panel" }, h("p", { class: "empty" }, "No calls between services in this time range. Choose a longer range, or wait for the next commit."));

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const change = (to) => {
        for (const name of ["focus", "group", "search"]) to.delete(name);
        if (search.value) to.set("search", search.value);
      };
      amend(change, { replace: query.has("search") });
    }, 200);
  }

  function reads(from) {
    query = from;
    range.show(read(query));
    if (document.activeElement !== search) search.value = query.get("search") ?? "";
    back.hidden = !["focus", "group", "search"].some((name) => query.has(name));
    setAttribute(back, "href", format({ page: "topology", query: kept(query) }));
    if (latest) draw(latest);
  }
  reads(query);

  function draw(data) {
    const part = view(data, { focus: query.get("focus") ?? "", search: query.get("search") ?? "", open: query.get("group") ?? "" });
    const ids = new Set(part.nodes.map(({ id }) => id));
    setChildren(body, part.nodes.length ? [map.element, table.element] : [none]);
    setText(none.firstChild, missing());
    if (!part.nodes.length) return;
    map.show(part, data.nodes.length);
    // The table has the relations of services, also where the map has groups.
    table.show(data, part.groups ? data.edges : data.edges.filter(({ from, to }) => ids.has(from) && ids.has(to)));
  }

  // Why nothing is shown, although there are services.
  function missing() {
    const [focus, search, group] = ["focus", "search", "group"].map((name) => query.get(name));
    if (focus) return `No calls of “${nameIn(focus) || focus}” in this time range.`;
    return search ? `No service with “${search}” in its name in this time range.` : `No service of the group “${group}” in this time range.`;
  }

  return {
    title: "Topology",
    element,
    reads,
    destroy() {
      clearTimeout(typing);
      map.destroy();
    },
    load: (signal) => {
      const { from, to } = parameters(read(query));
      return get("topology", { from, to }, { signal });
    },
    show(data) {
      const left = data.left_out ?? {};
      const more = (left.nodes ?? 0) + (left.edges ?? 0);
      setText(shown, data.nodes.length ? `${countOf(data.nodes.length, "service")}, ${countOf(data.edges.length, "relation")}${more ? `; ${countOf(left.nodes ?? 0, "service")} and ${countOf(left.edges ?? 0, "relation")} with fewer calls not shown` : ""}` : "");
      latest = data.nodes.length ? data : null;
      if (latest) draw(data);
      else setChildren(body, [run.commit?.newest_minute_s === null ? noData(run) : nothing]);
    },
  };
}

function picture(query) {
  const drawing = svg("svg", { role: "group", "aria-label": "Map of services; the table below has the same data" });
  const frame = h("div", { class: "frame" }, drawing);
  const button = (label, text, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
  const zoom = h("div", { class: "zoom" }, button("Zoom out", "−", () => step(-1)), button("Zoom in", "+", () => step(1)), button("Fit to width", "Fit", () => fit()));
  const { element, note } = panel("Map", { id: "map" }, frame, keys());
  element.classList.add("map");
  element.firstChild.append(zoom);
  let scale = null; // null: fit to width
  let laid = null;
  let shape = "";
  let vertical = false;
  let latest = null;
  const nodes = new Map();
  const edges = new Map();
  const observer = new ResizeObserver(() => {
    if (latest && vertical !== narrow()) draw();
    else size();
  });
  observer.observe(frame);
  drag(frame);

  const narrow = () => frame.clientWidth < 620;

  function draw() {
    const { nodes: services, edges: links } = latest;
    vertical = narrow();
    // Services keep their places as long as services and relations are the same.
    const sorted = [...services].sort((a, b) => (a.id < b.id ? -1 : 1));
    const ties = [...links].sort((a, b) => (`${a.from} ${a.to}` < `${b.from} ${b.to}` ? -1 : 1));
    const now = JSON.stringify([vertical, sorted.map(({ id }) => id), ties.map(({ from, to }) => [from, to])]);
    if (now !== shape) {
      shape = now;
      const made = layered(sorted, ties, vertical);
      const bends = new Map([...made.bends].map(([edge, points]) => [`${edge.from} ${edge.to}`, points]));
      laid = { ...made, bends };
    }
    const busiest = Math.max(1, ...links.map(({ cpm }) => cpm ?? 0));
    forget(edges, new Set(ties.map(({ from, to }) => `${from} ${to}`)));
    drawing.classList.remove("picked");
    forget(nodes, new Set(sorted.map(({ id }) => id)));
    const wanted = [];
    for (const edge of ties) {
      if (!laid.places.has(edge.from) || !laid.places.has(edge.to)) continue;
      const key = `${edge.from} ${edge.to}`;
      const part = edges.get(key) ?? edges.set(key, edgePart(edge)).get(key);
      part.update(edge, laid, busiest, vertical);
      const single = !`${edge.from} ${edge.to}`.includes("group:");
      setAttribute(part.element, "href", single ? relationAddress(edge.from, edge.to, query()) : null);
      wanted.push(part.element);
    }
    for (const node of sorted) {
      const part = nodes.get(node.id) ?? nodes.set(node.id, nodePart(node, pick)).get(node.id);
      part.update(node, laid.places.get(node.id), addresses(node), latest.hits.has(node.id));
      wanted.push(part.element);
    }
    setChildren(drawing, wanted);
    const first = !drawing.hasAttribute("viewBox");
    size();
    if (first) frame.scrollLeft = (frame.scrollWidth - frame.clientWidth) / 2;
  }

  // A service leads to its page, a group to its services; the mark in a box's corner to its neighbours.
  function addresses({ id, group }) {
    const to = (name, value) => {
      const wanted = kept(query());
      wanted.set(name, value);
      return format({ page: "topology", query: wanted });
    };
    if (group !== undefined) return { open: group ? to("group", group) : null, focus: null };
    return { open: serviceAddress(id, query()), focus: to("focus", id) };
  }

  function forget(parts, stay) {
    for (const key of [...parts.keys()]) if (!stay.has(key)) parts.delete(key);
  }

  const natural = () => ({ width: laid.width + 2 * MARGIN, height: laid.height + 2 * MARGIN });

  function size() {
    if (!laid) return;
    const { width, height } = natural();
    const fitting = Math.min(1.15, (frame.clientWidth - 14) / width);
    const now = scale ?? Math.max(vertical ? 0.55 : 0.5, fitting);
    setAttribute(drawing, "viewBox", `${-MARGIN} ${-MARGIN} ${width} ${height}`);
    setAttribute(drawing, "width", Math.round(width * now));
    setAttribute(drawing, "height", Math.round(height * now));
  }

  function step(by) {
    const now = scale ?? drawing.clientWidth / natural().width;
    const next = by > 0 ? ZOOMS.find((zoom) => zoom > now + 0.01) : [...ZOOMS].reverse().find((zoom) => zoom < now - 0.01);
    scale = next ?? now;
    size();
  }

  function fit() {
    scale = null;
    size();
  }

  // Highlights a service with its callers and callees, while it is hovered or focused.
  function pick(id) {
    drawing.classList.toggle("picked", id !== null);
    for (const part of [...nodes.values(), ...edges.values()]) part.element.classList.remove("near");
    if (id === null) return;
    nodes.get(id)?.element.classList.add("near");
    for (const [key, part] of edges) {
      const [from, to] = part.ends;
      if (from !== id && to !== id) continue;
      edges.get(key).element.classList.add("near");
      nodes.get(from)?.element.classList.add("near");
      nodes.get(to)?.element.classList.add("near");
    }
  }

  return {
    element,
    destroy: () => observer.disconnect(),
    show(part, all) {
      latest = part;
      const services = part.nodes.reduce((sum, { members }) => sum + (members ?? 1), 0);
      const groups = part.groups ? `${count(services)} services in ${countOf(part.nodes.length, "box", "boxes")}: open a group, or search` : "";
      setText(note, groups || (services < all ? `${count(services)} of ${countOf(all, "service")}` : ""));
      draw();
    },
  };
}

function nodePart({ id }, pick) {
  const box = svg("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 9 });
  const bar = svg("rect", { class: "bar", x: 0, y: 8, width: 4, height: BOX.height - 16, rx: 2 });
  const name = svg("text", { x: 14, y: 22 });
  const figures = svg("text", { x: 14, y: 40, class: "figures" });
  const title = svg("title");
  const anchor = svg("a", { class: "node", onfocus: () => pick(id), onblur: () => pick(null) }, title, box, bar, name, figures);
  const aim = svg("a", { class: "aim" }, svg("title", {}, "Only this service and its neighbours"), svg("circle", { cx: BOX.width - 14, cy: 14, r: 10, class: "touch" }), svg("circle", { cx: BOX.width - 14, cy: 14, r: 5 }), svg("circle", { cx: BOX.width - 14, cy: 14, r: 1.5 }));
  const element = svg("g", { class: "place", onpointerenter: () => pick(id), onpointerleave: () => pick(null) }, anchor, aim);
  return {
    element,
    update(node, at, { open, focus }, hit) {
      setAttribute(element, "transform", `translate(${at.x} ${at.y})`);
      setAttribute(anchor, "href", open);
      setAttribute(aim, "href", focus);
      setAttribute(aim, "aria-label", `Only ${node.name} and its neighbours`);
      aim.classList.toggle("hidden-aim", focus === null);
      anchor.classList.toggle("group", node.members !== undefined);
      anchor.classList.toggle("hit", hit);
      for (const level of ["good", "warn", "bad"]) anchor.classList.toggle(level, grade(node.success) === level);
      setText(name, node.name.length > 17 ? `${node.name.slice(0, 16)}…` : node.name);
      if (node.members) {
        const some = countOf(node.members, "service");
        setText(figures, node.cpm === null ? some : `${some} · ${plain(rate(node.cpm))}/min`);
        setText(title, open ? `${some} called ${node.name}…: open the group` : `${some} with fewer calls: search for one`);
        return;
      }
      setText(figures, node.cpm === null ? "no own metrics" : `${plain(rate(node.cpm))}/min · ${plain(averageMs(node.avg))}`);
      setText(title, node.cpm === null ? `${node.name}: known only from its relations` : `${node.name}: ${plain(rate(node.cpm))} calls/min, ${plain(averageMs(node.avg))} on average, ${plain(percent(node.success))} succeed`);
    },
  };
}

function edgePart({ from, to }) {
  const line = svg("path");
  const tip = svg("path", { class: "tip" });
  const title = svg("title");
  const element = svg("a", { class: "edge", tabindex: "-1" }, title, line, tip);
  return {
    element,
    ends: [from, to],
    update(edge, laid, busiest, vertical) {
      const width = 1.4 + 5 * Math.sqrt((edge.cpm ?? 0) / busiest);
      const points = corners(laid, edge, vertical);
      setAttribute(line, "d", curve(points, vertical));
      setAttribute(line, "stroke-width", width.toFixed(2));
      setAttribute(tip, "d", arrow(points.at(-1), points.back, vertical, 5 + width));
      // The worse of both sides: neither hides what the other one saw.
      const shares = [edge.caller, edge.callee].flatMap((side) => side?.success ?? []);
      const worse = shares.length ? Math.min(...shares) : null;
      for (const level of ["good", "warn", "bad"]) element.classList.toggle(level, grade(worse) === level);
      setText(title, [["caller", edge.caller], ["callee", edge.callee]].filter(([, side]) => side).map(sideText).join("\n"));
    },
  };
}

const sideText = ([name, side]) =>
  `As the ${name} sees it: ${plain(rate(side.cpm))} calls/min, ${plain(averageMs(side.avg))} on average, p99 ${plain(rankMs(side.p99))}, ${plain(percent(side.success))} succeed`;

function corners(laid, { from, to }, vertical) {
  const a = laid.places.get(from);
  const b = laid.places.get(to);
  const middle = laid.bends.get(`${from} ${to}`) ?? [];
  const back = vertical ? b.y <= a.y : b.x <= a.x;
  const side = (at, far) =>
    vertical ? { x: at.x + BOX.width / 2, y: at.y + (far ? BOX.height : 0) } : { x: at.x + (far ? BOX.width : 0), y: at.y + BOX.height / 2 };
  const end = side(b, back);
  // The line ends where the arrow head begins.
  const step = back ? 7 : -7;
  const stop = vertical ? { x: end.x, y: end.y + step } : { x: end.x + step, y: end.y };
  const points = [side(a, !back), ...middle, stop];
  points.back = back;
  return points;
}

function curve(points, vertical) {
  let path = `M${points[0].x} ${points[0].y}`;
  for (let i = 1; i < points.length; i += 1) {
    const [p, q] = [points[i - 1], points[i]];
    const half = vertical ? (q.y - p.y) / 2 : (q.x - p.x) / 2;
    path += vertical ? `C${p.x} ${p.y + half} ${q.x} ${q.y - half} ${q.x} ${q.y}` : `C${p.x + half} ${p.y} ${q.x - half} ${q.y} ${q.x} ${q.y}`;
  }
  return path;
}

function arrow(at, back, vertical, size) {
  const s = back ? -1 : 1;
  const w = size * 0.55;
  return vertical
    ? `M${at.x - w} ${at.y - 2 * s}L${at.x} ${at.y + 7 * s}L${at.x + w} ${at.y - 2 * s}Z`
    : `M${at.x - 2 * s} ${at.y - w}L${at.x + 7 * s} ${at.y}L${at.x - 2 * s} ${at.y + w}Z`;
}

function keys() {
  const sample = (level, dash) =>
    svg("svg", { class: level, viewBox: "0 0 30 8", "aria-hidden": "true" }, svg("path", { d: "M0 4H30", stroke: "currentColor", "stroke-width": 3, "stroke-dasharray": dash }));
  return h(
    "div",
    { class: "keys" },
    h("span", {}, sample("good", "none"), "success rate 99 % or more"),
    h("span", {}, sample("warn", "9 4"), "95 % or more"),
    h("span", {}, sample("bad", "4 3"), "less than 95 %"),
    h("span", {}, "Line width: number of calls"),
  );
}

// Moves the map with the mouse; scrolling does the same without one.
function drag(frame) {
  let from = null;
  frame.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0 || event.target.closest("a")) return;
    from = { x: event.clientX + frame.scrollLeft, y: event.clientY + frame.scrollTop };
    frame.classList.add("dragging");
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", (event) => {
    if (from) frame.scrollTo(from.x - event.clientX, from.y - event.clientY);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    frame.addEventListener(name, () => {
      from = null;
      frame.classList.remove("dragging");
    });
  }
}

function callTable(query) {
  let names = new Map();
  const end = (key, label) => ({
    key,
    label,
    header: key === "from",
    value: (row) => names.get(row[key]) ?? row[key],
    make: link((row) => ({ text: names.get(row[key]) ?? row[key], href: serviceAddress(row[key], query()) })),
  });
  const details = { key: "relation", label: "Relation", make: link((row) => ({ text: "Details", href: relationAddress(row.from, row.to, query()) })) };
  const table = new DataTable({
    caption: "Calls between services",
    columns: [
      end("from", "Caller"),
      end("to", "Callee"),
      number("cpm", "Calls/min", rate),
      ...bothSides("avg", "Average", averageMs),
      ...bothSides("p99", "p99", rankMs),
      ...bothSides("success", "Success", percent, grade),
      details,
    ],
    key: (row) => `${row.from} ${row.to}`,
    sort: { key: "cpm", order: "desc" },
  });
  const { element, note } = panel("Calls between services", { id: "calls" }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Calls between services" }, table.element));
  return {
    element,
    show(data, edges) {
      names = new Map(data.nodes.map(({ id, name }) => [id, name]));
      const busy = [...edges].sort((a, b) => (b.cpm ?? 0) - (a.cpm ?? 0)).slice(0, MOST_ROWS);
      setText(note, busy.length < edges.length ? `the busiest ${count(busy.length)} of ${count(edges.length)}` : "");
      table.update(busy);
    },
  };
}
