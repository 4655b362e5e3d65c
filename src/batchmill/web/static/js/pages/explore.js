// The explorer: any metric of the store, of any entities, as a chart, as a table and as a query.

import { alertMarks } from "../alerts.js";
import { get } from "../api.js";
import { h, panel, setAttribute, setChildren, setText } from "../dom.js";
import { nameIn } from "../examples.js";
import { bucketName, count, countOf, formatOf, isFilling, utc } from "../format.js";
import { BUCKET_S, compareName, controls, earlier, parameters, read, write, zoomed } from "../range.js";
import { entityAddress } from "../route.js";
import { panelShape } from "../skeleton.js";
import { DataTable, figure } from "../table.js";
import { chartPanel } from "./chartpanel.js";

const MOST_LINES = 8;
const MOST_ENTITIES = 100;
const MOST_ALERTS = 1000;
const TABLE_ROWS = 100; // that `batchmill query` prints without a limit
const RANKS = ["p50", "p75", "p90", "p95", "p99"];

export function explore({ query, amend, run }) {
  const range = controls((chosen) => amend((to) => write(to, chosen)), { withCompare: true });
  const picker = metricPicker((name) =>
    amend((to) => {
      for (const key of ["entity", "label", "search"]) to.delete(key);
      to.set("metric", name);
    }),
  );
  const about = h("p", { class: "definition" });
  const search = h("input", { type: "search", placeholder: "Search entities", "aria-label": "Search entities", spellcheck: "false", oninput: typed });
  const label = h("select", { onchange: () => amend((to) => to.set("label", label.value)) });
  const labelField = h("label", { class: "field", hidden: true }, "Label", label);
  const clear = h("button", { type: "button", hidden: true, onclick: () => amend((to) => to.delete("entity")) }, "Show the largest again");
  const chart = chartPanel("explore", (from, to) => amend((now) => write(now, zoomed(read(now), from, to))), { height: 300 });
  const table = entityTable(() => query, choose);
  const values = valuesTable();
  const copies = copyPanel();
  const shown = h("span", { class: "shown", role: "status" });
  const { element: list } = panel("Entities", { id: "explore-entities" }, table.element);
  list.firstChild.append(shown, h("span", { class: "push" }), search, labelField, clear);
  const none = h("div", { class: "panel" }, h("p", { class: "empty" }));
  const result = h("div", { class: "page" }, panelShape(460));
  const element = h(
    "div",
    { class: "page explore" },
    h("div", { class: "head" }, h("h1", {}, "Explore"), h("span", { class: "push" }), range.element),
    h("div", { class: "explorer" }, picker.element, h("div", { class: "page" }, about, result)),
  );
  let metrics = null;
  let typing = null;

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(() => amend((to) => (search.value ? to.set("search", search.value) : to.delete("search")), { replace: query.has("search") }), 200);
  }

  // Entities are chosen one by one, beginning with the largest, which are drawn by default.
  function choose(id, wanted, drawn) {
    amend((to) => {
      const ids = (to.has("entity") ? to.getAll("entity") : [...drawn]).filter((other) => other !== id);
      to.delete("entity");
      for (const other of wanted ? [...ids, id] : ids) to.append("entity", other);
    });
  }

  function reads(from) {
    query = from;
    range.show(read(query));
    if (document.activeElement !== search) search.value = query.get("search") ?? "";
    clear.hidden = !query.has("entity");
  }
  reads(query);

  async function load(signal) {
    const range = read(query);
    metrics = (await get("metrics", {}, { signal })).metrics;
    run.status ??= await get("status", {}, { signal }); // the command names the store
    const metric = metrics.find(({ name }) => name === query.get("metric")) ?? (query.has("metric") ? { name: query.get("metric") } : preferred(metrics));
    if (!metric) return { metric: null };
    const path = `metrics/${encodeURIComponent(metric.name)}/values`;
    const chosen = query.getAll("entity");
    const wanted = { search: query.get("search"), order: "top", limit: MOST_ENTITIES };
    const requests = [get(path, { ...parameters(range), ...wanted }, { signal })];
    if (chosen.length) requests.push(get(path, { ...parameters(range), entity: chosen, order: "top" }, { signal }));
    const [all, own = all] = await Promise.all(requests);
    const before = earlier(range.compare, own);
    const drawn = drawnOf(own, chosen);
    const ids = drawn.map(({ entity_id: id }) => id);
    const [was, { history }] = await Promise.all([
      before && get(path, { ...before, entity: ids }, { signal }).catch(ignoreMissing),
      get("alerts", { ...parameters(range), entity: ids.length === 1 ? ids : [], limit: MOST_ALERTS }, { signal }),
    ]);
    const fired = history.filter(({ entity_id: id }) => ids.includes(id));
    return { metric, all, own, drawn, chosen, before: was && { name: compareName(range.compare), ...was }, marks: alertMarks(fired, ids.length > 1) };
  }

  function show({ metric, all, own, drawn, chosen, before, marks }) {
    picker.show(metrics, metric?.name);
    if (!metric) {
      setText(none.firstChild, "The store has no metrics yet. They appear here after the first commit.");
      setChildren(result, [none]);
      return;
    }
    page.title = metric.name;
    setText(about, metric.definition && `${metric.name} = ${metric.definition};`);
    const labels = labelsOf(metric, own.series);
    const one = drawn.length === 1;
    const label = labels.includes(query.get("label")) ? query.get("label") : (labels.includes("p99") ? "p99" : labels[0]);
    showLabels(labels, label, one);
    const shape = { metric, label };
    const lines = linesOf(shape, drawn, one ? labels : [label]);
    chart.show({
      title: metric.name,
      unit: metric.unit,
      least: metric.least,
      lines,
      before: before && { name: before.name, lines: linesOf(shape, before.series, one ? labels : [label]) },
      times: own.times,
      incomplete: own.incomplete,
      marks,
    });
    const ids = new Set(drawn.map(({ entity_id: id }) => id));
    const missing = own === all ? [] : own.series.filter(({ entity_id: id }) => !all.series.some((other) => other.entity_id === id));
    table.show(shape, [...missing, ...all.series], ids, own);
    const total = all.series.length + all.left_out;
    setText(shown, `${countOf(total, "entity", "entities")}${all.left_out ? `, the largest ${count(all.series.length)} are listed` : ""}; ${chosen.length ? `${count(drawn.length)} chosen` : `the largest ${count(drawn.length)} are drawn`}`);
    values.show(shape, lines, own);
    const everything = !chosen.length && !query.get("search") && drawn.length === total;
    copies.show(metric, drawn, { chosen: chosen.length > 0, all: everything }, own, run.status?.store.url);
    setText(none.firstChild, query.get("search") ? `No entity with “${query.get("search")}” in its name has values of ${metric.name} in this time range.` : `No values of ${metric.name} in this time range. Choose a longer range.`);
    setChildren(result, [...(lines.length ? [chart.element] : [none]), list, ...(lines.length ? [values.element] : []), copies.element]);
  }

  function showLabels(labels, now, one) {
    labelField.hidden = labels.length < 2 || one;
    if (label.dataset.of !== labels.join()) {
      label.dataset.of = labels.join();
      label.replaceChildren(...labels.map((text) => h("option", { value: text }, text)));
    }
    label.value = now ?? "";
  }

  const page = {
    title: "Explore",
    element,
    reads,
    destroy() {
      clearTimeout(typing);
      chart.destroy();
    },
    load,
    show,
  };
  return page;
}

