// Search for traces: a form, a scatter of durations over time, and the traces that were found.

import { get, request } from "../api.js";
import { h, panel, setChildren, setText, svg } from "../dom.js";
import { serviceId } from "../examples.js";
import { clock, count, moment, ms, plain, utc } from "../format.js";
import { controls, parameters, read, write } from "../range.js";
import { serviceAddress, traceAddress } from "../route.js";
import { panelShape } from "../skeleton.js";

const FIELDS = ["service", "name", "peer", "status", "kind", "min_ms", "max_ms", "attribute", "limit"];
const SIZE = { height: 190, left: 66, bottom: 26, top: 16, right: 12 };
const DOT = 11; // the largest radius

export function traces({ query, amend, go }) {
  const range = controls((chosen) => amend((to) => write(to, chosen)), { withGrain: false });
  const names = { services: {} };
  const form = searchForm((chosen) =>
    amend((to) => {
      for (const name of FIELDS) to.delete(name);
      for (const [name, value] of chosen) to.append(name, value);
    }),
  );
  const scatter = h("div", { class: "scatter" });
  const resized = new ResizeObserver(() => draw());
  let latest = null;
  const list = h("ol", { class: "found" });
  const empty = h("p", { class: "empty" });
  const dots = panel("Duration over time", { id: "scatter", sub: "one dot for each trace below; red: with an error" }, h("div", { class: "body" }, scatter));
  const found = panel("Traces", { id: "found" }, list, empty);
  const body = h("div", { class: "page" }, panelShape(246), panelShape(460));
  const element = h(
    "div",
    { class: "page traces" },
    h("div", { class: "head" }, h("h1", {}, "Traces"), h("span", { class: "push" }), range.element),
    form.element,
    body,
  );

  function reads(from) {
    query = from;
    range.show(read(query));
    form.show(query);
  }
  reads(query);

  // As wide as the panel, so that its texts have the same size on each screen.
  function draw() {
    const width = Math.floor(scatter.clientWidth);
    if (latest !== null && width) scatter.replaceChildren(plot(latest, width, go));
  }
  resized.observe(scatter);

  return {
    title: "Traces",
    element,
    reads,
    destroy: () => resized.disconnect(),
    async load(signal) {
      const url = new URLSearchParams();
      for (const name of FIELDS) for (const value of query.getAll(name)) if (value) url.append(name, value);
      const time = parameters(read(query));
      // An address may have its own times, such as now-2h.
      url.set("from", query.get("from") || time.from);
      url.set("to", query.get("to") || time.to);
      const response = await request(`traces?${url}`, {}, { signal });
      const data = await response.json();
      if (!names.loaded) {
        names.loaded = true;
        get("traces/services").then(({ services }) => form.suggest(services), () => { names.loaded = false; });
      }
      return data;
    },
    show(data) {
      setChildren(body, [dots.element, found.element]);
      const longest = Math.max(1, ...data.traces.map((trace) => trace.duration_us));
      list.replaceChildren(...data.traces.map((trace) => row(trace, longest, query)));
      const note = data.traces.length ? [`${count(data.traces.length)}${data.more ? ", the newest; there are more" : ""}`] : [];
      if (data.unreadable_files) note.push(`${count(data.unreadable_files)} damaged ${data.unreadable_files === 1 ? "file" : "files"} left out`);
      setText(found.note, note.join(" · "));
      empty.hidden = data.traces.length > 0;
      setText(empty, nothing(data));
      dots.element.hidden = data.traces.length === 0;
      latest = data;
      draw();
    },
  };
}

function nothing({ oldest_s: oldest, from }) {
  if (oldest === null) return "No spans are kept yet: they appear here after the first commit.";
  const since = from < oldest ? ` Spans are kept from ${moment(oldest)} on.` : "";
  return `No trace matches in this time range.${since}`;
}

