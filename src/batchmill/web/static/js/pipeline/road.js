// The road an event takes, as stations with live numbers, and the way back: backpressure.

import { h, setAttribute, setText, svg } from "../dom.js";
import { ago, bytes, count, plain, rate, seconds, short } from "../format.js";

const LEVELS = {
  NORMAL: ["good", "Senders are not slowed down."],
  WARNING: ["warn", "It fills up; senders are not slowed down yet."],
  CRITICAL: ["bad", "Senders are told to wait: 503 with Retry-After."],
  CRITICAL_PLUS: ["bad", "Nothing is taken: 503 with Retry-After."],
};
const STATES = { running: "good", starting: "warn", stopping: "warn", waiting: "warn", failed: "bad" };

export function road() {
  const stations = {
    ingest: station("Ingest", "OTLP over HTTP and gRPC"),
    queue: station("Queue", "in memory, bounded"),
    spool: station("Spool", "Parquet segments on disk"),
    spark: station("Spark", "L1, L2, top-N"),
    store: station("Store", "merged, exactly once"),
    export: station("Export", "to others"),
  };
  const list = h("ol", { class: "road" }, ...Object.values(stations).map((each) => each.element));
  const level = h("strong");
  const meaning = h("span");
  const back = h(
    "div",
    { class: "back" },
    svg("svg", { class: "back-line", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: "M100 0V6H0V0" })),
    h("p", {}, h("span", { class: "back-name" }, "Backpressure"), level, meaning),
  );

  return {
    element: h("div", { class: "road-frame" }, list, back),
    show(state, rates) {
      const { ingest = {}, pipeline = {}, processes = {} } = state;
      const told = Object.keys(ingest).length > 0;
      const topic = (state.queues ?? []).find((each) => each.name === "topic");

      stations.ingest.show(processes.ingest?.state, perSecond(rates.of("received", 5)), "spans/s received", [
        ["Requests", told ? `${plain(rate(rates.of("requests", 5)))}/s` : "–"],
        ["Acknowledged", short(ingest.acknowledged_spans)],
        ["Under way", count(ingest.requests_under_way)],
      ], rates.of("received", 5));

      const sink = (state.queues ?? []).find((each) => each.process === "ingest" && each.unit === "spans");
      stations.queue.show(processes.ingest?.state, short(state.queue_rows), "spans wait", [
        ["Room for", sink?.capacity ? short(sink.capacity) : "–"],
        ["Taken", sink ? short(sink.accepted) : "–"],
        ["Turned away", sink ? short(total(sink.rejected)) : "–"],
      ], rates.of("received", 5));

      if (topic) {
        stations.spool.rename("Kafka topic", "replicated by the brokers");
        stations.spool.show(null, count(pipeline.unread_segments), "messages unread", [["Lag", plain(seconds(pipeline.lag_s))]], rates.of("counted", 30));
      } else {
        stations.spool.show(null, plain(bytes(state.spool?.bytes)), "wait to be read", [
          ["Segments", count(state.spool?.segments)],
          ["Oldest", plain(seconds(state.lag_s))],
          ["Disk free", plain(bytes(state.thresholds?.free_bytes))],
        ], rates.of("counted", 30));
      }

      const newest = state.batches?.at(-1);
      stations.spark.show(processes.pipeline?.state, newest ? plain(seconds(newest.seconds)) : "–", "newest micro-batch", [
        ["Batch", state.last_batch === null || state.last_batch === undefined ? "none yet" : `№ ${count(state.last_batch)}`],
        ["Rows in it", newest ? count(newest.rows) : "–"],
        ["Lag", plain(seconds(topic ? pipeline.lag_s : state.lag_s))],
      ], rates.of("counted", 30));

      stations.store.show(null, perSecond(rates.of("counted", 30)), "spans/s counted", [
        ["Spans", short(pipeline.spans)],
        ["Rows", short(pipeline.rows)],
        ["Commit", state.committed_at ? ago(state.at - state.committed_at) : "none yet"],
      ], Object.keys(state.exports ?? {}).length ? rates.of("counted", 30) : 0);

      const exports = Object.entries(state.exports ?? {});
      const sent = exports.reduce((sum, [, each]) => sum + (each.sent_values ?? each.scrapes ?? 0), 0);
      const failing = exports.filter(([, each]) => each.failing);
      stations.export.show(
        exports.length ? worst(exports.map(([name]) => processes[name]?.state)) : null,
        exports.length ? short(sent) : "None",
        exports.length ? "values sent" : "is set up",
        exports.length ? [["Exporters", count(exports.length)], ["Failing", failing.length ? count(failing.length) : "none"]] : [],
        0,
      );

      const name = state.thresholds?.level ?? ingest.level;
      const [grade, text] = LEVELS[name] ?? ["", told ? "" : "Ingest has not told yet."];
      setAttribute(back, "data-level", grade);
      setText(level, name ? name.replace("_", " ") : "not known");
      setText(meaning, state.thresholds?.why && grade !== "good" ? `${text} ${state.thresholds.why}` : text);
    },
  };
}

const total = (counts) => Object.values(counts ?? {}).reduce((a, b) => a + b, 0);
const perSecond = (n) => (n === null ? "–" : plain(rate(n)));

function worst(states) {
  const order = ["failed", "stopped", "waiting", "starting", "stopping", "running"];
  return order.find((each) => states.includes(each)) ?? states[0] ?? null;
}

function station(name, what) {
  const title = h("h3", {}, name);
  const sub = h("span", { class: "what" }, what);
  const dot = h("span", { class: "dot" });
  const state = h("span", { class: "state-name" });
  const value = h("span", { class: "value" });
  const unit = h("span", { class: "of" });
  const facts = h("dl");
  const element = h("li", { class: "station" }, h("div", { class: "station-head" }, title, h("span", { class: "is" }, dot, state)), sub, h("p", { class: "big" }, value, unit), facts);
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