const ignoreMissing = (error) => {
  if (error.status !== 404) throw error;
  return { series: [] };
};

const preferred = (metrics) => metrics.find(({ name }) => name === "service_cpm") ?? metrics.find(({ active }) => active) ?? metrics[0];

const drawnOf = ({ series }, chosen) => (chosen.length ? series.filter((line) => chosen.includes(line.entity_id) || chosen.includes(line.entity_name)) : series).slice(0, MOST_LINES);

// The percentiles have labels such as {p=99}, or the number of their rank.
function labelText(metric, label) {
  const rank = /^\{p=(\d+)\}$/.exec(label);
  if (rank) return `p${rank[1]}`;
  return metric.function === "percentile" ? (RANKS[Number(label)] ?? label) : label;
}

function labelsOf(metric, series) {
  if (!metric.labelled) return [""];
  const sizes = new Map();
  for (const { over } of series) {
    for (const [label, n] of Object.entries(over ?? {})) {
      const text = labelText(metric, label);
      sizes.set(text, Math.max(n, sizes.get(text) ?? 0));
    }
  }
  const labels = [...sizes.keys()];
  if (labels.every((text) => RANKS.includes(text))) return labels.sort();
  return labels.sort((a, b) => sizes.get(b) - sizes.get(a)).slice(0, 12);
}

