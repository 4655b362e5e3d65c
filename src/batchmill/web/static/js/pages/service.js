// One service: charts, endpoints, instances, callers, callees and slow statements.

import { alertMarks, alertsPanel } from "../alerts.js";
import { get } from "../api.js";
import { TimeChart } from "../charts.js";
import { h, panel, setChildren, setText } from "../dom.js";
import { apdex, averageMs, count, grade, moment, ms, percent, rankMs, rate, utc } from "../format.js";
import { BUCKET_S, controls, parameters, read, write } from "../range.js";
import { format, kept, serviceAddress, tracesAddress } from "../route.js";
import { bothSides, DataTable, figure, link, number, text } from "../table.js";

const PERCENTILES = ["p50", "p75", "p90", "p95", "p99"];
const share = (_u, low) => [Math.max(0, Math.min(0.98, (low ?? 1) - 0.01)), 1.0005];
const score = (_u, low) => [Math.max(0, Math.min(0.5, (low ?? 1) - 0.05)), 1.005];
// Which traces are examples of a number.
const EXAMPLES = {
  p99: (value) => (value ? { min_ms: Math.floor(value * 0.98), kind: "server" } : null),
  success: (value) => (value !== null && value < 1 ? { status: "error" } : null),
};
const CHARTS = [
  { key: "cpm", title: "Load", unit: "calls per minute", format: rate, fill: true },
  { key: "avg", title: "Average response time", unit: "", format: ms, value: averageMs, fill: true },
  { key: "percentiles", title: "Response time percentiles", unit: "pN: N % of calls were at least this fast, to within 2 %", format: ms, value: rankMs },
  { key: "success", title: "Success rate", unit: "share of calls without an error", format: percent, range: share },
  { key: "apdex", title: "Apdex", unit: "score from 0 to 1", format: apdex, range: score },
];

export function service({ query, argument, amend }) {
  const heading = h("h1", {}, "Service");
  const tags = h("span");
  const back = h("a", {}, "All services");
  const range = controls((chosen) => amend((to) => write(to, chosen)));
  const tiles = summary();
  const alerts = alertsPanel("Alerts in this time range");
  const charts = CHARTS.map(chartOf);
  const values = valuesTable();
  const endpoints = measured("Endpoints", "endpoints", "Endpoint");
  const instances = measured("Instances", "instances", "Instance");
  const callers = related("Called by", "callers", "No calls from other services in this time range.");
  const callees = related("Calls", "callees", "No calls to other services in this time range.");
  const statements = statementTable();
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "head" }, h("div", {}, h("div", { class: "sub" }, back), heading), tags, h("span", { class: "push" }), range.element),
    tiles.element,
    alerts.element,
    h("div", { class: "charts" }, ...charts.map((chart) => chart.element)),
    values.element,
    endpoints.element,
    h("div", { class: "pair" }, callers.element, callees.element),
    instances.element,
    statements.element,
  );

  function reads(from) {
    query = from;
    range.show(read(query));
    back.setAttribute("href", format({ page: "services", query: kept(query) }));
  }
  reads(query);

  const page = {
    title: argument,
    element,
    reads,
    destroy: () => charts.forEach(({ chart }) => chart.destroy()),
    load: async (signal) => {
      const range = parameters(read(query));
      const [data, fired] = await Promise.all([
        get(`services/${encodeURIComponent(argument)}`, range, { signal }),
        get("alerts", { ...range, entity: argument }, { signal }),
      ]);
      return { ...data, fired };
    },
    show(data) {
      page.title = data.service.name;
      setText(heading, data.service.name);
      const layers = data.service.layers ?? [];
      if (tags.dataset.of !== layers.join()) {
        tags.dataset.of = layers.join();
        tags.replaceChildren(...layers.map((layer) => h("span", { class: "tag" }, layer)));
      }
      tiles.show(data.range, data.service.name, query);
      for (const chart of charts) {
        chart.show(data);
        chart.chart.mark(alertMarks(data.fired.history));
      }
      alerts.show(data.fired.history, query);
      values.show(data);
      for (const list of [endpoints, instances, callers, callees, statements]) list.show(data, query);
    },
  };
  return page;
}

function summary() {
  const shown = [
    ["cpm", "Calls per minute", rate],
    ["avg", "Average", averageMs],
    ["p99", "p99", rankMs],
    ["success", "Success", percent, (n) => grade(n)],
    ["apdex", "Apdex", apdex, (n) => grade(n, 0.85, 0.7)],
  ].map(([key, label, form, of]) => ({ key, form, of, label, value: h("dd", {}, "–") }));
  const element = h("dl", { class: "tiles" }, ...shown.map(({ label, value }) => h("div", { class: "tile" }, h("dt", {}, label), value)));
  return {
    element,
    show(range, name, query) {
      for (const { key, form, of, value } of shown) {
        const [number, unit] = form(range[key]) ?? ["–", ""];
        const level = of?.(range[key]);
        value.className = level && level !== "good" ? `is-${level}` : "";
        const text = [number, h("small", {}, unit)];
        const examples = EXAMPLES[key]?.(range[key]);
        if (!examples) value.replaceChildren(...text);
        else value.replaceChildren(h("a", { href: tracesAddress({ service: name, ...examples }, query), title: "Show example traces" }, ...text));
      }
    },
  };
}

