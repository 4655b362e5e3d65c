// Micro-batches: one bar per batch, one colour per phase.

import { h, panel, setAttribute, setChildren, setText, svg } from "../dom.js";
import { count, countOf, moment, plain, seconds, utc } from "../format.js";
import { DataTable, figure } from "../table.js";

const MOST = 60;
const HEIGHT = 150;
const BAR = 8;
const STEP = 10;
const NAMES = { spark: "Spark" };
const named = (phase) => NAMES[phase] ?? phase;

export function batches() {
  const { element, note } = panel("Micro-batches", { id: "batches" });
  const drawing = svg("svg", { class: "bars", viewBox: `0 0 ${MOST * STEP} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const top = h("span");
  const middle = h("span");
  const legend = h("ul", { class: "legend" });
  const scale = h("div", { class: "bars-frame" }, drawing, h("div", { class: "bars-scale", "aria-hidden": "true" }, top, middle, h("span", {}, "0")));
  const table = timesTable();
  const body = h("div", { class: "body" }, scale, legend);
  const empty = h("p", { class: "empty" }, "No micro-batch yet: the first one runs when Spark has started and there is input.");
  const shown = new Map();
  let last = "";

  function draw(recent) {
    const phases = [...new Set(recent.flatMap((batch) => Object.keys(batch.phases ?? {})))];
    const most = ceiling(recent.map((batch) => batch.seconds));
    setText(top, plain(seconds(most)));
    setText(middle, plain(seconds(most / 2)));
    const first = MOST - recent.length;
    const wanted = recent.map((batch, index) => {
      const bar = shown.get(batch.batch) ?? shown.set(batch.batch, svg("g", {}, svg("title"))).get(batch.batch);
      fillBar(bar, batch, phases, most, (first + index) * STEP);
      return bar;
    });
    for (const key of [...shown.keys()]) if (!recent.some(({ batch }) => batch === key)) shown.delete(key);
    setChildren(drawing, wanted);
    const newest = recent.at(-1);
    setAttribute(drawing, "aria-label", `Durations of the newest ${countOf(recent.length, "micro-batch", "micro-batches")}; the last one took ${plain(seconds(newest.seconds))}`);
    legend.replaceChildren(
      ...phases.map((phase, index) =>
        h("li", {}, h("span", { class: `swatch phase-${(index % 8) + 1}` }), `${named(phase)} `, h("strong", {}, plain(seconds(newest.phases[phase] ?? 0)))),
      ),
    );
    const cut = recent.filter((batch) => batch.seconds > most);
    const slowest = Math.max(...recent.map((batch) => batch.seconds));
    const average = recent.reduce((sum, batch) => sum + batch.seconds, 0) / recent.length;
    setText(note, `newest ${plain(seconds(newest.seconds))} (${countOf(newest.rows, "row")}), average ${plain(seconds(average))}${cut.length ? `; ${countOf(cut.length, "bar")} truncated, up to ${plain(seconds(slowest))}` : ""}`);
    table.show(recent, phases);
  }

  return {
    element,
    show({ batches: all = [] }) {
      const recent = all.slice(-MOST);
      const now = JSON.stringify(recent.map(({ batch, at }) => [batch, at]));
      setChildren(element, [element.firstChild, ...(recent.length ? [body, table.element] : [empty])]);
      if (recent.length && now !== last) draw(recent);
      last = now;
    },
  };
}

function fillBar(bar, batch, phases, most, x) {
  setText(bar.firstChild, `№ ${batch.batch}, ${moment(batch.at, true)}: ${plain(seconds(batch.seconds))}, ${countOf(batch.rows, "row")}\n${phases.map((phase) => `${named(phase)} ${plain(seconds(batch.phases[phase] ?? 0))}`).join("\n")}`);
  while (bar.childNodes.length > phases.length + 2) bar.lastChild.remove();
  while (bar.childNodes.length < phases.length + 2) bar.append(svg("rect"));
  const scale = HEIGHT / Math.max(most, batch.seconds);
  let y = HEIGHT;
  phases.forEach((phase, index) => {
    const height = (batch.phases[phase] ?? 0) * scale;
    y -= height;
    const part = bar.childNodes[index + 1];
    setAttribute(part, "class", `phase-${(index % 8) + 1}`);
    setAttribute(part, "x", x + (STEP - BAR) / 2);
    setAttribute(part, "y", y.toFixed(2));
    setAttribute(part, "width", BAR);
    setAttribute(part, "height", height.toFixed(2));
  });
  // A gap near the top shows that the bar is truncated.
  const gap = bar.lastChild;
  setAttribute(gap, "class", "gap");
  setAttribute(gap, "x", x);
  setAttribute(gap, "y", 9);
  setAttribute(gap, "width", STEP);
  setAttribute(gap, "height", batch.seconds > most ? 3 : 0);
}

// The end of the scale. One very slow batch, such as the first one, must not flatten the others.
function ceiling(times) {
  const sorted = [...times].sort((a, b) => a - b);
  const most = sorted.at(-1);
  const usual = sorted[Math.floor((sorted.length - 1) * 0.85)];
  return nice(Math.max(0.1, sorted.length >= 8 && most > 3 * usual ? 1.6 * usual : most));
}

function nice(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((factor) => factor * unit).find((end) => end >= most);
}

function timesTable() {
  let columns = "";
  let table = null;
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Micro-batches" });
  const element = h("details", { class: "values" }, h("summary", {}, "Batches as a table"), scroll);
  let latest = [];
  element.addEventListener("toggle", () => element.open && table?.update(latest));
  return {
    element,
    show(recent, phases) {
      latest = [...recent].reverse();
      if (phases.join() !== columns) {
        columns = phases.join();
        table = new DataTable({
          caption: "Micro-batches",
          key: (row) => row.batch,
          columns: [
            { key: "batch", label: "Batch", header: true, make: (cell) => (row) => setText(cell, `№ ${count(row.batch)}`) },
            { key: "at", label: "Finished", make: (cell) => (row) => { setText(cell, moment(row.at, true)); cell.title = utc(row.at); } },
            { key: "rows", label: "Rows", numeric: true, make: figure((row) => [count(row.rows), ""]) },
            { key: "seconds", label: "Duration", numeric: true, make: figure((row) => seconds(row.seconds)) },
            ...phases.map((phase) => ({ key: phase, label: named(phase), numeric: true, make: figure((row) => seconds(row.phases[phase] ?? 0)) })),
          ],
        });
        scroll.replaceChildren(table.element);
      }
      if (element.open) table.update(latest);
    },
  };
}
