// One entity of any kind: the server describes its charts and lists, this page shows them.

import { alertMarks, alertsPanel, levelOf } from "../alerts.js";
import { get } from "../api.js";
import { h, panel, setAttribute, setChildren, setText } from "../dom.js";
import { examplesOf, spansOf } from "../examples.js";
import { apdex, bucketName, count, countOf, formatOf, grade, moment, ms, percent, plain, rate, utc } from "../format.js";
import { compareName, controls, earlier, parameters, read, write, zoomed } from "../range.js";
import { KINDS, entityAddress, exploreAddress, format, kept, traceAddress, tracesAddress } from "../route.js";
import { chartShapes, tileShapes } from "../skeleton.js";
import { bothSides, DataTable, figure, link, number, text } from "../table.js";
import { chartPanel } from "./chartpanel.js";

const TILES = [
  ["cpm", "Calls per minute", rate],
  ["avg", "Average", null],
  ["p99", "p99", null],
  ["success", "Success", percent, (n) => grade(n)],
  ["apdex", "Apdex", apdex, (n) => grade(n, 0.85, 0.7)],
];
// Charts that a page of each kind has at least, for the skeleton.
const USUAL = { service: 5, instance: 4, endpoint: 4, given: 4 };

export function entity({ page: name, query, argument, amend }) {
  const kind = KINDS[name];
  const heading = h("h1", {}, " ");
  const trail = h("div", { class: "sub trail" });
  const tags = h("span");
  const fired = h("button", { type: "button", class: "tag", hidden: true, onclick: () => alerts.element.scrollIntoView({ block: "nearest" }) });
  const links = h("nav", { class: "links", "aria-label": "More about this" });
  const range = controls((chosen) => amend((to) => write(to, chosen)), { withCompare: true });
  const body = h("div", { class: "page" }, tileShapes(USUAL[kind] ?? 4), chartShapes(USUAL[kind] ?? 4));
  const element = h(
    "div",
    { class: "page entity" },
    h("div", { class: "head" }, h("div", { class: "title" }, trail, h("div", { class: "names" }, heading, tags, fired)), links, h("span", { class: "push" }), range.element),
    body,
  );
  const groups = new Map();
  const lists = new Map();
  const alerts = alertsPanel("Alerts in this time range");
  const listing = h("div", { class: "lists" });
  let statements = null; // once it is known of what
  const nothing = h("div", { class: "panel" }, h("p", { class: "empty" }, "No values in this time range. Choose a longer range, or wait for the next commit."));
  const zoom = (from, to) => amend((now) => write(now, zoomed(read(now), from, to)));

  function reads(from) {
    query = from;
    range.show(read(query));
  }
  reads(query);

  async function load(signal) {
    const path = `entities/${kind}/${encodeURIComponent(argument)}`;
    const range = read(query);
    const data = await get(path, parameters(range), { signal });
    const before = earlier(range.compare, data);
    const [was, fired] = await Promise.all([
      before && get(path, before, { signal }),
      get("alerts", { ...parameters(range), entity: data.entity.id }, { signal }),
    ]);
    return { ...data, before: was && { name: compareName(range.compare), ...was }, alerts: fired.history, marks: alertMarks(fired.history) };
  }

  function show(data) {
    page.title = data.entity.name;
    setText(heading, data.entity.name);
    about(data.entity, data);
    const wanted = data.groups.map((described, index) => {
      const part = groups.get(described.key) ?? groups.set(described.key, groupOf(described, index, zoom)).get(described.key);
      part.show(described, data, data.groups.length > 1 || index > 0, () => query);
      return part.element;
    });
    const shown = data.lists.map((described) => {
      const part = lists.get(described.key) ?? lists.set(described.key, listOf(described, () => query)).get(described.key);
      part.show(described);
      return part.element;
    });
    setChildren(listing, shown);
    alerts.show(data.alerts, query);
    tellAlerts(data.alerts);
    if (data.statements) (statements ??= statementTable(data.statements)).show(data.statements, query);
    // Alerts come last, so that nothing moves when one fires; the head says that there are some.
    setChildren(body, [...(wanted.length ? wanted : [nothing]), ...(shown.length ? [listing] : []), ...(data.statements ? [statements.element] : []), alerts.element]);
  }

  function tellAlerts(history) {
    const fires = history.filter(({ ends_s: ended }) => ended === null);
    const levels = fires.map(({ severity }) => levelOf(severity));
    fired.hidden = !history.length;
    setText(fired, fires.length ? `${countOf(fires.length, "alert")} firing` : `${countOf(history.length, "alert")} fired`);
    fired.className = `tag ${levels.includes("bad") ? "is-bad" : fires.length ? "is-warn" : ""}`;
  }

  // Where the entity belongs, what it is, and where to look further.
  function about({ kind: of, id, ends, role, layers }, data) {
    const mark = JSON.stringify([id, ends, role, layers, query.toString(), data.from]);
    if (tags.dataset.of === mark) return;
    tags.dataset.of = mark;
    const anchors = ends.map((end) => h("a", { href: entityAddress(end.kind, end.id, query) }, end.name));
    const all = h("a", { href: format({ page: "services", query: kept(query) }) }, "All services");
    trail.replaceChildren(all, ...anchors.flatMap((anchor, index) => [index && of.endsWith("_relation") ? " → " : " / ", anchor]));
    const extra = layers.filter((layer) => layer !== "GENERAL" && !layer.startsWith("VIRTUAL_"));
    tags.replaceChildren(...[role, ...extra].map((tag) => h("span", { class: "tag" }, tag)));
    const filters = spansOf(data.entity);
    const metrics = data.groups[0]?.charts[0]?.metric;
    links.replaceChildren(
      ...(filters ? [h("a", { href: tracesAddress(filters, query), data: { link: "traces" } }, "Example traces")] : []),
      ...(metrics ? [h("a", { href: exploreAddress(metrics, [id], query) }, "Explore its metrics")] : []),
    );
  }

  const page = {
    title: argument,
    element,
    reads,
    destroy: () => groups.forEach((part) => part.destroy()),
    load,
    show,
  };
  return page;
}

