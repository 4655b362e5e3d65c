// The measures behind the level of ingest, and all other depths with thresholds, each on a scale.

import { h, panel, setChildren, setText } from "../dom.js";
import { bytes, count, plain } from "../format.js";

const MARKS = [["warning", "warning"], ["critical", "critical"], ["critical_plus", "critical plus"]];

export function thresholds() {
  const { element, note } = panel("Thresholds", { id: "thresholds" });
  const list = h("div", { class: "body gauges" });
  const empty = h("p", { class: "empty" }, "No process reports thresholds.");
  const known = new Map();
  return {
    element,
    show(state) {
      const own = state.thresholds?.measures ?? [];
      const measures = [...own, ...(state.levels ?? []).map((level) => ({ ...level, name: `${level.process}: ${level.name}` }))];
      setText(note, state.thresholds ? `current level: ${state.thresholds.level.replace("_", " ")}` : "");
      const wanted = measures.map((measure) => {
        const gauge = known.get(measure.name) ?? known.set(measure.name, gaugeOf()).get(measure.name);
        gauge.update(measure);
        return gauge.element;
      });
      setChildren(list, wanted);
      setChildren(element, [element.firstChild, wanted.length ? list : empty]);
    },
  };
}

function gaugeOf() {
  const name = h("span", { class: "name" });
  const value = h("strong");
  const fill = h("span", { class: "fill" });
  const marks = MARKS.map(([key]) => h("span", { class: `mark ${key}` }));
  const scale = h("div", { class: "scale", "aria-hidden": "true" }, fill, ...marks);
  const text = h("p", { class: "sub" });
  return {
    element: h("div", { class: "gauge" }, h("div", { class: "gauge-head" }, name, value), scale, text),
    update(measure) {
      const form = measure.name.includes("bytes") ? (n) => plain(bytes(n)) : count;
      const most = Math.max(measure.critical_plus, measure.value) * 1.06 || 1;
      setText(name, measure.name.replace(/^./, (first) => first.toUpperCase()));
      setText(value, form(measure.value));
      const level = measure.value >= measure.critical ? "bad" : measure.value >= measure.warning ? "warn" : "good";
      fill.className = `fill ${level}`;
      fill.style.width = `${Math.min(100, (measure.value / most) * 100).toFixed(1)}%`;
      MARKS.forEach(([key], index) => {
        marks[index].style.left = `${((measure[key] / most) * 100).toFixed(1)}%`;
      });
      const decided = Object.entries(measure.decisions ?? {}).map(([what, n]) => `${count(n)} ${what}`);
      const marked = MARKS.map(([key, label]) => `${label} from ${form(measure[key])}`).join(", ");
      setText(text, decided.length ? `${marked}; decided: ${decided.join(", ")}` : marked);
    },
  };
}
