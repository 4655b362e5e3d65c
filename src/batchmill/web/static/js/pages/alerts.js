// All alerts: what fires, what is pending, what fired in a range, and the rules.

import { alertList, levelOf } from "../alerts.js";
import { get } from "../api.js";
import { h, panel, setChildren, setText } from "../dom.js";
import { count, countOf, moment, utc } from "../format.js";
import { controls, parameters, read, write } from "../range.js";
import { panelShape, tileShapes } from "../skeleton.js";
import { DataTable, text } from "../table.js";

export function alerts({ query, amend }) {
  const range = controls((chosen) => amend((to) => write(to, chosen)), { withGrain: false });
  const evaluated = h("span", { class: "shown", role: "status" });
  const tiles = tilesOf();
  const firing = alertList("Firing", "firing", "alerts-firing", "No alert fires.");
  const pending = alertList("Pending", "pending", "alerts-pending", "No alert is pending.");
  const history = alertList("History", "history", "alerts-history", "No alert fired in this time range.");
  const rules = rulesTable();
  const none = h(
    "section",
    { class: "panel state" },
    h("h2", {}, "No alert rules"),
    h("p", {}, "Name a file of rules in the setting ", h("code", {}, "alerts"), " and start the run again. ", h("code", {}, "batchmill alerts check FILE"), " tells whether a file is right."),
  );
  const body = h("div", { class: "page" }, tileShapes(4), ...[110, 110, 240, 200].map(panelShape));
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "head" }, h("h1", {}, "Alerts"), evaluated, h("span", { class: "push" }), range.element),
    body,
  );

  function reads(from) {
    query = from;
    range.show(read(query));
  }
  reads(query);

  return {
    title: "Alerts",
    element,
    reads,
    load: (signal) => get("alerts", parameters(read(query)), { signal }),
    show(data) {
      if (data.rules.length === 0 && data.history.length === 0) {
        setText(evaluated, "");
        setChildren(body, [none]);
        return;
      }
      setChildren(body, [tiles.element, firing.element, pending.element, history.element, rules.element]);
      setText(evaluated, data.evaluated_s === null ? "Nothing evaluated yet" : `Evaluated up to ${moment(data.evaluated_s)}`);
      evaluated.title = data.evaluated_s === null ? "" : utc(data.evaluated_s);
      const fires = data.alerts.filter((alert) => alert.phase === "firing");
      const waits = data.alerts.filter((alert) => alert.phase === "pending");
      tiles.show(fires, waits, data);
      firing.show(fires, query);
      pending.show(waits, query);
      history.show(data.history, query, data.more);
      rules.show(data.rules);
    },
  };
}

function tilesOf() {
  const make = (label) => {
    const value = h("dd", {}, "–");
    return { value, element: h("div", { class: "tile" }, h("dt", {}, label), value) };
  };
  const [firing, pending, history, rules] = ["Firing", "Pending", "Fired in this range", "Rules"].map(make);
  const element = h("dl", { class: "tiles" }, ...[firing, pending, history, rules].map((tile) => tile.element));
  return {
    element,
    show(fires, waits, data) {
      const worst = fires.some((alert) => levelOf(alert.severity) === "bad") ? "is-bad" : "is-warn";
      setText(firing.value, count(fires.length));
      firing.value.className = fires.length ? worst : "is-good";
      setText(pending.value, count(waits.length));
      setText(history.value, `${count(data.history.length)}${data.more ? "+" : ""}`);
      setText(rules.value, count(data.rules.length));
    },
  };
}

function rulesTable() {
  const state = (row) => (row.firing ? `${countOf(row.firing, "alert")} firing` : row.pending ? `${countOf(row.pending, "alert")} pending` : "ok");
  const columns = [
    { key: "id", label: "Rule", header: true, value: (row) => row.id, make: text((row) => row.id) },
    { key: "condition", label: "Condition", className: "message", value: (row) => row.condition, make: text((row) => row.condition) },
    { key: "severity", label: "Severity", value: (row) => row.severity, make: text((row) => row.severity) },
    { key: "state", label: "State", value: (row) => row.firing * 1e6 + row.pending, first: "desc", make: text(state) },
  ];
  const table = new DataTable({ caption: "Rules", columns, key: (row) => row.id, sort: { key: "id", order: "asc" } });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rules" }, table.element);
  const { element, note } = panel("Rules", { id: "alerts-rules" }, scroll);
  return {
    element,
    show(rows) {
      setText(note, count(rows.length));
      table.update(rows);
    },
  };
}