// Tiles, charts and a table of values: of one group of metrics.
function groupOf({ key }, place, zoom) {
  const heading = h("h2", { class: "group-title" });
  const tiles = new Map();
  const charts = new Map();
  const row = h("dl", { class: "tiles" });
  const grid = h("div", { class: "charts" });
  const values = valuesTable(place);
  const element = h("section", { class: "page group", data: { group: key } }, heading, row, grid, values.element);

  function tile([measure, label, form, of], described, before, traces) {
    const known = tiles.get(measure) ?? tiles.set(measure, { value: h("dd"), was: h("span", { class: "why" }) }).get(measure);
    known.element ??= h("div", { class: "tile", data: { measure } }, h("dt", {}, label), known.value);
    const chart = described.charts.find((some) => some.key === measure);
    const format = form ?? formatOf(chart.unit, chart.least);
    const [figureText, unit] = format(described.range[measure]) ?? ["–", ""];
    const level = of?.(described.range[measure]);
    known.value.className = level && level !== "good" ? `is-${level}` : "";
    setText(known.was, before ? `${plain(format(before.range[measure]))} ${before.name}` : "");
    const content = [figureText, h("small", {}, unit)];
    const address = traces(measure);
    const shown = address ? [h("a", { href: address, title: "Show example traces" }, ...content)] : content;
    known.value.replaceChildren(...shown, ...(before ? [known.was] : []));
    return known.element;
  }

  return {
    element,
    destroy: () => charts.forEach((chart) => chart.destroy()),
    show(described, data, titled, query) {
      setText(heading, described.title);
      heading.hidden = !titled;
      const before = data.before?.groups.find((group) => group.key === key);
      const earlierOf = before && { ...before, name: data.before.name };
      // The callee's time is the lower one of a relation's: spans of both sides are as long at least.
      const p99s = data.entity.kind.endsWith("_relation") ? data.groups.map(({ range }) => range.p99).filter(Boolean) : [described.range.p99];
      const traces = (measure) => {
        const filters = examplesOf(data.entity, measure, measure === "p99" ? Math.min(...p99s) : described.range[measure]);
        return filters && tracesAddress(filters, query());
      };
      const present = TILES.filter(([measure]) => described.charts.some((chart) => chart.key === measure));
      row.hidden = !present.length;
      setChildren(row, present.map((settings) => tile(settings, described, earlierOf, traces)));
      const wanted = described.charts.map((chart) => {
        const part = charts.get(chart.key) ?? charts.set(chart.key, chartPanel(`${place}-${chart.key}`, zoom)).get(chart.key);
        const was = before?.charts.find((some) => some.key === chart.key);
        part.show({
          title: chart.title,
          unit: chart.unit,
          least: chart.least,
          lines: chart.series,
          before: was ? { name: data.before.name, lines: was.series } : null,
          times: data.times,
          incomplete: data.incomplete,
          marks: data.marks,
          href: exploreAddress(chart.metric, [data.entity.id], query()),
          metric: chart.metric,
          traces: traces(chart.key),
        });
        return part.element;
      });
      for (const [name, part] of charts) {
        if (!described.charts.some((chart) => chart.key === name)) {
          part.destroy();
          charts.delete(name);
        }
      }
      setChildren(grid, wanted);
      values.show(described, data, titled);
    },
  };
}

