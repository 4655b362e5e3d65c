// Grey shapes of the size of what will come, so that nothing moves when it does.

import { h } from "./dom.js";

const shapes = (name, count) => Array.from({ length: count }, () => h("div", { class: `skeleton ${name}` }));
const row = (name, ...children) => h("div", { class: name, "aria-hidden": "true" }, ...children);

// tall: with a second line below their numbers.
export const tileShapes = (count, tall = false) => row("tiles", ...shapes(tall ? "tile tall-tile" : "tile", count));

export const chartShapes = (count) => row("charts", ...shapes("panel", count));

export const stageShapes = (count) => row("stages", ...shapes("stage", count));

// A panel that is that high.
export function panelShape(pixels) {
  const [shape] = shapes("panel", 1);
  shape.style.height = `${pixels}px`;
  shape.setAttribute("aria-hidden", "true");
  return shape;
}
