// The stages that an event passes, with live numbers, and backpressure in the other direction.

import { h, setAttribute, setText, svg } from "../dom.js";
import { ago, bytes, count, plain, rate, seconds, short } from "../format.js";

const LEVELS = {
  NORMAL: ["good", "Senders are not slowed down."],
  WARNING: ["warn", "Filling up; senders are not slowed down yet."],
  CRITICAL: ["bad", "Senders must wait: 503 with Retry-After."],
  CRITICAL_PLUS: ["bad", "Requests are refused before their body is read: 503 with Retry-After."],
};
const STATES = { running: "good", starting: "warn", stopping: "warn", waiting: "warn", failed: "bad" };

export function stages() {
  const parts = {
    ingest: stage("Ingest", "OTLP over HTTP and gRPC"),
    queue: stage("Queue", "in memory, bounded"),
    spool: stage("Spool", "Parquet segments on disk"),
    spark: stage("Spark", "L1, L2, top-N"),
    store: stage("Store", "merged, exactly once"),
    export: stage("Export", "to other systems"),
  };
  const list = h("ol", { class: "stages" }, ...Object.values(parts).map((stage) => stage.element));
  const level = h("strong");
  const meaning = h("span");
  const back = h(
    "div",
    { class: "back" },
    svg("svg", { class: "back-line", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: "M100 0V6H0V0" })),
    h("p", {}, h("span", { class: "back-name" }, "Backpressure"), level, meaning),
  );

  return {
    element: h("div", { class: "stages-frame" }, list, back),
    show(state, rates) {
      const { ingest = {}, pipeline = {}, processes = {} } = state;
      const reported = Object.keys(ingest).length > 0;
      const topic = state.topic;

      parts.ingest.show(processes.ingest?.state, perSecond(rates.of("received", 5)), "spans/s received", [
        ["Requests", reported ? `${plain(rate(rates.of("requests", 5)))}/s` : "–"],
        ["Acknowledged", short(ingest.acknowledged_spans)],
        ["In progress", count(ingest.requests_under_way)],
      ], rates.of("received", 5));

      const sink = (state.queues ?? []).find((queue) => queue.process === "ingest" && queue.unit === "spans");
      parts.queue.show(processes.ingest?.state, short(state.queue_rows), "waiting spans", [
        ["Capacity", sink?.capacity ? short(sink.capacity) : "–"],
        ["Accepted", sink ? short(sink.accepted) : "–"],
        ["Refused", sink ? short(total(sink.rejected)) : "–"],
      ], rates.of("received", 5));

      if (topic) {
        parts.spool.rename("Kafka topic", "replicated by the brokers");
        parts.spool.show(null, count(pipeline.unread_segments), "messages unread", [["Lag", plain(seconds(pipeline.lag_s))], ...backlog(state.behind)], rates.of("counted", 30));
      } else {
        parts.spool.show(null, plain(bytes(state.spool?.bytes)), "unread", [
          ["Segments", count(state.spool?.segments)],
          ["Oldest", plain(seconds(state.lag_s))],
          ["Disk free", plain(bytes(state.thresholds?.free_bytes))],
          ...backlog(state.behind),
        ], rates.of("counted", 30));
      }

      const newest = state.batches?.at(-1);
      parts.spark.show(processes.pipeline?.state, newest ? plain(seconds(newest.seconds)) : "–", "newest micro-batch", [
        ["Batch", state.last_batch === null || state.last_batch === undefined ? "none yet" : `№ ${count(state.last_batch)}`],
        ["Rows in it", newest ? count(newest.rows) : "–"],
        ...running(state.long_batch),
        ["Lag", plain(seconds(topic ? pipeline.lag_s : state.lag_s))],
      ], rates.of("counted", 30));

      parts.store.show(null, perSecond(rates.of("counted", 30)), "spans/s counted", [
        ["Spans", short(pipeline.spans)],
        ["Rows", short(pipeline.rows)],
        ["Commit", state.committed_at ? ago(state.at - state.committed_at) : "none yet"],
      ], Object.keys(state.exports ?? {}).length ? rates.of("counted", 30) : 0);

      const exports = Object.entries(state.exports ?? {});
      const sent = exports.reduce((sum, [, exporter]) => sum + (exporter.sent_values ?? exporter.scrapes ?? 0), 0);
      const failing = exports.filter(([, exporter]) => exporter.failing);
      parts.export.show(
        exports.length ? worst(exports.map(([name]) => processes[name]?.state)) : null,
        exports.length ? short(sent) : "None",
        exports.length ? "values sent" : "configured",
        exports.length ? [["Exporters", count(exports.length)], ["Failing", failing.length ? count(failing.length) : "none"]] : [],
        0,
      );

      const name = state.thresholds?.level ?? ingest.level;
      const [grade, text] = LEVELS[name] ?? ["", reported ? "" : "Ingest has not reported yet."];
      setAttribute(back, "data-level", grade);
      setText(level, name ? name.replace("_", " ") : "unknown");
      setText(meaning, state.thresholds?.why && grade !== "good" ? `${text} ${state.thresholds.why}` : text);
    },
  };
}

// How far the pipeline is behind; nothing if there is no backlog.
function backlog(behind) {
  if (!behind) return [];
  return [
    ["Behind", `${short(behind.rows)} ${behind.unit}s`],
    ["Caught up", behind.catch_up_s === null ? "not known" : `in ${plain(seconds(behind.catch_up_s))}`],
    ["New data waits", behind.new_lag_s === null ? "not known" : plain(seconds(behind.new_lag_s))],
  ];
}

// The batch that runs, if it takes far longer than usual.
function running(batch) {
  return batch ? [["Running", `№ ${count(batch.batch)} for ${plain(seconds(batch.seconds))}`]] : [];
}

const total = (counts) => Object.values(counts ?? {}).reduce((a, b) => a + b, 0);
const perSecond = (n) => (n === null ? "–" : plain(rate(n)));

function worst(states) {
  const order = ["failed", "stopped", "waiting", "starting", "stopping", "running"];
  return order.find((state) => states.includes(state)) ?? states[0] ?? null;
}

function stage(name, what) {
  const title = h("h3", {}, name);
  const sub = h("span", { class: "what" }, what);
  const dot = h("span", { class: "dot" });
  const state = h("span", { class: "state-name" });
  const value = h("span", { class: "value" });
  const unit = h("span", { class: "of" });
  const facts = h("dl");
  const element = h("li", { class: "stage" }, h("div", { class: "stage-head" }, title, h("span", { class: "is" }, dot, state)), sub, h("p", { class: "big" }, value, unit), facts);
  let rows = [];
  return {
    element,
    rename(to, into) {
      setText(title, to);
      setText(sub, into);
    },
    show(process, big, of, wanted, flow) {
      setText(state, process ?? "");
      setAttribute(element, "data-state", process ? (STATES[process] ?? "bad") : null);
      setAttribute(element, "data-flow", flow ? "yes" : null);
      setText(value, big);
      setText(unit, of);
      if (rows.length !== wanted.length) {
        rows = wanted.map(() => [h("dt"), h("dd")]);
        facts.replaceChildren(...rows.map((pair) => h("div", {}, ...pair)));
      }
      wanted.forEach(([label, text], index) => {
        setText(rows[index][0], label);
        setText(rows[index][1], text);
      });
    },
  };
}