// A number to show, of a value of the API: one of its labels, in the shown unit.
function numberOf({ metric, label }, value) {
  if (value === null || value === undefined) return null;
  let n = value;
  if (typeof value === "object") {
    const key = Object.keys(value).find((some) => labelText(metric, some) === label);
    if (key === undefined) return null;
    n = value[key];
  }
  return n / (metric.factor ?? 1);
}

function linesOf(shape, series, labels) {
  return series.flatMap(({ entity_name: name, values }) =>
    labels.map((label) => ({
      label: labels.length > 1 ? label : name,
      values: values.map((value) => numberOf({ ...shape, label }, value)),
    })),
  );
}

// The metrics, by event type; searched by any part of name or definition.
function metricPicker(choose) {
  const search = h("input", { type: "search", placeholder: "Search metrics", "aria-label": "Search metrics", spellcheck: "false", oninput: () => filter() });
  const list = h("div", { class: "metrics", role: "listbox", "aria-label": "Metrics" });
  const { element, note } = panel("Metrics", { id: "explore-metrics" }, h("div", { class: "body" }, search), list);
  element.classList.add("picker");
  let rows = [];
  let shape = "";

  function filter() {
    const wanted = search.value.toLowerCase();
    for (const { option, text, group } of rows) {
      option.hidden = !text.includes(wanted);
      group.hidden = true;
    }
    for (const { option, group } of rows) if (!option.hidden) group.hidden = false;
  }

  return {
    element,
    show(metrics, current) {
      const now = metrics.map(({ name, definition }) => name + definition).join();
      if (now !== shape) {
        shape = now;
        rows = [];
        const groups = new Map();
        for (const metric of metrics) {
          const group = groups.get(metric.source) ?? groups.set(metric.source, h("div", { role: "group", "aria-label": metric.source }, h("h3", {}, metric.source))).get(metric.source);
          const option = h("button", { type: "button", role: "option", title: metric.definition, data: { metric: metric.name }, onclick: () => choose(metric.name) }, metric.name);
          group.append(option);
          rows.push({ option, group, name: metric.name, text: `${metric.name} ${metric.definition}`.toLowerCase() });
        }
        list.replaceChildren(...groups.values());
        setText(note, countOf(metrics.length, "metric"));
        filter();
      }
      for (const { option, name } of rows) {
        const chosen = name === current;
        if (chosen && option.getAttribute("aria-selected") !== "true") list.scrollTop = Math.max(0, option.offsetTop - list.offsetTop - list.clientHeight / 2);
        setAttribute(option, "aria-selected", chosen);
      }
    },
  };
}

function entityTable(query, choose) {
  let drawn = new Set();
  let shape = { metric: { unit: "", least: 1 }, label: "" };
  const form = (n) => formatOf(shape.metric.unit, shape.metric.least)(n);
  const column = (key, label, title) => ({ key, label, title, numeric: true, value: (row) => row[key], make: figure((row) => form(row[key])) });
  const table = new DataTable({
    caption: "Entities",
    columns: [
      {
        key: "drawn",
        label: "Drawn",
        make(cell) {
          const box = h("input", { type: "checkbox", onchange: () => choose(box.dataset.id, box.checked, drawn) });
          cell.append(box);
          return (row) => {
            box.dataset.id = row.entity_id;
            box.checked = drawn.has(row.entity_id);
            setAttribute(box, "aria-label", `Draw ${row.entity_name}`);
          };
        },
      },
      {
        key: "name",
        label: "Entity",
        header: true,
        value: (row) => row.entity_name,
        make(cell) {
          const anchor = h("a");
          const id = h("span", { class: "ends" });
          cell.append(anchor, id);
          return (row) => {
            setText(anchor, row.entity_name);
            setText(id, row.caller ? `from ${row.caller}` : "");
            setAttribute(anchor, "href", entityAddress(row.entity_kind, row.entity_id, query()));
          };
        },
      },
      column("over", "Over the range", "All events of the range together"),
      column("last", "Newest"),
      column("least", "Least"),
      column("most", "Most"),
    ],
    key: (row) => row.entity_id,
    sort: { key: "over", order: "desc" },
  });
  return {
    element: h("div", { class: "scroll limited", tabindex: "0", role: "region", "aria-label": "Entities" }, table.element),
    show(now, series, ids, { times, incomplete }) {
      shape = now;
      drawn = ids;
      table.update(
        series.map(({ over, values, ...entity }) => {
          // The bucket that is filling has too little, but where it is all there is.
          const known = values.map((value, i) => ({ n: numberOf(shape, value), filling: isFilling(times[i], incomplete) })).filter(({ n }) => n !== null);
          const complete = known.filter(({ filling }) => !filling);
          const numbers = (complete.length ? complete : known).map(({ n }) => n);
          return { ...entity, caller: callerOf(entity), over: numberOf(shape, over), last: numbers.at(-1) ?? null, least: least(numbers), most: most(numbers) };
        }),
      );
    },
  };
}

