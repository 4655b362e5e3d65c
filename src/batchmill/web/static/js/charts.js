// Time charts, drawn by uPlot in the colours of the style sheet.

import { h, setAttribute } from "./dom.js";
import { clock, day, plain, utc } from "./format.js";

const DAY_S = 86_400;
const LEAST_DRAG = 6; // pixels; less is a click
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

// uPlot listens to a mouse only. A finger that moves sideways selects; up and down the page scrolls.
function selectByTouch(chart) {
  const { over } = chart;
  let start = null; // where the finger came down
  const select = (left, width, done) => chart.setSelect({ left, top: 0, width, height: over.clientHeight }, done);
  const place = ({ clientX }) => {
    const { left, width } = over.getBoundingClientRect();
    return Math.min(width, Math.max(0, clientX - left));
  };
  const drag = (event, done) => {
    if (start === null || !event.isPrimary) return;
    const at = place(event);
    select(Math.min(start, at), Math.abs(at - start), done);
    if (done) start = null;
  };
  over.style.touchAction = "pan-y pinch-zoom";
  over.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" && event.isPrimary) start = place(event);
  });
  over.addEventListener("pointermove", (event) => drag(event, false));
  over.addEventListener("pointerup", (event) => drag(event, true));
  over.addEventListener("pointercancel", () => {
    // The browser scrolls or zooms.
    if (start !== null) select(0, 0, false);
    start = null;
  });
}

// series: [{label, colour: "--name", fill}]; format: number -> [text, unit], of the axis and,
// unless there is value, of the legend; range: as in uPlot;
// sync: charts with the same name share their cursor; span: the least number of seconds shown;
// onZoom(from, to): called after a part of the chart was selected with the mouse or a finger.
export class TimeChart {
  #settings;
  #chart = null;
  #data = null;
  #before = null; // the series of an earlier time, drawn dashed
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

  // incomplete: the start of the first bucket that may still grow, and so shows too little;
  // before: {name, series}, the same series of an earlier time, point by point.
  update(times, series, { incomplete = null, before = null } = {}) {
    const same = this.#before?.name === before?.name && this.#data?.length === series.length + 1;
    this.#data = [times, ...series];
    this.#before = before;
    this.#incomplete = incomplete;
    if (this.#chart && same) {
      this.#chart.setData(this.#drawn());
      this.#showNewest();
    } else this.redraw();
  }

