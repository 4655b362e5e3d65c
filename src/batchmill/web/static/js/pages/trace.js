// One trace as a waterfall. Only the rows in view are in the document: a trace may have 10,000.

import { get } from "../api.js";
import { h, setAttribute, setChildren, setText } from "../dom.js";
import { endpointId, instanceId, serviceId } from "../examples.js";
import { count, moment, ms, plain, utc } from "../format.js";
import { entityAddress, format } from "../route.js";
import { panelShape } from "../skeleton.js";

const COLOURS = 8;
const AROUND_S = 1800;
const SERVED = ["SERVER", "CONSUMER"]; // of these kinds are calls of endpoints
const DETAIL_PX = 220; // until an open row was measured
const MARGIN_PX = 400; // rows above and below the view
const COMING_MS = 120_000; // so long a trace that is not there is looked for
const GROWING_MS = 600_000; // and so long one that does not change any more
const narrow = matchMedia("(max-width: 760px)");
const rowHeight = () => (narrow.matches ? 46 : 28);
const took = (us) => plain(ms(us / 1000));

export function trace({ argument }) {
  const heading = h("h1", {}, "Trace");
  const facts = h("dl", { class: "facts" });
  const view = waterfall();
  const back = h("a", { href: format({ page: "traces" }) }, "Traces");
  const body = h("div", { class: "page" }, panelShape(42), panelShape(460));
  const element = h("div", { class: "page trace" }, h("div", { class: "head" }, h("div", {}, h("div", { class: "sub" }, back), heading)), body);
  let shown = "";
  let since = Date.now(); // when it was opened, or last changed

  const page = {
    title: argument,
    element,
    destroy: view.destroy,
    waits: () => Date.now() - since < (shown ? GROWING_MS : COMING_MS),
    load: (signal) => get(`traces/${encodeURIComponent(argument)}`, {}, { signal }),
    show(data) {
      setChildren(body, [facts, view.element]);
      const root = data.spans[0];
      page.title = `${root.service} ${root.name}`;
      heading.replaceChildren(h("b", {}, root.service), ` ${root.name}`);
      back.setAttribute("href", format({ page: "traces", query: new URLSearchParams({ service: root.service }) }));
      const errors = data.spans.filter((span) => span.status === "ERROR").length;
      const depth = Math.max(...data.spans.map((span) => span.depth)) + 1;
      const list = [
        ["Trace", h("code", {}, data.trace_id)],
        ["Start", h("span", { title: utc(data.start_us / 1e6) }, moment(data.start_us / 1e6, true))],
        ["Duration", took(data.duration_us)],
        ["Services", count(Object.keys(data.services).length)],
        ["Depth", count(depth)],
        ["Spans", count(data.spans.length)],
        ["Errors", h("span", { class: errors ? "is-bad" : "" }, count(errors))],
      ];
      if (data.missing) list.push(["Parents not kept", h("span", { class: "is-warn", title: "Spans name these parents, but they have not arrived, or were dropped" }, count(data.missing))]);
      if (data.spans_left_out) list.push(["Spans not shown", h("span", { class: "is-warn", title: "A trace is read up to a number of spans; the others are kept, but not shown" }, count(data.spans_left_out))]);
      facts.replaceChildren(...list.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
      // A trace grows while its spans arrive; the same one is not drawn again.
      const now = `${data.trace_id} ${data.spans.length}`;
      if (now === shown) return;
      view.show(data);
      shown = now;
      since = Date.now();
    },
  };
  return page;
}

function waterfall() {
  const ruler = h("div", { class: "ruler", "aria-hidden": "true" });
  const inner = h("div", { class: "rows", role: "tree", "aria-label": "Spans" });
  const scroller = h("div", { class: "scroller", tabindex: "0", onscroll: () => requestAnimationFrame(draw), onkeydown: keys }, inner);
  const search = h("input", { type: "search", placeholder: "Find in this trace", "aria-label": "Find in this trace", oninput: () => find() });
  const hits = h("span", { class: "soft", role: "status" });
  const path = h("input", { type: "checkbox", checked: true, onchange: () => setAttribute(element, "data-path", path.checked ? "on" : "off") });
  const element = h(
    "section",
    { class: "panel waterfall", "data-path": "on", "aria-label": "Waterfall" },
    h(
      "div",
      { class: "tools" },
      h("button", { type: "button", onclick: () => collapse(true) }, "Collapse all"),
      h("button", { type: "button", onclick: () => collapse(false) }, "Expand all"),
      h("label", { class: "check" }, path, "Critical path"),
      search, hits,
    ),
    h("div", { class: "ruler-line" }, h("span", { class: "what" }, "Service and span"), ruler),
    scroller,
  );

  let data = null;
  let rowPx = rowHeight(); // of the rows that are laid out
  let rows = []; // indices of spans that no collapsed one hides
  let tops = [];
  let ends = []; // of each span, the index after its last descendant
  const collapsed = new Set();
  const open = new Map(); // index -> height of its details
  const drawn = new Map();
  let colours = new Map();
  let matched = null;
  let focused = 0;

  const resized = new ResizeObserver(() => { relayout(); });
  resized.observe(scroller);

  function show(from) {
    const before = data?.spans ?? [];
    data = from;
    follow(before);
    colours = new Map(Object.keys(data.services).map((name, index) => [name, `var(--phase-${(index % COLOURS) + 1})`]));
    ends = data.spans.map(() => data.spans.length);
    const stack = [];
    data.spans.forEach((span, index) => {
      while (stack.length && data.spans[stack.at(-1)].depth >= span.depth) ends[stack.pop()] = index;
      stack.push(index);
    });
    ruler.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((share) => {
      const tick = h("span", {}, took(data.duration_us * share));
      tick.style.left = `${100 * share}%`;
      tick.dataset.end = share === 1 ? "last" : "";
      return tick;
    }));
    for (const row of drawn.values()) row.remove();
    drawn.clear();
    layout();
    find({ goes: false });
  }

  // What is folded, open and focused stays so, though spans that came since have moved the others.
  function follow(before) {
    const places = new Map(data.spans.map((span, index) => [span.span_id, index]));
    const place = (index) => places.get(before[index]?.span_id);
    const moved = (entries) => entries.map(([index, value]) => [place(index), value]).filter(([index]) => index !== undefined);
    const [folded, opened] = [moved([...collapsed].map((index) => [index, true])), moved([...open])];
    collapsed.clear();
    open.clear();
    for (const [index] of folded) collapsed.add(index);
    for (const [index, height] of opened) open.set(index, height);
    focused = place(focused) ?? 0;
  }

  function layout() {
    if (!data) return;
    rowPx = rowHeight();
    rows = [];
    for (let index = 0; index < data.spans.length; index = collapsed.has(index) ? ends[index] : index + 1) rows.push(index);
    let top = 0;
    tops = rows.map((index) => {
      const mine = top;
      top += rowPx + (open.get(index) ?? 0);
      return mine;
    });
    inner.style.height = `${top}px`;
    draw();
  }

  // On a screen of another width rows have another height: what is in view stays there.
  function relayout() {
    if (!data || rowPx === rowHeight()) return layout();
    const place = rowAt(scroller.scrollTop);
    const past = scroller.scrollTop - tops[place];
    for (const row of drawn.values()) row.remove(); // they are indented for the former width
    drawn.clear();
    layout();
    scroller.scrollTop = tops[place] + past;
    draw();
  }

  // The first row that ends below a place.
  function rowAt(y) {
    let [low, high] = [0, rows.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle] + rowPx + (open.get(rows[middle]) ?? 0) > y) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function draw() {
    if (!data) return;
    const from = scroller.scrollTop - MARGIN_PX;
    const to = scroller.scrollTop + scroller.clientHeight + MARGIN_PX;
    const wanted = new Set();
    for (let place = rowAt(from); place < rows.length && tops[place] < to; place += 1) {
      const index = rows[place];
      wanted.add(index);
      const row = drawn.get(index) ?? make(index);
      row.style.transform = `translateY(${tops[place]}px)`;
      mark(row, index);
    }
    for (const [index, row] of drawn) {
      if (!wanted.has(index)) {
        row.remove();
        drawn.delete(index);
      }
    }
    measure();
  }

  function measure() {
    let changed = false;
    for (const [index, row] of drawn) {
      const details = row.querySelector(".details");
      if (!details) continue;
      const height = Math.ceil(details.getBoundingClientRect().height);
      if (height && Math.abs(height - open.get(index)) > 1) {
        open.set(index, height);
        changed = true;
      }
    }
    if (changed) layout();
  }

  function make(index) {
    const span = data.spans[index];
    const total = Math.max(1, data.duration_us);
    const bar = h("span", { class: "bar" });
    bar.style.left = `${(100 * (span.start_us - data.start_us)) / total}%`;
    bar.style.width = `max(2px, ${(100 * span.duration_us) / total}%)`;
    for (const [start, end] of span.critical) {
      const part = h("i", { class: "critical" });
      part.style.left = `${(100 * (start - span.start_us)) / Math.max(1, span.duration_us)}%`;
      part.style.width = `max(1px, ${(100 * (end - start)) / Math.max(1, span.duration_us)}%)`;
      bar.append(part);
    }
    for (const event of span.events) {
      if (event.time === null) continue;
      const point = h("i", { class: "event" });
      point.style.left = `${(100 * (event.time - span.start_us)) / Math.max(1, span.duration_us)}%`;
      bar.append(point);
    }
    const label = h("span", { class: "took" }, took(span.duration_us));
    const [before, after] = [span.start_us - data.start_us, data.start_us + total - span.start_us - span.duration_us].map((us) => us / total);
    if (after >= 0.2 || after > before) label.style.left = `calc(${100 * (1 - after)}% + 5px)`;
    else label.style.right = `calc(${100 * (1 - before)}% + 5px)`;
    if (Math.max(before, after) < 0.2) {
      // There is no room beside the bar.
      label.className = "took inside";
      label.style.left = "";
      label.style.right = `calc(${100 * after}% + 5px)`;
    }
    const children = ends[index] - index - 1;
    const toggle = children
      ? h("button", { type: "button", class: "toggle", tabindex: "-1", onclick: (event) => { event.stopPropagation(); fold(index); } })
      : h("span", { class: "toggle" });
    const name = h("span", { class: "what" }, toggle, h("span", { class: "colour" }), span.status === "ERROR" ? h("span", { class: "error", title: span.status_message ?? "Error" }, "!") : null, h("b", {}, span.service), h("span", { class: "soft" }, span.name));
    name.style.paddingInlineStart = `${Math.min(span.depth, 24) * (narrow.matches ? 6 : 12)}px`;
    const line = h("div", { class: "line", onclick: () => { focused = index; details(index); } }, name, h("span", { class: "time" }, bar, label));
    const row = h("div", { class: "row", role: "treeitem", "aria-level": span.depth + 1, "aria-label": `${span.service} ${span.name}, ${took(span.duration_us)}${span.status === "ERROR" ? ", error" : ""}` }, line);
    row.style.setProperty("--colour", colours.get(span.service));
    row.dataset.span = span.span_id;
    if (open.has(index)) row.append(about(span));
    drawn.set(index, row);
    inner.append(row);
    return row;
  }

  function mark(row, index) {
    const toggle = row.querySelector("button.toggle");
    if (toggle) {
      const hidden = ends[index] - index - 1;
      setText(toggle, collapsed.has(index) ? "▸" : "▾");
      setAttribute(toggle, "aria-label", collapsed.has(index) ? `Show ${hidden} below` : "Hide what is below");
      setAttribute(row, "aria-expanded", String(!collapsed.has(index)));
    }
    setAttribute(row, "data-match", matched === null ? null : matched.has(index) ? "yes" : "no");
    setAttribute(row, "data-focus", index === focused ? "yes" : null);
    setAttribute(row, "data-open", open.has(index) ? "yes" : null);
    row.classList.toggle("failed", data.spans[index].status === "ERROR");
  }

  function fold(index) {
    if (!collapsed.delete(index)) collapsed.add(index);
    layout();
  }

  function collapse(all) {
    collapsed.clear();
    if (all) data.spans.forEach((span, index) => { if (span.depth >= 0 && ends[index] > index + 1 && index) collapsed.add(index); });
    layout();
  }

  function details(index) {
    if (open.delete(index)) drawn.get(index)?.querySelector(".details")?.remove();
    else {
      open.set(index, DETAIL_PX);
      drawn.get(index)?.append(about(data.spans[index]));
    }
    layout();
  }

  function about(span) {
    const pairs = (title, values) => {
      const entries = Object.entries(values);
      return entries.length
        ? h("div", { class: "pairs" }, h("h3", {}, title), h("dl", {}, ...entries.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value instanceof Node ? value : String(value))])))
        : null;
    };
    // The pages of what the span names, around its time.
    const at = Math.floor(span.start_us / 60e6) * 60;
    const around = new URLSearchParams({ from: at - AROUND_S, to: at + AROUND_S });
    const page = (kind, id, name) => h("a", { href: entityAddress(kind, id, around) }, name);
    const head = { service: page("service", serviceId(span.service), span.service) };
    if (SERVED.includes(span.kind)) head.endpoint = page("endpoint", endpointId(span.service, span.endpoint), span.endpoint);
    if (span.instance) head.instance = page("instance", instanceId(span.service, span.instance), span.instance);
    if (span.backend) head[span.backend.role.toLowerCase()] = page("service", span.backend.id, span.backend.name);
    Object.assign(head, { "span id": span.span_id, kind: span.kind.toLowerCase(), status: span.status.toLowerCase() });
    if (span.status_message) head["status message"] = span.status_message;
    head.start = `${took(span.start_us - data.start_us)} after the start`;
    head.duration = took(span.duration_us);
    return h(
      "div",
      { class: "details" },
      pairs("Span", head),
      pairs("Attributes", span.attributes),
      ...span.events.map((event) => pairs(`Event: ${event.name}${event.time === null ? "" : `, ${took(event.time - span.start_us)} after its start`}`, { event: event.name, ...event.attributes })),
      pairs("Resource", data.resources[span.resource_index] ?? {}),
      h("a", { href: format({ page: "traces", query: new URLSearchParams({ service: span.service, name: span.endpoint }) }) }, "Find traces with this span"),
    );
  }

  function find({ goes = true } = {}) {
    const text = search.value.trim().toLowerCase();
    matched = null;
    if (text && data) {
      matched = new Set();
      data.spans.forEach((span, index) => {
        const parts = [span.service, span.name, span.span_id, span.status_message ?? "", ...Object.entries(span.attributes).map(([key, value]) => `${key}=${value}`)];
        if (parts.some((part) => part.toLowerCase().includes(text))) matched.add(index);
      });
      const first = rows.findIndex((index) => matched.has(index));
      if (goes && first >= 0) scroller.scrollTop = Math.max(0, tops[first] - 60);
    }
    setText(hits, matched === null ? "" : `${count(matched.size)} of ${count(data.spans.length)}`);
    draw();
  }

  // Up and down move, left and right fold, Enter opens the details.
  function keys(event) {
    if (!data || event.target !== scroller) return;
    const place = Math.max(0, rows.indexOf(focused));
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = Math.min(rows.length - 1, Math.max(0, place + (event.key === "ArrowDown" ? 1 : -1)));
      focused = rows[next];
      const bottom = tops[next] + rowPx;
      if (tops[next] < scroller.scrollTop) scroller.scrollTop = tops[next];
      else if (bottom > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = bottom - scroller.clientHeight;
      draw();
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (ends[focused] === focused + 1 || collapsed.has(focused) === (event.key === "ArrowLeft")) return;
      fold(focused);
    } else if (event.key === "Enter" || event.key === " ") details(focused);
    else return;
    event.preventDefault();
  }

  return { element, show, destroy: () => resized.disconnect() };
}
