// Micro-batches: a bar each, a colour for each phase, so that one sees where time goes.

import { h, panel, setAttribute, setChildren, setText, svg } from "../dom.js";
import { count, moment, plain, seconds, utc } from "../format.js";
import { DataTable, figure } from "../table.js";

const MOST = 60;
const HEIGHT = 150;
const BAR = 8;
const STEP = 10;
const NAMES = { l1: "L1", l2: "L2", topn: "top-N" };
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
  const empty = h("p", { class: "empty" }, "No micro-batch yet: the first one comes when Spark has started and there is something to read.");
  const shown = new Map();
  let last = "";

  function draw(found) {
    const phases = [...new Set(found.flatMap((each) => Object.keys(each.phases ?? {})))];
    const most = ceiling(found.map((each) => each.seconds));
    setText(top, plain(seconds(most)));
    setText(middle, plain(seconds(most / 2)));
    const first = MOST - found.length;
    const wanted = found.map((batch, index) => {
      const bar = shown.get(batch.batch) ?? shown.set(batch.batch, svg("g", {}, svg("title"))).get(batch.batch);
      fillBar(bar, batch, phases, most, (first + index) * STEP);
      return bar;
    });
    for (const key of [...shown.keys()]) if (!found.some((each) => each.batch === key)) shown.delete(key);
    setChildren(drawing, wanted);
    const newest = found.at(-1);
    setAttribute(drawing, "aria-label", `The newest ${found.length} micro-batches; the newest took ${plain(seconds(newest.seconds))}`);
    legend.replaceChildren(
      ...phases.map((phase, index) =>
        h("li", {}, h("span", { class: `swatch phase-${(index % 8) + 1}` }), `${named(phase)} `, h("strong", {}, plain(seconds(newest.phases[phase] ?? 0)))),
      ),
    );
    const cut = found.filter((each) => each.seconds > most);
    const slowest = Math.max(...found.map((each) => each.seconds));
    const average = found.reduce((sum, each) => sum + each.seconds, 0) / found.length;
    setText(note, `newest ${plain(seconds(newest.seconds))}, on average ${plain(seconds(average))}; ${count(newest.rows)} rows in the newest${cut.length ? `; ${count(cut.length)} cut, up to ${plain(seconds(slowest))}` : ""}`);
    table.show(found, phases);
  }

  return {
    element,
    show({ batches: all = [] }) {
      const found = all.slice(-MOST);
      const now = JSON.stringify(found.map((each) => [each.batch, each.at]));
      setChildren(element, [element.firstChild, ...(found.length ? [body, table.element] : [empty])]);
      if (found.length && now !== last) draw(found);
      last = now;
    },
  };
}

function fillBar(bar, batch, phases, most, x) {
  setText(bar.firstChild, `№ ${batch.batch}, ${moment(batch.at, true)}: ${plain(seconds(batch.seconds))}, ${count(batch.rows)} rows\n${phases.map((each) => `${named(each)} ${plain(seconds(batch.phases[each] ?? 0))}`).join("\n")}`);
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
  // A gap near its top: it would go on.
  const gap = bar.lastChild;
  setAttribute(gap, "class", "gap");
  setAttribute(gap, "x", x);
  setAttribute(gap, "y", 9);
  setAttribute(gap, "width", STEP);
  setAttribute(gap, "height", batch.seconds > most ? 3 : 0);
}

// One batch that took very long, the first one say, is not to flatten all others.
function ceiling(times) {
  const sorted = [...times].sort((a, b) => a - b);
  const most = sorted.at(-1);
  const usual = sorted[Math.floor((sorted.length - 1) * 0.85)];
  return nice(Math.max(0.1, sorted.length >= 8 && most > 3 * usual ? 1.6 * usual : most));
}

function nice(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((each) => each * unit).find((each) => each >= most);
}

function timesTable() {
  let columns = "";
  let table = null;
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Micro-batches" });
  const element = h("details", { class: "values" }, h("summary", {}, "The batches as a table"), scroll);
  let latest = [];
  element.addEventListener("toggle", () => element.open && table?.update(latest));
  return {
    element,
    show(found, phases) {
      latest = [...found].reverse();
      if (phases.join() !== columns) {
        columns = phases.join();
        table = new DataTable({
          caption: "Micro-batches",
          key: (row) => row.batch,
          columns: [
            { key: "batch", label: "Batch", header: true, make: (cell) => (row) => setText(cell, `№ ${count(row.batch)}`) },
            { key: "at", label: "Through at", make: (cell) => (row) => { setText(cell, moment(row.at, true)); cell.title = utc(row.at); } },
            { key: "rows", label: "Rows", numeric: true, make: figure((row) => [count(row.rows), ""]) },
            { key: "seconds", label: "Took", numeric: true, make: figure((row) => seconds(row.seconds)) },
            ...phases.map((each) => ({ key: each, label: named(each), numeric: true, make: figure((row) => seconds(row.phases[each] ?? 0)) })),
          ],
        });
        scroll.replaceChildren(table.element);
      }
      if (element.open) table.update(latest);
    },
  };
}
