// A panel with the chart of one metric: a line, or one for each label; and what stands there before.

import { TimeChart } from "../charts.js";
import { h, panel, setAttribute, setText } from "../dom.js";
import { UNIT_NAMES, formatOf, ms } from "../format.js";

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7", "--series-8"];
const RANKS = ["p50", "p75", "p90", "p95", "p99"];
const share = (_u, low) => [Math.max(0, Math.min(0.98, (low ?? 1) - 0.01)), 1.0005];
const score = (_u, low) => [Math.max(0, Math.min(0.5, (low ?? 1) - 0.05)), 1.005];

export const colourOf = (label, index) => (RANKS.includes(label) ? `--${label}` : COLOURS[index % COLOURS.length]);

// id: of the heading; zoom(from, to): after a part of the chart was selected.
export function chartPanel(id, zoom, { height = 190 } = {}) {
  let chart = null;
  let drawn = "";
  const area = h("div", { class: "body" });
  const { element, heading, note } = panel(" ", { id: `chart-${id}` }, area);
  const anchor = h("a", { class: "metric" });
  const examples = h("a", { class: "examples", title: "Example traces, of its slowest or failed calls" }, "traces");
  element.firstChild.append(examples, anchor);

  return {
    element,
    destroy: () => chart?.destroy(),
    // lines: [{label, values}]; before: {name, lines} of an earlier time; marks: as TimeChart.mark();
    // href: of the metric in the explorer; traces: of example traces.
    show({ title, unit, least, lines, before, times, incomplete, marks = [], href = null, metric = "", traces = null }) {
      setText(heading, title);
      const ranks = lines.length > 1 && lines.every(({ label }) => RANKS.includes(label));
      setText(note, ranks ? "pN: N % at least this fast" : UNIT_NAMES[unit] ?? "");
      setText(anchor, metric === title ? "explore" : metric);
      setAttribute(anchor, "href", href);
      anchor.hidden = href === null;
      setAttribute(examples, "href", traces);
      examples.hidden = !traces;
      const now = JSON.stringify([unit, least, title]);
      if (now !== drawn) {
        drawn = now;
        chart?.destroy();
        chart = new TimeChart({
          title: `${title} over time; the table below has the values`,
          series: [],
          format: unit === "ms" ? ms : formatOf(unit),
          value: formatOf(unit, least),
          range: { share, score }[unit],
          sync: "entity",
          height,
          onZoom: zoom,
        });
        area.replaceChildren(chart.element);
      }
      chart.setSeries(lines.map(({ label }, index) => ({ label: label || title, colour: colourOf(label, index), fill: lines.length === 1 })));
      const was = before && { name: before.name, series: lines.map(({ label }) => before.lines.find((line) => line.label === label)?.values ?? []) };
      chart.update(times, lines.map(({ values }) => values), { incomplete, before: was });
      chart.mark(marks);
    },
  };
}
