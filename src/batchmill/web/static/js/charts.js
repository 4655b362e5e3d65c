// Time charts, drawn by uPlot in the colours of the style sheet.

import { h, setAttribute } from "./dom.js";
import { clock, day, plain, utc } from "./format.js";

const DAY_S = 86_400;
const charts = new Set();

// The value of a custom property: a canvas does not support them, so an element computes it.
function colour(name) {
  document.body.style.setProperty("outline-color", `var(${name})`);
  const value = getComputedStyle(document.body).outlineColor;
  document.body.style.removeProperty("outline-color");
  return value;
}

const missing = (value) => value === null || value === undefined;

function ticks(_chart, splits, _axis, _space, step) {
  let last = "";
  return splits.map((at) => {
    const date = day(at);
    if (step >= DAY_S) return date;
    const time = clock(at, step < 60);
    const text = date === last || last === "" ? time : `${time}\n${date}`;
    last = date;
    return text;
  });
}

// The indexes of values without neighbours: no line shows them, so they need a point.
function isolated(chart, index) {
  const values = chart.data[index];
  const indexes = [];
  values.forEach((value, at) => {
    if (!missing(value) && missing(values[at - 1]) && missing(values[at + 1])) indexes.push(at);
  });
  return indexes;
}

// series: [{label, colour: "--name", fill}]; format: number -> [text, unit], of the axis and,
// unless there is value, of the legend; range: as in uPlot;
// sync: charts with the same name share their cursor; span: the least number of seconds shown.
export class TimeChart {
  #settings;
  #chart = null;
  #data = null; // what uPlot draws and scales: without incomplete buckets
  #full = null;
  #incomplete = null;
  #marks = [];
  #observer;
  #width = 0;