function searchForm(on) {
  const services = h("datalist", { id: "trace-services" });
  const endpoints = h("datalist", { id: "trace-endpoints" });
  let known = {};
  const field = (name, label, properties) => {
    const input = h("input", { name, autocomplete: "off", spellcheck: "false", ...properties });
    return { input, element: h("label", {}, label, input) };
  };
  const service = field("service", "Service", { list: "trace-services", placeholder: "any" });
  const endpoint = field("name", "Endpoint or span name", { list: "trace-endpoints", placeholder: "any" });
  const peer = field("peer", "Calls to", { placeholder: "any" });
  const status = h("select", { name: "status" }, h("option", { value: "" }, "Any"), h("option", { value: "error" }, "Error"), h("option", { value: "ok" }, "No error"));
  const kind = h("select", { name: "kind" }, h("option", { value: "" }, "Any"), ...["Server", "Client", "Producer", "Consumer", "Internal"].map((name) => h("option", { value: name.toLowerCase() }, name)));
  const least = field("min_ms", "Longer than (ms)", { type: "number", min: "0", step: "any" });
  const most = field("max_ms", "Shorter than (ms)", { type: "number", min: "0", step: "any" });
  const attribute = field("attribute", "Attributes", { placeholder: "http.route=/orders" });
  const limit = h("select", { name: "limit" }, ...["20", "50", "100", "500"].map((value) => h("option", { value: value === "20" ? "" : value }, value)));
  const element = h(
    "form",
    { class: "panel search", role: "search", "aria-label": "Traces", onsubmit: submit },
    service.element, endpoint.element, peer.element, h("label", {}, "Kind", kind), h("label", {}, "Status", status), least.element, most.element,
    attribute.element, h("label", {}, "At most", limit), h("button", { class: "primary", type: "submit" }, "Find traces"), services, endpoints,
  );

  function fillEndpoints() {
    const names = known[service.input.value] ?? [];
    endpoints.replaceChildren(...names.slice(0, 500).map((value) => h("option", { value })));
  }
  service.input.addEventListener("input", fillEndpoints);

  // Several attributes stand beside each other; a value with spaces is in quotes.
  const pairs = (text) => [...text.matchAll(/([^\s=]+)=(?:"([^"]*)"|(\S*))/g)].map(([, key, quoted, bare]) => `${key}=${quoted ?? bare}`);

  function submit(event) {
    event.preventDefault();
    const text = attribute.input.value.trim();
    attribute.input.setCustomValidity(text && !pairs(text).length ? "A key and a value, such as http.route=/orders" : "");
    if (!attribute.input.reportValidity()) return;
    const chosen = [];
    for (const input of [service.input, endpoint.input, peer.input, kind, status, least.input, most.input, limit]) {
      if (input.value.trim()) chosen.push([input.name, input.value.trim()]);
    }
    on([...chosen, ...pairs(text).map((pair) => ["attribute", pair])]);
  }
  attribute.input.addEventListener("input", () => attribute.input.setCustomValidity(""));

  return {
    element,
    show(query) {
      for (const input of [service.input, endpoint.input, peer.input, kind, status, least.input, most.input, limit]) input.value = query.get(input.name) ?? "";
      attribute.input.value = query.getAll("attribute").map(quoted).join(" ");
      fillEndpoints();
    },
    suggest(from) {
      known = from;
      services.replaceChildren(...Object.keys(known).map((value) => h("option", { value })));
      fillEndpoints();
    },
  };
}

function quoted(pair) {
  const [key, ...rest] = pair.split("=");
  const value = rest.join("=");
  return /\s/.test(value) ? `${key}="${value}"` : pair;
}

const at = (trace) => trace.start_us / 1e6;

function row(trace, longest, query) {
  const bar = h("span", { class: "length", "aria-hidden": "true" });
  bar.style.width = `${Math.max(0.3, (100 * trace.duration_us) / longest)}%`;
  const services = Object.entries(trace.services);
  return h(
    "li",
    { class: trace.errors ? "bad" : "" },
    bar,
    h(
      "div",
      { class: "line" },
      h("a", { href: traceAddress(trace.trace_id) }, h("b", {}, trace.service), " ", trace.name || "(no name)"),
      h("code", { class: "id" }, trace.trace_id.slice(0, 7)),
      h("span", { class: "push took" }, plain(ms(trace.duration_us / 1000))),
    ),
    h(
      "div",
      { class: "line soft" },
      h("span", {}, `${count(trace.spans)} ${trace.spans === 1 ? "span" : "spans"}`),
      trace.errors ? h("span", { class: "tag is-bad" }, `${count(trace.errors)} ${trace.errors === 1 ? "error" : "errors"}`) : null,
      ...services.slice(0, 6).map(([name, spans]) => h("a", { class: "tag", href: serviceAddress(serviceId(name), query) }, `${name} (${spans})`)),
      services.length > 6 ? h("span", {}, `and ${services.length - 6} more`) : null,
      h("span", { class: "push", title: utc(at(trace)) }, moment(at(trace), true)),
    ),
  );
}

// Durations on a logarithmic scale: they differ by orders of magnitude.
function plot(data, width, go) {
  const { height, left, bottom, top, right } = SIZE;
  const picture = svg("svg", { width, height, role: "img", "aria-label": "Durations of the traces over time; the list below has the values" });
  if (!data.traces.length) return picture;
  const times = data.traces.map(at);
  const [first, last] = [Math.min(...times), Math.max(...times)];
  const logs = data.traces.map((trace) => Math.log10(Math.max(1, trace.duration_us)));
  const low = Math.floor(Math.min(...logs));
  const high = Math.max(low + 1, Math.ceil(Math.max(...logs)));
  const x = (time) => left + ((width - left - right) * (last > first ? (time - first) / (last - first) : 0.5));
  const y = (log) => height - bottom - ((height - bottom - top) * (log - low)) / (high - low);
  for (let power = low; power <= high; power += 1) {
    picture.append(
      svg("line", { x1: left - DOT, x2: width - right + DOT, y1: y(power), y2: y(power), class: "grid" }),
      svg("text", { x: left - DOT - 6, y: y(power) + 4, "text-anchor": "end" }, plain(ms(10 ** power / 1000))),
    );
  }
  for (const [time, anchor] of last > first ? [[first, "start"], [last, "end"]] : [[first, "middle"]]) {
    picture.append(svg("text", { x: x(time), y: height - 5, "text-anchor": anchor }, clock(time, true)));
  }
  data.traces.forEach((trace, index) => {
    const dot = svg("circle", { cx: x(times[index]), cy: y(logs[index]), r: Math.min(DOT, 4 + Math.log2(trace.spans)), class: trace.errors ? "dot bad" : "dot", onclick: () => go({ page: "trace", argument: trace.trace_id }) });
    dot.append(svg("title", {}, `${trace.service} ${trace.name}: ${plain(ms(trace.duration_us / 1000))}`));
    picture.append(dot);
  });
  return picture;
}
