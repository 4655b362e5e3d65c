// All services: five measures each, with sparklines over the range; beside those of an earlier time.

import { get } from "../api.js";
import { h, quantity, setChildren, setText } from "../dom.js";
import { ago, apdex, averageMs, count, countOf, grade, moment, percent, plain, rankMs, rate, seconds, utc } from "../format.js";
import { compareName, controls, parameters, read, write } from "../range.js";
import { serviceAddress } from "../route.js";
import { panelShape, tileShapes } from "../skeleton.js";
import { sparkline } from "../spark.js";
import { DataTable } from "../table.js";
import { noData } from "./states.js";

const STEP = 50;
const MEASURES = [
  { key: "cpm", label: "Calls/min", title: "Calls per minute", format: rate, low: 0 },
  { key: "avg", label: "Average", title: "Average response time", format: averageMs, low: 0 },
  { key: "p99", label: "p99", title: "99 % of calls were at least this fast, to within 2 %", format: rankMs, low: 0 },
  { key: "success", label: "Success", title: "Share of calls without an error", format: percent, low: 0.9, high: 1, first: "asc", grade: (n) => grade(n) },
  { key: "apdex", label: "Apdex", title: "Apdex score, from 0 to 1", format: apdex, low: 0.5, high: 1, first: "asc", grade: (n) => grade(n, 0.85, 0.7) },
];
const SORTS = ["name", ...MEASURES.map((measure) => measure.key)];

export function overview({ query, amend, run }) {
  let limit = STEP;
  let sort = sortOf(query);
  let typing = null;
  let filling = -1; // the index of the first bucket that is incomplete

  const range = controls((chosen) => amend((to) => write(to, chosen)), { withCompare: true });
  const search = h("input", { type: "search", placeholder: "Search services", "aria-label": "Search services", spellcheck: "false", oninput: typed });
  const table = new DataTable({ caption: "Services", className: "services", columns: columns(), key: (row) => row.id, sort, onSort: sorted });
  const shown = h("span", { class: "shown", role: "status" });
  const more = h("button", { type: "button", onclick: showMore }, "Show more");
  const left = h("span");
  const moreRow = h("div", { class: "more", hidden: true }, more, left);
  const list = h("section", { class: "panel", "aria-label": "Services" }, table.element, moreRow);
  const tiles = tilesOf();
  const empty = h("div", { class: "panel", hidden: true }, h("p", { class: "empty" }));
  const body = h("div", { class: "page" }, tileShapes(4, true), panelShape(460));
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "head" }, h("h1", {}, "Services"), shown, h("label", { class: "search" }, search), h("span", { class: "push" }), range.element),
    body,
  );

  function columns() {
    const name = {
      key: "name",
      label: "Service",
      header: true,
      sortable: true,
      make(cell) {
        const anchor = h("a");
        const tags = h("span");
        cell.append(h("span", { class: "name" }, anchor, tags));
        return (row) => {
          setText(anchor, row.name);
          anchor.setAttribute("href", serviceAddress(row.id, query));
          const layers = (row.layers ?? []).filter((layer) => layer !== "GENERAL");
          if (tags.dataset.of !== layers.join()) {
            tags.dataset.of = layers.join();
            tags.replaceChildren(...layers.map((layer) => h("span", { class: "tag" }, layer)));
          }
        };
      },
    };
    return [name, ...MEASURES.map((measure) => ({ ...measure, numeric: true, sortable: true, make: measureCell(measure, () => filling) }))];
  }

  function sortOf(from) {
    const key = SORTS.includes(from.get("sort")) ? from.get("sort") : "cpm";
    return { key, order: from.get("order") === "asc" || (key === "name" && !from.has("order")) ? "asc" : "desc" };
  }

  function sorted(chosen) {
    sort = chosen;
    amend((to) => {
      to.set("sort", sort.key);
      to.set("order", sort.order);
    });
  }

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(() => {
      limit = STEP;
      amend((to) => (search.value ? to.set("search", search.value) : to.delete("search")), { replace: query.has("search") });
    }, 200);
  }

  function showMore() {
    limit += STEP;
    amend(() => {});
  }

  function reads(from) {
    query = from;
    range.show(read(query));
    sort = sortOf(query);
    table.setSort(sort);
    if (document.activeElement !== search) search.value = query.get("search") ?? "";
  }
  reads(query);

  return {
    title: "Services",
    element,
    reads,
    destroy: () => clearTimeout(typing),
    async load(signal) {
      const range = read(query);
      const { before, ...data } = await get(
        "services",
        { ...parameters(range), compare: range.compare, search: query.get("search"), sort: sort.key, order: sort.order, limit: Math.min(500, limit) },
        { signal },
      );
      return { ...data, before: before && { name: compareName(range.compare), ...before } };
    },
    show(data) {
      const { before } = data;
      const then = new Map(before?.services.map((row) => [row.id, row]));
      const rows = data.services.map((row) => ({ ...row, before: before && { ...then.get(row.id), name: before.name } }));
      const nothing = data.total === 0 && !query.get("search");
      if (nothing && run.commit?.newest_minute_s === null) {
        setChildren(body, [noData(run)]);
        return;
      }
      setChildren(body, [tiles.element, list, empty]);
      filling = data.incomplete === null ? -1 : data.times.indexOf(data.incomplete);
      table.update(rows);
      list.hidden = rows.length === 0;
      empty.hidden = rows.length > 0;
      const newest = run.commit?.newest_minute_s;
      setText(
        empty.firstChild,
        query.get("search")
          ? `No service with “${query.get("search")}” in its name was called in this time range.`
          : `No service was called in this time range.${newest ? ` The newest data is from ${moment(newest)}: choose a longer range.` : ""}`,
      );
      const hidden = data.total - rows.length;
      moreRow.hidden = hidden <= 0;
      more.hidden = limit >= 500;
      setText(left, limit >= 500 ? `${count(hidden)} more not shown: search by name.` : `${count(hidden)} more`);
      setText(shown, countOf(data.total, "service"));
      tiles.data(data, query);
      tiles.run(run);
    },
    pipeline: () => tiles.run(run),
  };
}