function chartOf({ key, title, unit, format: form, value, fill, range }) {
  const series = key === "percentiles" ? PERCENTILES.map((name) => ({ label: name, colour: `--${name}` })) : [{ label: title, colour: "--series-1", fill }];
  const chart = new TimeChart({ title: `${title} over time; the table below has the values`, series, format: form, value, range, sync: "service" });
  const { element } = panel(title, { sub: unit, id: `chart-${key}` }, h("div", { class: "body" }, chart.element));
  if (key === "percentiles") element.classList.add("wide");
  return {
    element,
    chart,
    show({ times, series: values, incomplete }) {
      chart.update(times, key === "percentiles" ? PERCENTILES.map((name) => values.percentiles?.[name] ?? times.map(() => null)) : [values[key] ?? times.map(() => null)], incomplete);
    },
  };
}

// The values of the charts as a table, also for screen readers.
function valuesTable() {
  const columns = [
    { key: "at", label: "From", header: true, make: (cell) => (row) => { setText(cell, `${moment(row.at)}${row.filling ? " (incomplete)" : ""}`); cell.title = utc(row.at); } },
    { key: "cpm", label: "Calls/min", numeric: true, make: figure((row) => rate(row.cpm)) },
    { key: "avg", label: "Average", numeric: true, make: figure((row) => averageMs(row.avg)) },
    ...PERCENTILES.map((key) => ({ key, label: key, numeric: true, make: figure((row) => rankMs(row[key])) })),
    { key: "success", label: "Success", numeric: true, make: figure((row) => percent(row.success)) },
    { key: "apdex", label: "Apdex", numeric: true, make: figure((row) => apdex(row.apdex)) },
  ];
  const table = new DataTable({ caption: "Values over time", columns, key: (row) => row.at });
  let latest = null;
  const element = h(
    "details",
    { class: "panel values", ontoggle: () => draw() },
    h("summary", {}, "Values as a table"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values over time" }, table.element),
  );

  function draw() {
    if (!element.open || !latest) return;
    const { times, series, incomplete } = latest;
    const rows = times.map((at, i) => ({
      at,
      filling: incomplete !== null && at >= incomplete,
      cpm: series.cpm?.[i],
      avg: series.avg?.[i],
      success: series.success?.[i],
      apdex: series.apdex?.[i],
      ...Object.fromEntries(PERCENTILES.map((key) => [key, series.percentiles?.[key]?.[i]])),
    }));
    table.update(rows.reverse());
  }

  return {
    element,
    show(data) {
      latest = data;
      draw();
    },
  };
}

function listed(title, key, columns, none, options = {}) {
  const table = new DataTable({ caption: title, columns, key: options.key ?? ((row) => row.id), sort: options.sort ?? { key: "cpm", order: "desc" } });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table.element);
  const empty = h("p", { class: "empty" }, none);
  const { element, note } = panel(title, { id: `list-${key}` });
  return {
    element,
    show(data) {
      const rows = data[key] ?? [];
      const left = data.left_out?.[key] ?? 0;
      setText(note, rows.length ? `${count(rows.length)}${left ? ` busiest; ${count(left)} more not shown` : ""}` : "");
      setChildren(element, [element.firstChild, rows.length ? scroll : empty]);
      table.update(rows);
    },
  };
}

function measured(title, key, label) {
  return listed(
    title,
    key,
    [
      { key: "name", label, header: true, value: (row) => row.name, make: text((row) => row.name) },
      number("cpm", "Calls/min", rate),
      number("avg", "Average", averageMs),
      number("p99", "p99", rankMs),
      number("success", "Success", percent, grade),
    ],
    `No calls to ${key} in this time range.`,
  );
}

function related(title, key, none) {
  let query = new URLSearchParams();
  const list = listed(
    title,
    key,
    [
      { key: "name", label: "Service", header: true, value: (row) => row.name, make: link((row) => ({ text: row.name, href: serviceAddress(row.id, query) })) },
      number("cpm", "Calls/min", rate),
      ...bothSides("avg", "Average", averageMs),
      ...bothSides("success", "Success", percent, grade),
    ],
    none,
  );
  return {
    element: list.element,
    show(data, now) {
      query = now;
      list.show(data);
    },
  };
}

function statementTable() {
  return listed(
    "Slow statements",
    "statements",
    [
      { key: "statement", label: "Statement", header: true, className: "statement", make: text((row) => row.statement) },
      { key: "database", label: "Database", value: (row) => row.database, make: text((row) => row.database ?? "–") },
      number("latency", "Slowest", ms),
      { ...number("runs", "Runs", (n) => (n ? [count(n), ""] : null)), title: "Executions of statements of this form, slow or not" },
      { ...number("total_ms", "Total time", (n) => (n ? ms(n) : null)), title: "Total time of these executions" },
      {
        key: "time",
        label: "Time",
        numeric: true,
        className: "nowrap",
        value: (row) => row.time,
        make: (cell) => (row) => {
          const address = format({ page: "trace", argument: row.trace_id });
          cell.replaceChildren(row.trace_id ? h("a", { href: address }, moment(row.time, true)) : moment(row.time, true));
          cell.title = `${utc(row.time)}, trace ${row.trace_id}`;
        },
      },
    ],
    "No database statements in this time range.",
    { key: (row) => `${row.trace_id} ${row.time} ${row.statement}`, sort: { key: "latency", order: "desc" } },
  );
}
