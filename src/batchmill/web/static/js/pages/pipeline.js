// The status of a run: the stages that an event passes, with live numbers, and their details.

import { get } from "../api.js";
import { TimeChart } from "../charts.js";
import { h, panel, setAttribute, setChildren, setText, withCode } from "../dom.js";
import { bytes, count, moment, plain, rate, seconds, utc } from "../format.js";
import { batches } from "../pipeline/batches.js";
import { queues } from "../pipeline/queues.js";
import { stages } from "../pipeline/stages.js";
import { thresholds } from "../pipeline/thresholds.js";
import { serviceAddress } from "../route.js";
import { panelShape, stageShapes } from "../skeleton.js";
import { DataTable, figure, number, text } from "../table.js";

const GRADES = { healthy: "good", degraded: "warn", down: "bad" };

export function pipeline({ run }) {
  const verdict = h("strong", { class: "verdict" });
  const asOf = h("span", { class: "sub" });
  const reasons = h("ul", { class: "reasons" });
  const { rates } = run;
  const flow = stages();
  const chart = new TimeChart({
    title: "Spans per second, received and counted",
    series: [{ label: "received", colour: "--series-1", fill: true }, { label: "counted (over 30 s)", colour: "--good" }],
    format: rate,
    height: 170,
    span: 60,
  });
  const throughput = panel("Spans per second", { id: "flow", sub: "last three minutes, since this page was opened" }, h("div", { class: "body" }, chart.element));
  const parts = [flow, queues(), thresholds(), batches(), drops(), requests(), processes(), exporters(), overflow()];
  const [, ofQueues, ofThresholds, ofBatches, ofDrops, ofRequests, ofProcesses, ofExporters, ofOverflow] = parts.map((part) => part.element);
  const body = h("div", { class: "page" }, panelShape(40), stageShapes(6), panelShape(270), panelShape(360));
  const element = h(
    "div",
    { class: "page pipeline" },
    h("div", { class: "head" }, h("h1", {}, "Pipeline"), verdict, asOf),
    body,
  );
  const shown = [
    reasons,
    flow.element,
    h("div", { class: "pair" }, ofBatches, throughput.element),
    h("div", { class: "pair" }, h("div", { class: "page" }, ofQueues, ofRequests), h("div", { class: "page" }, ofThresholds, ofDrops)),
    ofProcesses,
    ofExporters,
    ofOverflow,
  ];

  function show(state) {
    setChildren(body, shown);
    rates.record(state);
    setText(verdict, state.health);
    setAttribute(verdict, "data-grade", GRADES[state.health] ?? "bad");
    setText(asOf, `as of ${moment(state.at, true)}`);
    setAttribute(asOf, "title", `${utc(state.at)}; ${state.home ?? ""}`);
    const known = state.reasons ?? [];
    reasons.classList.toggle("quiet", !known.length);
    setChildren(reasons, (known.length ? known : ["Nothing is wrong."]).map((reason, index) => {
      const line = reasons.children[index] ?? h("li");
      if (line.dataset.of !== reason) line.replaceChildren(...withCode(reason));
      line.dataset.of = reason;
      return line;
    }));
    for (const part of parts) part.show(state, rates);
    const [times, series] = rates.lines({ received: 5, counted: 30 });
    if (times.length > 1) chart.update(times, series);
  }

  return {
    title: "Pipeline",
    element,
    destroy: () => chart.destroy(),
    load: (signal) => get("pipeline", {}, { signal }),
    show,
    pipeline: () => show(run.pipeline),
  };
}

// A panel with a table, or a sentence if it is empty.
function listed(title, id, columns, key, none) {
  const table = new DataTable({ caption: title, columns, key });
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table.element);
  const empty = h("p", { class: "empty" }, ...withCode(none));
  const { element, note } = panel(title, { id });
  return {
    element,
    note,
    fill(rows) {
      setChildren(element, [element.firstChild, rows.length ? scroll : empty]);
      table.update(rows);
    },
  };
}

const whole = (key, label) => number(key, label, (n) => (n === null || n === undefined ? null : [count(n), ""]));

function drops() {
  const list = listed(
    "Dropped and refused",
    "drops",
    [
      { key: "what", label: "Kind", header: true, make: text((row) => row.what) },
      { key: "reason", label: "Reason", make: text((row) => row.reason) },
      whole("n", "Count"),
    ],
    (row) => `${row.what} ${row.reason}`,
    "Nothing was dropped or refused.",
  );
  return {
    element: list.element,
    show(state) {
      list.fill(Object.entries(state.drops ?? {}).flatMap(([what, why]) => Object.entries(why).map(([reason, n]) => ({ what, reason, n }))));
    },
  };
}

