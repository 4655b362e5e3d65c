// Creates and changes elements, never from markup, so that data cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// Changes only what differs, so that screen readers do not read an unchanged element again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Sets the children in this order, moving as few as possible; the focus stays.
export function setChildren(parent, wanted) {
  const focused = document.activeElement;
  let next = parent.firstChild;
  for (const child of wanted) {
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
  }
  while (next) {
    const removed = next;
    next = next.nextSibling;
    removed.remove();
  }
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

// The parts of a text in which `backticks` mean code.
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

// A number and its unit, as [text, unit] from format.js; null for no value.
export function quantity(formatted) {
  if (formatted === null) return h("span", { class: "none" }, "–");
  const [text, unit] = formatted;
  return h("span", {}, text, h("span", { class: "unit" }, unit));
}

export function panel(title, { sub = "", id } = {}, ...children) {
  const heading = h("h2", id ? { id } : {}, title);
  const note = h("span", { class: "sub" }, sub);
  const element = h("section", { class: "panel", "aria-labelledby": id }, h("header", {}, heading, note), ...children);
  return { element, heading, note };
}