function measureCell({ key, label, format, low, high, grade: of }, filling) {
  return (cell) => {
    const value = h("span", { class: "value" });
    const was = h("span", { class: "earlier", hidden: true });
    const line = sparkline();
    cell.append(h("span", { class: "head-label", "aria-hidden": "true" }, label), h("span", { class: "measure" }, line.element, value), was);
    let last;
    return (row) => {
      const number = row.range[key];
      if (number !== last) {
        last = number;
        value.replaceChildren(quantity(format(number)));
        const level = of?.(number);
        value.className = level && level !== "good" ? `value is-${level}` : "value";
      }
      was.hidden = !row.before;
      if (row.before) setText(was, `${plain(format(row.before.range?.[key] ?? null))} ${row.before.name}`);
      line.update(row.series[key] ?? [], low, high, filling(), row.before?.series?.[key]);
    };
  };
}

// A summary of all services, and of the run.
function tilesOf() {
  const make = (label) => {
    const value = h("dd", {}, "–");
    return { value, element: h("div", { class: "tile" }, h("dt", {}, label), value) };
  };
  const load = make("Requests from outside");
  load.element.title = "Requests that no service in the system made: each counts once, however many services it passes";
  const worst = make("Lowest success rate");
  const health = make("Run");
  const newest = make("Newest data");
  const element = h("dl", { class: "tiles" }, load.element, worst.element, newest.element, health.element);
  const why = (text) => h("span", { class: "why" }, text);
  const set = (tile, ...content) => tile.value.replaceChildren(...content);
  return {
    element,
    data({ all, lowest, before }, query) {
      const was = (text) => (before ? [why(`${text} ${before.name}`)] : []);
      const among = ({ busiest }) => (busiest === null ? [] : [why(`of the ${count(busiest)} busiest services`)]);
      const wasCalls = was(plain(rate(before?.all.cpm ?? null)));
      const wasLowest = was(plain(percent(before?.lowest?.success ?? null)));
      if (all.cpm === null) set(load, "–", why("none"), ...wasCalls);
      else set(load, plain(rate(all.cpm)), h("small", {}, " per min"), why(`${plain(percent(all.success))} succeed`), ...among(all), ...wasCalls);
      if (lowest === null) set(worst, "–", why("no calls"), ...wasLowest);
      else {
        set(worst, h("span", { class: `is-${grade(lowest.success)}` }, plain(percent(lowest.success))), why(lowest.success < 1 ? h("a", { href: serviceAddress(lowest.id, query) }, lowest.name) : "no call failed"), ...among(lowest), ...wasLowest);
      }
    },
    run({ pipeline: state, commit }) {
      if (!state) set(health, "–", why("no status of a run"));
      else {
        const level = { healthy: "good", degraded: "warn", down: "bad" }[state.health] ?? "";
        const name = (state.health ?? "unknown").replace(/^./, (first) => first.toUpperCase());
        set(health, h("span", { class: `is-${level}` }, name), why(`lag ${plain(seconds(state.lag_s))}`));
      }
      const minute = commit?.newest_minute_s;
      if (!minute) set(newest, commit ? "None yet" : "–", why("\u00a0"));
      else {
        const at = commit.committed_at;
        set(newest, h("time", { datetime: new Date(minute * 1000).toISOString(), title: utc(minute) }, moment(minute)), why(at ? `committed ${ago(Date.now() / 1000 - at)}` : ""));
      }
    },
  };
}