// The services in words such as "endpoints of shop" lead to their pages.
const PARENTS = [/^((?:instances|endpoints) of )(.+)$/, /^(calls between (?:instances|endpoints), from )(.+?)( to )(.+)$/, /^(calls (?:from|to) )(.+)$/];

const parent = (cell) => (row) => {
  if (cell.dataset.of === row.parent) return;
  cell.dataset.of = row.parent;
  const [, ...parts] = PARENTS.map((words) => words.exec(row.parent)).find(Boolean) ?? ["", row.parent];
  cell.replaceChildren(...parts.map((part, index) => (index % 2 ? h("a", { href: serviceAddress(part, new URLSearchParams()) }, part) : part)));
};

// Whose names were too many in the last hour; hidden while there are none.
function overflow() {
  const list = listed(
    "Too many new names",
    "overflow",
    [
      { key: "parent", label: "Of what", header: true, make: parent },
      { key: "source", label: "Event type", make: text((row) => row.source) },
      whole("names", "New names"),
      whole("rows", "Rows under overflow"),
      { key: "example", label: "Such as", make: text((row) => row.example) },
    ],
    (row) => `${row.source} ${row.parent}`,
    "None.",
  );
  setText(list.note, "last hour; beyond the limits (max_new_entities, max_entities), they are counted as one entity named overflow");
  return {
    element: list.element,
    show({ pipeline = {} }) {
      const rows = pipeline.overflow ?? [];
      list.element.hidden = !rows.length;
      list.fill(rows);
    },
  };
}

function requests() {
  const list = listed(
    "Requests",
    "requests",
    [
      { key: "way", label: "Protocol", header: true, make: text((row) => row.way) },
      { key: "outcome", label: "Outcome", make: text((row) => row.outcome) },
      whole("n", "Count"),
    ],
    (row) => `${row.way} ${row.outcome}`,
    "No request yet.",
  );
  return {
    element: list.element,
    show({ ingest = {} }) {
      setText(list.note, ingest.http ? `HTTP at ${ingest.http}, gRPC at ${ingest.grpc}` : "");
      list.fill(
        Object.entries(ingest.requests ?? {}).map(([key, n]) => {
          const [way, ...rest] = key.split(" ");
          return { way, outcome: rest.join(" "), n };
        }),
      );
    },
  };
}

function processes() {
  const level = { running: "good", starting: "warn", stopping: "warn" };
  const list = listed(
    "Processes",
    "processes",
    [
      { key: "name", label: "Process", header: true, make: text((row) => row.name) },
      { key: "state", label: "State", make: figure((row) => [row.state, ""], (row) => level[row.state] ?? (row.name === "demo" && row.state !== "failed" ? "" : "bad")) },
      { key: "pid", label: "PID", numeric: true, make: text((row) => (row.pid ? String(row.pid) : "–")) },
      { key: "up", label: "Uptime", numeric: true, make: figure((row) => seconds(row.up)) },
      whole("restarts", "Restarts"),
      { key: "exit", label: "Last exit", make: text((row) => row.exit ?? "–") },
    ],
    (row) => row.name,
    "No supervisor is running: start `batchmill run`.",
  );
  return {
    element: list.element,
    show(state) {
      list.fill(Object.entries(state.processes ?? {}).map(([name, process]) => ({ name, ...process, up: process.pid && process.started ? Math.max(0, state.at - process.started) : null })));
    },
  };
}

function exporters() {
  const list = listed(
    "Exporters",
    "exporters",
    [
      { key: "name", label: "Exporter", header: true, make: text((row) => row.name) },
      { key: "target", label: "To", make: text((row) => row.target ?? "–") },
      whole("sent", "Sent"),
      whole("files", "Waiting files"),
      { key: "bytes", label: "Waiting bytes", numeric: true, make: figure((row) => bytes(row.bytes)) },
      whole("dropped", "Dropped"),
      { key: "failing", label: "Failing", make: text((row) => row.failing || "no") },
    ],
    (row) => row.name,
    "No exporter is configured: `batchmill run --export-to …` exports the changes of each commit.",
  );
  return {
    element: list.element,
    show(state) {
      list.fill(
        Object.entries(state.exports ?? {}).map(([name, exporter]) => ({
          name,
          target: exporter.target,
          sent: exporter.sent_values ?? exporter.scrapes,
          files: exporter.waiting?.files,
          bytes: exporter.waiting?.bytes,
          dropped: Object.values(exporter.dropped ?? {}).reduce((a, b) => a + b, 0),
          failing: exporter.failing ? `${exporter.failing}${exporter.failing_s ? `, for ${plain(seconds(exporter.failing_s))}` : ""}` : "",
        })),
      );
    },
  };
}
