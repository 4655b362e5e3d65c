// Temporary faults, one line each over the bottom of the page, while they last.

import { h, setText, withCode } from "./dom.js";

export class Notices {
  #element;
  #shown = new Map();

  constructor(element) {
    this.#element = element;
    const room = new ResizeObserver(() => document.documentElement.style.setProperty("--notices", `${element.offsetHeight}px`));
    room.observe(element);
  }

  set(name, message, { bad = false, action = null } = {}) {
    let known = this.#shown.get(name);
    if (!known) {
      const text = h("p");
      const button = h("button", { type: "button", onclick: () => known.act?.() });
      known = { element: h("div", { class: "notice", data: { name } }, text, button), text, button, act: null };
      this.#shown.set(name, known);
      this.#element.append(known.element);
    }
    known.act = action?.[1] ?? null;
    known.button.hidden = action === null;
    if (action) setText(known.button, action[0]);
    known.element.classList.toggle("bad", bad);
    if (known.message !== message) known.text.replaceChildren(...withCode(message));
    known.message = message;
  }

  clear(name) {
    this.#shown.get(name)?.element.remove();
    this.#shown.delete(name);
  }
}