  constructor(settings) {
    this.#settings = { height: 190, ...settings };
    this.element = h("div", { class: "chart", role: "img", "aria-label": settings.title });
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.element);
    charts.add(this);
  }

  // incomplete: the start of the first bucket that is still filling, and so shows too little. From
  // there on lines are dotted, and out of the scale and of what the legend shows by default.
  update(times, series, incomplete = null) {
    this.#full = [times, ...series];
    // In the first minute of all there is nothing else to show.
    const complete = series.map((values) => values.map((value, i) => (incomplete !== null && times[i] >= incomplete ? null : value)));
    this.#data = complete.flat().every(missing) ? this.#full : [times, ...complete];
    this.#incomplete = incomplete;
    if (this.#chart) {
      this.#chart.setData(this.#data);
      this.#showNewest();
    } else this.#draw();
  }

  // spans: [{from, to, colour: "--name", text}], such as the time in which an alert fired; to: null is now.
  mark(spans) {
    this.#marks = spans;
    const said = spans.map((span) => span.text).join("; ");
    setAttribute(this.element, "aria-label", said ? `${this.#settings.title}. ${said}` : this.#settings.title);
    this.#chart?.redraw(false);
  }

  redraw() {
    this.#chart?.destroy();
    this.#chart = null;
    if (this.#data) this.#draw();
  }

  destroy() {
    charts.delete(this);
    this.#observer.disconnect();
    this.#chart?.destroy();
    this.#chart = null;
  }

  #resize() {
    const width = Math.floor(this.element.clientWidth);
    if (!width || width === this.#width) return;
    this.#width = width;
    if (this.#chart) this.#chart.setSize({ width, height: this.#settings.height });
    else if (this.#data) this.#draw();
  }

  #draw() {
    const width = Math.floor(this.element.clientWidth);
    if (!width) return; // not visible yet: the observer calls again
    this.#width = width;
    this.#chart = new window.uPlot(this.#options(width), this.#data, this.element);
    this.#showNewest();
  }

  #options(width) {
    const { series, format, height, sync, range, span } = this.#settings;
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const fromZero = (_u, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1];
    const newest = (_u, low, high) => [Math.min(low, high - span), high];
    return {
      width,
      height,
      padding: [10, 28, 0, 0],
      cursor: { sync: sync ? { key: sync } : undefined, drag: { x: false, y: false }, points: { size: 7 } },
      scales: { x: { time: true, ...(span ? { range: newest } : {}) }, y: { range: range ?? fromZero } },
      axes: [
        { ...axis, values: ticks, space: 70, size: 30, gap: 6 },
        { ...axis, values: (_u, splits) => splits.map((split) => plain(format(split))), size: 68 },
      ],
      series: [{ label: "Time", value: (_u, at) => this.#moment(at) }, ...series.map((line) => this.#line(line))],
      hooks: {
        drawClear: [(chart) => this.#shade(chart), (chart) => this.#drawMarks(chart)],
        draw: [(chart) => this.#dots(chart)],
        setCursor: [(chart) => chart.cursor.left < 0 && this.#showNewest()],
      },
    };
  }

  #line({ label, colour: name, fill }) {
    const stroke = colour(name);
    return {
      label,
      stroke,
      width: 1.6,
      fill: fill ? `color-mix(in srgb, ${stroke} 12%, transparent)` : undefined,
      points: { show: true, size: 5, width: 0, fill: stroke, filter: isolated },
      value: (_u, value, series, at) => plain((this.#settings.value ?? this.#settings.format)(this.#full?.[series]?.[at] ?? value)),
    };
  }

  #moment(at) {
    if (missing(at)) return "–";
    const date = at % 60 ? utc(at).slice(11, 19) : utc(at).slice(0, 16);
    return `${clock(at, at % 60 > 0)} (${date} UTC)${this.#incomplete !== null && at >= this.#incomplete ? ", incomplete" : ""}`;
  }

  // An incomplete bucket has another background.
  #shade(chart) {
    if (this.#incomplete === null) return;
    const { ctx, bbox } = chart;
    const left = Math.max(bbox.left, chart.valToPos(this.#incomplete, "x", true) - 8 * devicePixelRatio);
    ctx.save();
    ctx.fillStyle = colour("--raised");
    ctx.fillRect(left, bbox.top, bbox.left + bbox.width - left, bbox.height);
    ctx.restore();
  }

  // The incomplete buckets, dotted, from the last complete one on.
  #dots(chart) {
    if (this.#incomplete === null) return;
    const [times, ...series] = this.#full;
    const first = times.findIndex((at) => at >= this.#incomplete);
    if (first < 0) return;
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = 1.6 * devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    series.forEach((values, index) => {
      ctx.strokeStyle = colour(this.#settings.series[index].colour);
      ctx.beginPath();
      let drawn = false;
      for (let i = Math.max(0, first - 1); i < times.length; i += 1) {
        if (missing(values[i])) continue;
        const x = chart.valToPos(times[i], "x", true);
        const y = chart.valToPos(values[i], "y", true);
        if (drawn) ctx.lineTo(x, y);
        else ctx.moveTo(x - (i >= first ? 3 * devicePixelRatio : 0), y);
        if (!drawn && i >= first) ctx.lineTo(x, y);
        drawn = true;
      }
      ctx.stroke();
    });
    ctx.restore();
  }

  // A tinted background with a bar at its top, and a line where it begins.
  #drawMarks(chart) {
    const { ctx, bbox } = chart;
    const right = bbox.left + bbox.width;
    for (const { from, to, colour: name } of this.#marks) {
      const begin = Math.min(right, Math.max(bbox.left, chart.valToPos(from, "x", true)));
      const end = to === null ? right : Math.min(right, Math.max(bbox.left, chart.valToPos(to, "x", true)));
      if (end <= bbox.left || begin >= right) continue;
      const width = Math.max(end - begin, 3 * devicePixelRatio);
      ctx.save();
      ctx.fillStyle = colour(name);
      ctx.globalAlpha = 0.12;
      ctx.fillRect(begin, bbox.top, width, bbox.height);
      ctx.globalAlpha = 0.9;
      ctx.fillRect(begin, bbox.top, width, 3 * devicePixelRatio);
      if (begin > bbox.left) ctx.fillRect(begin, bbox.top, devicePixelRatio, bbox.height);
      ctx.restore();
    }
  }

  // Without a cursor the legend shows the newest complete values.
  #showNewest() {
    const chart = this.#chart;
    if (!chart || !this.#data || chart.cursor.left >= 0) return;
    const [times, ...series] = this.#data;
    let last = times.length - 1;
    while (last > 0 && series.every((values) => missing(values[last]))) last -= 1;
    if (last >= 0) chart.setLegend({ idx: last }, false);
  }
}

// After a change of the theme: the colours of a canvas do not change by themselves.
export function redrawCharts() {
  for (const chart of charts) chart.redraw();
}
