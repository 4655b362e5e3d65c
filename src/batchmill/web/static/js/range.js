// The time range and the grain: in the address, in API requests, and their controls.

import { h, setAttribute } from "./dom.js";
import { zone } from "./format.js";

const PRESETS = { "15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000 };
const GRAINS = { auto: "Auto", minute: "Minute", hour: "Hour", day: "Day" };
export const BUCKET_S = { minute: 60, hour: 3600, day: 86_400 };
const MOST_BUCKETS = 1500;

export function read(query) {
  const from = Number(query.get("from"));
  const to = Number(query.get("to"));
  const own = from > 0 && to > from;
  const preset = query.get("range") in PRESETS ? query.get("range") : "1h";
  const grain = query.get("grain") in GRAINS ? query.get("grain") : "auto";
  return { preset: own ? "own" : preset, from: own ? from : null, to: own ? to : null, grain };
}

const length = (range) => (range.preset === "own" ? range.to - range.from : PRESETS[range.preset]);

export function write(query, range) {
  for (const name of ["range", "from", "to", "grain"]) query.delete(name);
  if (range.preset === "own") {
    query.set("from", range.from);
    query.set("to", range.to);
  } else if (range.preset !== "1h") query.set("range", range.preset);
  if (range.grain !== "auto") query.set("grain", range.grain);
}

export function parameters(range) {
  const { grain } = range;
  if (range.preset === "own") return { from: range.from, to: range.to, grain };
  return { from: `now-${range.preset}`, to: "now", grain };
}

const fits = (range, grain) => grain === "auto" || length(range) / BUCKET_S[grain] <= MOST_BUCKETS - 1;

const localInput = (epoch) => new Date((epoch - new Date().getTimezoneOffset() * 60) * 1000).toISOString().slice(0, 16);

// The controls; calls on(range) for each choice.
export function controls(on, { withGrain = true } = {}) {
  let now = { preset: "1h", from: null, to: null, grain: "auto" };
  const radios = new Map();
  const segments = h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "Time range"));
  for (const name of [...Object.keys(PRESETS), "own"]) {
    const input = h("input", { type: "radio", name: "range", value: name, onchange: () => choosePreset(name) });
    radios.set(name, input);
    segments.append(h("label", {}, input, h("span", {}, name === "own" ? "Custom" : name)));
  }
  const from = h("input", { type: "datetime-local", required: true, "aria-label": `From, ${zone()}` });
  const to = h("input", { type: "datetime-local", required: true, "aria-label": `To, ${zone()}` });
  const own = h("form", { class: "custom", onsubmit: apply, hidden: true }, from, h("span", {}, "to"), to, h("button", { type: "submit" }, "Show"));
  const options = new Map(Object.entries(GRAINS).map(([value, text]) => [value, h("option", { value }, text)]));
  const grain = h("select", { onchange: () => choose({ ...now, grain: grain.value }) }, ...options.values());
  const element = h("div", { class: "controls" }, segments, withGrain ? h("label", { class: "field" }, "Grain", grain) : null, own);

  function choose(range) {
    if (!fits(range, range.grain)) range.grain = "auto";
    show(range);
    on(range);
  }

  function choosePreset(name) {
    if (name !== "own") return choose({ ...now, preset: name, from: null, to: null });
    const end = Math.ceil(Date.now() / 60_000) * 60;
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
    if (to.reportValidity()) choose({ ...now, preset: "own", from: begin, to: end });
  }
  to.addEventListener("input", () => to.setCustomValidity(""));
  from.addEventListener("input", () => to.setCustomValidity(""));

  function show(range) {
    now = { ...range };
    radios.get(range.preset).checked = true;
    own.hidden = range.preset !== "own";
    if (range.preset === "own" && document.activeElement?.form !== own) {
      from.value = localInput(range.from);
      to.value = localInput(range.to);
    }
    for (const [value, option] of options) setAttribute(option, "disabled", !fits(range, value));
    grain.value = range.grain;
  }

  return { element, show };
}
