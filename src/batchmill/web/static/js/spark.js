// Sparklines: the shape of a series beside a number.

import { setAttribute, svg } from "./dom.js";

const WIDTH = 100;
const HEIGHT = 26;

export function sparkline() {
  const area = svg("path", { class: "area" });
  const was = svg("path", { class: "was" });
  const line = svg("path", { class: "line" });
  const dots = svg("path", { class: "dots" });
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    area,
    was,
    line,
    dots,
  );
  return {
    element,
    // low, high: bounds that are always shown, so that 99.9 % beside 100 % is not a cliff.
    // From the index `filling` on, buckets are incomplete: dotted, and out of the scale.
    // before: the values of an earlier time, dashed.
    update(values, low = null, high = null, filling = -1, before = []) {
      const complete = filling < 0 ? values : values.map((value, index) => (index < filling ? value : null));
      const scaled = [...complete, ...before];
      const [lines, areas] = paths(complete, low, high, scaled);
      setAttribute(line, "d", lines);
      setAttribute(area, "d", areas);
      const rest = filling < 0 ? [] : values.map((value, index) => (index >= filling - 1 ? value : null));
      setAttribute(dots, "d", rest.slice(filling).some((value) => value !== null) ? paths(rest, low, high, scaled)[0] : "");
      setAttribute(was, "d", paths(before, low, high, scaled)[0]);
    },
  };
}

// scaled: the values that make the scale; others are cut at its ends.
function paths(values, low, high, scaled = values) {
  let known = scaled.filter((value) => value !== null);
  if (!known.length) known = values.filter((value) => value !== null);
  if (!known.length) return ["", ""];
  const least = Math.min(low ?? Infinity, ...known);
  const most = Math.max(high ?? -Infinity, ...known);
  const step = values.length > 1 ? WIDTH / (values.length - 1) : 0;
  const x = (index) => (values.length > 1 ? index * step : WIDTH / 2).toFixed(1);
  const within = (value) => Math.min(most, Math.max(least, value));
  const y = (value) => (most > least ? HEIGHT - 2 - ((within(value) - least) / (most - least)) * (HEIGHT - 4) : HEIGHT / 2).toFixed(1);
  let lines = "";
  let areas = "";
  let begin = null;
  values.forEach((value, index) => {
    if (value === null) {
      begin = null;
      return;
    }
    const ends = values[index + 1] === undefined || values[index + 1] === null;
    // A single value would be an invisible point.
    if (begin === null) lines += ends ? `M${(x(index) - 0.8).toFixed(1)} ${y(value)}h1.6` : `M${x(index)} ${y(value)}`;
    else lines += `L${x(index)} ${y(value)}`;
    if (begin === null) areas += `M${x(index)} ${HEIGHT}`;
    areas += `L${x(index)} ${y(value)}`;
    begin ??= index;
    if (ends) areas += `L${x(index)} ${HEIGHT}Z`;
  });
  return [lines, areas];
}