const least = (numbers) => (numbers.length ? numbers.reduce((a, b) => Math.min(a, b)) : null);
const most = (numbers) => (numbers.length ? numbers.reduce((a, b) => Math.max(a, b)) : null);

// A relation has the name of its callee; its id names the caller as well.
const callerOf = ({ entity_kind: kind, entity_id: id }) => (kind.endsWith("_relation") ? nameIn(id) : "");

function valuesTable() {
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values over time" });
  const element = h("details", { class: "panel values", ontoggle: () => draw() }, h("summary", {}, "Values as a table"), scroll);
  let latest = null;

  function draw() {
    if (!element.open || !latest) return;
    const { shape, lines, data: { times, incomplete } } = latest;
    const form = formatOf(shape.metric.unit, shape.metric.least);
    const columns = [
      { key: "at", label: "From", header: true, make: (cell) => (row) => { setText(cell, bucketName(row.at, incomplete)); cell.title = utc(row.at); } },
      ...lines.map((line, index) => ({ key: index, label: line.label || shape.metric.name, numeric: true, make: figure((row) => form(row.values[index])) })),
    ];
    const table = new DataTable({ caption: "Values over time", columns, key: (row) => row.at });
    scroll.replaceChildren(table.element);
    table.update(times.map((at, i) => ({ at, values: lines.map(({ values }) => values[i]) })).reverse());
  }

  return {
    element,
    show(shape, lines, data) {
      latest = { shape, lines, data };
      draw();
    },
  };
}

// The same data as PromQL, and as a command.
function copyPanel() {
  const make = (label) => {
    const code = h("code", {});
    const button = h("button", { type: "button", onclick: () => copy(code.textContent, button) }, "Copy");
    return { code, element: h("div", { class: "copy" }, h("h3", {}, label), h("pre", { tabindex: "0" }, code), button) };
  };
  const promql = make("As PromQL");
  const command = make("As a command");
  const { element } = panel("Use it elsewhere", { id: "explore-copy", sub: "PromQL: with this server as the data source" }, h("div", { class: "body copies" }, promql.element, command.element));
  return {
    element,
    show(metric, drawn, { chosen, all }, data, store) {
      const ids = drawn.map(({ entity_id: id }) => id);
      promql.element.hidden = !metric.series;
      setText(promql.code, metric.series ? selector(metric.series, chosen ? ids : []) : "");
      setText(command.code, commands(metric.name, all ? [] : ids, ids.length, data, store).join("\n"));
    },
  };
}

const quoted = (text) => `"${text.replace(/[\\"]/g, "\\$&").replace(/\n/g, "\\n")}"`;

export function selector(series, ids) {
  if (!ids.length) return series;
  if (ids.length === 1) return `${series}{entity_id=${quoted(ids[0])}}`;
  const any = ids.map((id) => id.replace(/[\\^$.|?*+()[\]{}]/g, "\\$&")).join("|");
  return `${series}{entity_id=~${quoted(any)}}`;
}

const word = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, `'\\''`)}'`);

// They print what is drawn: ids of entities, or none for all of them. Times are absolute, because the
// -1h of a command goes back from the newest minute. Of steps of 5 and 10 minutes, which are not
// stored, they print the minutes.
export function commands(metric, ids, series, { times, grain }, store) {
  const length = { hour: "hour", day: "day" }[grain] ?? "minute";
  const last = times.at(-1) + BUCKET_S[grain] - BUCKET_S[length];
  const [from, to] = [times[0], last].map((at) => `${new Date(at * 1000).toISOString().slice(0, 16)}Z`);
  const rows = ((last - times[0]) / BUCKET_S[length] + 1) * (ids.length ? 1 : series);
  const limit = rows > TABLE_ROWS ? ` --limit ${rows}` : "";
  const options = `--grain ${length} --from ${from} --to ${to}${limit} --store ${word(store ?? "STORE")}`;
  const query = `batchmill query ${word(metric)}`;
  if (!ids.length) return [`${query} ${options}`];
  return ids.map((id) => `${query} --entity=${word(id)} ${options}`); // "=": an id may begin with a dash
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.previousSibling);
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