// The values of the charts as a table, also for screen readers.
function valuesTable(place) {
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values over time" });
  const element = h("details", { class: "panel values", ontoggle: () => draw() }, h("summary", {}, "Values as a table"), scroll);
  let latest = null;
  let shape = "";
  let table = null;

  function columns() {
    const at = { key: "at", label: "From", header: true, make: (cell) => (row) => { setText(cell, bucketName(row.at, latest.data.incomplete)); cell.title = utc(row.at); } };
    return [
      at,
      ...latest.described.charts.flatMap((chart, c) =>
        chart.series.map((line, s) => ({
          key: `${c} ${s}`,
          label: line.label || chart.title,
          numeric: true,
          make: figure((row) => formatOf(chart.unit, chart.least)(row.values[c]?.[s] ?? null)),
        })),
      ),
    ];
  }

  function draw() {
    if (!element.open || !latest) return;
    const { described, data, titled } = latest;
    const now = JSON.stringify(described.charts.map((chart) => [chart.key, chart.unit, chart.least, chart.series.map(({ label }) => label)]));
    if (now !== shape) {
      shape = now;
      table = new DataTable({ caption: titled && place ? `Values over time: ${described.title}` : "Values over time", columns: columns(), key: (row) => row.at });
      scroll.replaceChildren(table.element);
    }
    table.update(data.times.map((at, i) => ({ at, values: described.charts.map((chart) => chart.series.map((line) => line.values[i])) })).reverse());
  }

  return {
    element,
    show(described, data, titled) {
      latest = { described, data, titled };
      element.hidden = !described.charts.length;
      draw();
    },
  };
}

// A list of other entities, each with a link to its page and, if there is one, to the relation.
function listOf({ key, title, label }, query) {
  const relations = ["callers", "callees"].includes(key);
  const columns = [
    {
      key: "name",
      label,
      header: true,
      value: (row) => row.name,
      make: link((row) => ({ text: row.name, href: entityAddress(row.kind, row.id, query()) })),
    },
    number("cpm", "Calls/min", rate),
    ...(relations
      ? [
          ...bothSides("avg", "Average", formatOf("ms")),
          ...bothSides("success", "Success", percent, grade),
          { key: "relation", label: "Relation", make: link((row) => ({ text: "Details", href: entityAddress(row.relation_kind, row.relation_id, query()), title: `The calls in detail: ${row.name}` })) },
        ]
      : [number("avg", "Average", formatOf("ms")), number("p99", "p99", formatOf("ms")), number("success", "Success", percent, grade)]),
  ];
  const table = new DataTable({ caption: title, columns, key: (row) => row.relation_id ?? row.id, sort: { key: "cpm", order: "desc" } });
  const part = listPanel(title, key, table);
  part.element.classList.toggle("wide", relations); // it has the values of both sides
  return part;
}

function listPanel(title, key, table) {
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table.element);
  const empty = h("p", { class: "empty" });
  const { element, note } = panel(title, { id: `list-${key}` });
  return {
    element,
    show({ rows, left_out: left, empty: none }) {
      setText(note, rows.length ? `${count(rows.length)}${left ? ` busiest; ${count(left)} more not shown` : ""}` : "");
      setText(empty, none ?? "");
      setChildren(element, [element.firstChild, rows.length ? scroll : empty]);
      table.update(rows);
    },
  };
}

// The slow statements of a service or database, or the slow commands of a cache.
function statementTable({ title, label }) {
  let query = new URLSearchParams();
  const table = new DataTable({
    caption: title,
    columns: [
      { key: "statement", label, header: true, className: "statement", make: text((row) => row.statement) },
      {
        key: "database",
        label: label === "Command" ? "Cache" : "Database",
        value: (row) => row.database_name,
        make: link((row) => ({ text: row.database_name ?? "–", href: row.database_id && entityAddress("service", row.database_id, query) })),
      },
      number("latency", "Slowest", ms),
      { ...number("runs", "Runs", (n) => (n ? [count(n), ""] : null)), title: `Executions of ${label.toLowerCase()}s of this form, slow or not` },
      { ...number("total_ms", "Total time", (n) => (n ? ms(n) : null)), title: "Total time of these executions" },
      {
        key: "time",
        label: "Time",
        numeric: true,
        className: "nowrap",
        value: (row) => row.time_us,
        make: (cell) => {
          const anchor = h("a");
          cell.append(anchor);
          return (row) => {
            setText(anchor, moment(row.time_us / 1e6, true));
            setAttribute(anchor, "href", row.trace_id ? traceAddress(row.trace_id) : null);
            cell.title = `${utc(row.time_us / 1e6)}, trace ${row.trace_id}`;
          };
        },
      },
    ],
    key: (row) => `${row.trace_id} ${row.time_us} ${row.statement}`,
    sort: { key: "latency", order: "desc" },
  });
  const shown = listPanel(title, "statements", table);
  return {
    element: shown.element,
    show(data, now) {
      query = now;
      shown.show(data);
    },
  };
}
