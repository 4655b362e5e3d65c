// Elements made and changed: nothing here takes markup, so no data can become any.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return element;
}

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// Sets what differs only: an element that stays the same is not touched, nor read out again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Children in this order, moving as few as possible; whoever has the focus keeps it.
export function setChildren(parent, wanted) {
  const focused = document.activeElement;
  let next = parent.firstChild;
  for (const each of wanted) {
    if (each === next) next = next.nextSibling;
    else parent.insertBefore(each, next);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

// A text in which `backticks` mean code.
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

// A number and its unit, as [text, unit] from format.js; null: nothing is known.
export function quantity(found) {
  if (found === null) return h("span", { class: "none" }, "–");
  return h("span", {}, found[0], h("span", { class: "unit" }, found[1]));
}

export function panel(title, { sub = "", id } = {}, ...children) {
  const heading = h("h2", id ? { id } : {}, title);
  const note = h("span", { class: "sub" }, sub);
  const element = h("section", { class: "panel", "aria-labelledby": id }, h("header", {}, heading, note), ...children);
  return { element, heading, note };
}
