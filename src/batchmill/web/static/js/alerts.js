// What pages share about alerts: their colour, their marks on charts, and lists of them.

import { h, panel, setChildren, setText } from "./dom.js";
import { count, moment, plain, seconds, utc } from "./format.js";
import { entityAddress, format, kept } from "./route.js";
import { DataTable, text } from "./table.js";

const LEVELS = { critical: "bad", error: "bad", page: "bad", info: "" };

// The level of a severity: "bad", "warn", or none.
export const levelOf = (severity) => LEVELS[severity.toLowerCase()] ?? "warn";

// The times in which alerts fired, for TimeChart.mark(). An alert fires at the end of a minute, and a
// chart has the value of a minute at its start: the mark begins with the minute that it fired for.
const MINUTE_S = 60;
// named: whether a mark names its entity.
export const alertMarks = (history, named = false) =>
  history.map(({ starts_s: from, ends_s: to, severity, rule, entity_name: entity }) => ({
    from: from - MINUTE_S,
    to: to === null ? null : to - MINUTE_S,
    colour: { bad: "--bad", warn: "--warn" }[levelOf(severity)] ?? "--soft",
    text: `${rule}${named ? ` of ${entity}` : ""} fired from ${moment(from)} ${to === null ? "on" : `to ${moment(to)}`}`,
  }));

const severity = {
  key: "severity",
  label: "Severity",
  value: (row) => row.severity,
  make: (cell) => {
    const shown = h("span");
    cell.append(shown);
    return (row) => {
      setText(shown, row.severity);
      const level = levelOf(row.severity);
      shown.className = level ? `is-${level}` : "";
    };
  },
};

const entity = (query) => ({
  key: "entity",
  label: "Entity",
  value: (row) => row.entity_name,
  make: (cell) => {
    const anchor = h("a");
    const plainName = h("span");
    return (row) => {
      const { entity_id: id, entity_kind: kind, entity_name: name } = row;
      const shown = kind ? anchor : plainName; // without a kind it is not in the store any more
      setText(shown, name);
      if (kind) anchor.setAttribute("href", entityAddress(kind, id, query()));
      setChildren(cell, [shown]);
    };
  },
});

const time = (key, label, of) => ({
  key,
  label,
  className: "nowrap",
  value: of,
  make: (cell) => (row) => {
    const at = of(row);
    setText(cell, at === null ? "–" : moment(at));
    cell.title = at === null ? "" : utc(at);
  },
});

// A panel with a table; kind: "firing", "pending" or "history".
export function alertList(title, kind, id, none) {
  let query = new URLSearchParams();
  const rule = { key: "rule", label: "Rule", header: true, value: (row) => row.rule, make: text((row) => row.rule) };
  const message = { key: "message", label: "Message", className: "message", value: (row) => row.message, make: text((row) => row.message || "–") };
  const value = { key: "value", label: "Value", numeric: true, value: (row) => row.value, make: text((row) => (row.value === null ? "–" : String(Number(row.value.toPrecision(5))))) };
  const who = [rule, entity(() => query), severity];
  const columns = {
    firing: [...who, time("since", "Since", (row) => row.since_s), value, message],
    pending: [...who, time("since", "Since", (row) => row.since_s), value],
    history: [
      ...who,
      time("from", "Fired", (row) => row.starts_s),
      time("to", "Resolved", (row) => row.ends_s),
      { key: "lasted", label: "For", numeric: true, value: (row) => lasted(row), make: text((row) => plain(seconds(lasted(row)))) },
      message,
    ],
  }[kind];
  const lasted = (row) => (row.ends_s ?? Date.now() / 1000) - row.starts_s;
  const sort = { key: kind === "history" ? "from" : "since", order: "desc" };
  const key = (row) => `${row.rule} ${row.entity_id} ${row.starts_s ?? row.since_s}`;
  const table = new DataTable({ caption: title, columns, key, sort });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table.element);
  const empty = h("p", { class: "empty" }, none);
  const { element, note } = panel(title, { id });
  return {
    element,
    show(rows, now, more = false) {
      query = now;
      setText(note, rows.length ? `${count(rows.length)}${more ? ", the newest; choose a shorter range for the others" : ""}` : "");
      setChildren(element, [element.firstChild, rows.length ? scroll : empty]);
      table.update(rows);
    },
  };
}

// The alerts of one entity, on its page; hidden while there are none.
export function alertsPanel(title) {
  const list = alertList(title, "history", "list-alerts", "");
  const all = h("a", {}, "All alerts");
  list.element.firstChild.append(all);
  list.element.hidden = true;
  return {
    element: list.element,
    show(history, query) {
      list.element.hidden = history.length === 0;
      all.setAttribute("href", format({ page: "alerts", query: kept(query) }));
      list.show(history, query);
    },
  };
}