  // spans: [{from, to, colour: "--name", text}], such as the time in which an alert fired; to: null is now.
  mark(spans) {
    this.#marks = spans;
    const said = spans.map((span) => span.text).join("; ");
    setAttribute(this.element, "aria-label", said ? `${this.#settings.title}. ${said}` : this.#settings.title);
    this.#chart?.redraw(false);
  }

  // Other series from the next update on.
  setSeries(series) {
    if (JSON.stringify(series) === JSON.stringify(this.#settings.series)) return;
    this.#settings.series = series;
    this.#chart?.destroy();
    this.#chart = null;
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
    this.#chart = new window.uPlot(this.#options(width), this.#drawn(), this.element);
    if (this.#settings.onZoom) selectByTouch(this.#chart);
    this.#showNewest();
  }

  // For each series three lines: what is complete, what is still filling, the earlier time.
  #drawn() {
    const [times, ...series] = this.#data;
    const first = this.#firstIncomplete();
    return [
      times,
      ...series.map((values) => values.map((value, index) => (index < first ? value : null))),
      ...series.map((values) => values.map((value, index) => (index >= first - 1 && first < times.length ? value : null))),
      ...series.map((_values, index) => times.map((_at, place) => this.#before?.series[index]?.[place] ?? null)),
    ];
  }

  // Where nothing is complete, what there is has to do.
  #firstIncomplete() {
    const [times, ...series] = this.#data;
    const at = this.#incomplete === null ? -1 : times.findIndex((time) => time >= this.#incomplete);
    const some = at > 0 && series.some((values) => values.slice(0, at).some((value) => !missing(value)));
    return some ? at : times.length;
  }

  #options(width) {
    const { series, format, height, sync, range, span, onZoom } = this.#settings;
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const fromZero = (_u, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1];
    const newest = (_u, low, high) => [Math.min(low, high - span), high];
    // Only the cursor is shared: a selection belongs to the chart it is made in.
    const shared = { key: sync, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } };
    return {
      width,
      height,
      padding: [10, 28, 0, 0],
      cursor: { sync: sync ? shared : undefined, drag: { x: Boolean(onZoom), y: false, setScale: false }, points: { size: 7 } },
      scales: { x: { time: true, ...(span ? { range: newest } : {}) }, y: { range: range ?? fromZero } },
      axes: [
        { ...axis, values: ticks, space: 70, size: 30, gap: 6 },
        { ...axis, values: (_u, splits) => splits.map((split) => plain(format(split))), size: 68 },
      ],
      series: [
        { label: "Time", value: (_u, at) => this.#moment(at) },
        ...series.map((line, index) => this.#line(line, index)),
        ...series.map((line) => ({ ...this.#line({ ...line, fill: false }), class: "unlisted", dash: [2, 4], auto: false })),
        ...series.map((line, index) => this.#earlier(line, index)),
      ],
      hooks: {
        drawClear: [(chart) => this.#shade(chart), (chart) => this.#drawMarks(chart)],
        setCursor: [(chart) => chart.cursor.left < 0 && this.#showNewest()],
        setSelect: [(chart) => this.#selected(chart)],
      },
    };
  }

  #line({ label, colour: name, fill }, index) {
    const stroke = colour(name);
    const format = this.#settings.value ?? this.#settings.format;
    return {
      label,
      stroke,
      width: 1.6,
      fill: fill ? `color-mix(in srgb, ${stroke} 12%, transparent)` : undefined,
      points: { show: true, size: 5, width: 0, fill: stroke, filter: isolated },
      // From all data: a bucket that is filling is in another line.
      value: (_u, _value, _series, at) => (missing(at) ? "–" : plain(format(this.#data[index + 1]?.[at] ?? null))),
    };
  }

  #earlier(line, index) {
    const alone = this.#settings.series.length === 1;
    const format = this.#settings.value ?? this.#settings.format;
    const stroke = colour(alone ? "--soft" : line.colour);
    return {
      label: this.#before?.name ?? "before",
      class: this.#before && alone ? "earlier" : "unlisted",
      stroke,
      width: 1.3,
      dash: [6, 4],
      points: { show: false },
      value: (_u, _value, _series, at) => (missing(at) ? "–" : plain(format(this.#before?.series[index]?.[at] ?? null))),
    };
  }

  #selected(chart) {
    const { left, width } = chart.select;
    if (width < LEAST_DRAG) return;
    const from = chart.posToVal(left, "x");
    const to = chart.posToVal(left + width, "x");
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.#settings.onZoom?.(from, to);
  }

  #moment(at) {
    if (missing(at)) return "–";
    const date = at % 60 ? utc(at).slice(11, 19) : utc(at).slice(0, 16);
    const growing = this.#incomplete !== null && at >= this.#incomplete;
    return `${clock(at, at % 60 > 0)} (${date} UTC)${growing ? ", incomplete" : ""}`;
  }

  // Incomplete buckets have another background.
  #shade(chart) {
    if (this.#incomplete === null) return;
    const { ctx, bbox } = chart;
    const left = Math.max(bbox.left, chart.valToPos(this.#incomplete, "x", true) - 8 * devicePixelRatio);
    if (left >= bbox.left + bbox.width) return;
    ctx.save();
    ctx.fillStyle = colour("--raised");
    ctx.fillRect(left, bbox.top, bbox.left + bbox.width - left, bbox.height);
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
    const [, ...series] = this.#data;
    let last = this.#firstIncomplete() - 1;
    while (last > 0 && series.every((values) => missing(values[last]))) last -= 1;
    if (last >= 0) chart.setLegend({ idx: last }, false);
  }
}

// After a change of the theme: the colours of a canvas do not change by themselves.
export function redrawCharts() {
  for (const chart of charts) chart.redraw();
}
