// The time range, the step and the comparison: in the address, in API requests, and their controls.

import { h, setAttribute, setText } from "./dom.js";
import { zone } from "./format.js";

const PRESETS = ["15m", "1h", "6h", "24h", "7d", "30d"];
const UNITS_S = { s: 1, m: 60, h: 3600, d: 86_400, w: 604_800 };
const STEPS = { auto: "Auto", minute: "1 min", "5m": "5 min", "10m": "10 min", hour: "60 min", day: "1 day" };
const COMPARES = { "": "Nothing", before: "The time before", "1d": "A day before", "1w": "A week before" };
export const BUCKET_S = { minute: 60, "5m": 300, "10m": 600, hour: 3600, day: 86_400 };
const MOST_BUCKETS = 1500;
const RELATIVE = /^now(?:-(\d{1,6})([smhdw]))?$/;

// A time in an address: seconds since 1970, or a text such as now-2h; null if it is neither.
function moment(text) {
  if (text === null || text === "") return null;
  if (RELATIVE.test(text)) return text;
  if (/^\d{1,12}(\.\d+)?$/.test(text)) return Number(text);
  const parsed = /^\d{4}-/.test(text) ? Date.parse(text) : NaN;
  return Number.isNaN(parsed) ? null : parsed / 1000;
}

export function epoch(time, now = Date.now() / 1000) {
  if (typeof time === "number") return time;
  const [, count, unit] = RELATIVE.exec(time);
  return count ? now - Number(count) * UNITS_S[unit] : now;
}

const presetOf = ({ from, to }) => (to === "now" && typeof from === "string" && PRESETS.includes(from.slice(4)) ? from.slice(4) : "own");

export function read(query) {
  const old = query.get("range"); // as older versions wrote it
  let from = moment(query.get("from")) ?? (PRESETS.includes(old) ? `now-${old}` : "now-1h");
  let to = moment(query.get("to")) ?? "now";
  if (epoch(from) >= epoch(to)) [from, to] = ["now-1h", "now"];
  const grain = query.get("grain") in STEPS ? query.get("grain") : "auto";
  const compare = query.get("compare") in COMPARES ? query.get("compare") : "";
  return { from, to, grain, compare };
}

const length = ({ from, to }) => epoch(to) - epoch(from);

export function write(query, { from, to, grain, compare }) {
  for (const name of ["range", "from", "to", "grain", "compare"]) query.delete(name);
  if (from !== "now-1h" || to !== "now") query.set("from", from);
  if (to !== "now") query.set("to", to);
  if (grain !== "auto") query.set("grain", grain);
  if (compare) query.set("compare", compare);
}

export const parameters = ({ from, to, grain }) => ({ from, to, grain });

const fits = (range, grain) => grain === "auto" || length(range) / BUCKET_S[grain] <= MOST_BUCKETS - 1;

// The range between two moments of a chart, in whole minutes.
export function zoomed(range, from, to) {
  const begin = Math.floor(from / 60) * 60;
  const chosen = { ...range, from: begin, to: Math.max(Math.ceil(to / 60) * 60, begin + 120) };
  return fits(chosen, chosen.grain) ? chosen : { ...chosen, grain: "auto" };
}

// The parameters of the same request for the time that data is compared with; null if there is none.
export function earlier(compare, data) {
  if (!compare) return null;
  const step = BUCKET_S[data.grain];
  const back = compare === "before" ? Math.ceil((data.to - data.from) / step) * step : UNITS_S[compare.at(-1)] * Number(compare.slice(0, -1));
  return { from: data.from - back, to: data.to - back, grain: data.grain };
}

export const compareName = (compare) => (compare === "before" ? "before" : (COMPARES[compare] ?? "").toLowerCase());

const localInput = (time) => new Date((time - new Date().getTimezoneOffset() * 60) * 1000).toISOString().slice(0, 16);

// The controls; calls on(range) for each choice.
export function controls(on, { withGrain = true, withCompare = false } = {}) {
  let now = { from: "now-1h", to: "now", grain: "auto", compare: "" };
  const radios = new Map();
  const names = new Map();
  const segments = h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "Time range"));
  for (const name of [...PRESETS, "own"]) {
    const input = h("input", { type: "radio", name: "range", value: name, onchange: () => choosePreset(name) });
    const label = h("span", {}, name === "own" ? "Custom" : name);
    radios.set(name, input);
    names.set(name, label);
    segments.append(h("label", {}, input, label));
  }
  const from = h("input", { type: "datetime-local", required: true, "aria-label": `From, ${zone()}` });
  const to = h("input", { type: "datetime-local", required: true, "aria-label": `To, ${zone()}` });
  const own = h("form", { class: "custom", onsubmit: apply, hidden: true }, from, h("span", {}, "to"), to, h("button", { type: "submit" }, "Show"));
  const options = new Map(Object.entries(STEPS).map(([value, text]) => [value, h("option", { value }, text)]));
  const grain = h("select", { onchange: () => choose({ ...now, grain: grain.value }) }, ...options.values());
  const compare = h(
    "select",
    { onchange: () => choose({ ...now, compare: compare.value }) },
    ...Object.entries(COMPARES).map(([value, text]) => h("option", { value }, text)),
  );
  const element = h(
    "div",
    { class: "controls" },
    segments,
    withGrain ? h("label", { class: "field" }, "Step", grain) : null,
    withCompare ? h("label", { class: "field" }, "Compare with", compare) : null,
    own,
  );

  function choose(range) {
    if (!fits(range, range.grain)) range.grain = "auto";
    show(range);
    on(range);
  }

  function choosePreset(name) {
    if (name !== "own") return choose({ ...now, from: `now-${name}`, to: "now" });
    const end = Math.ceil(epoch(now.to) / 60) * 60;
    from.value = localInput(end - length(now));
    to.value = localInput(end);
    own.hidden = false;
    from.focus();
  }

  function apply(event) {
    event.preventDefault();
    const begin = Math.floor(new Date(from.value).getTime() / 1000);
    const end = Math.floor(new Date(to.value).getTime() / 1000);
    to.setCustomValidity(end > begin ? "" : "The end must be after the start.");
    if (to.reportValidity()) choose({ ...now, from: begin, to: end });
  }
  to.addEventListener("input", () => to.setCustomValidity(""));
  from.addEventListener("input", () => to.setCustomValidity(""));

  function show(range) {
    now = { ...range };
    const preset = presetOf(range);
    const relative = preset === "own" && range.to === "now" && typeof range.from === "string";
    radios.get(preset).checked = true;
    setText(names.get("own"), relative ? range.from.slice(4) : "Custom");
    own.hidden = preset !== "own" || relative;
    if (!own.hidden && document.activeElement?.form !== own) {
      from.value = localInput(epoch(range.from));
      to.value = localInput(epoch(range.to));
    }
    for (const [value, option] of options) setAttribute(option, "disabled", !fits(range, value));
    grain.value = range.grain;
    compare.value = range.compare;
  }

  return { element, show };
}
