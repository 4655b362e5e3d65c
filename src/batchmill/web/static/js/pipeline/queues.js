// Queues, micro-batchers, flows: depth of each partition or worker, load of each thread, moves.

import { h, panel, setAttribute, setChildren, setText } from "../dom.js";
import { count, countOf } from "../format.js";

const share = (depth, capacity) => (capacity ? depth / capacity : depth ? 1 : 0);
const heat = (fill) => (fill <= 0 ? 0 : fill < 0.25 ? 1 : fill < 0.5 ? 2 : fill < 0.8 ? 3 : 4);
const KINDS = { batcher: "micro-batcher", flows: "flow dispatcher" };
const percent = (fill) => `${fill > 0 && fill < 0.01 ? "<1" : Math.round(fill * 100)} %`;

export function queues() {
  const { element, note } = panel("Queues and drain threads", { id: "queues" });
  const list = h("div", { class: "queues body" });
  const empty = h("p", { class: "empty" }, "No process reports a queue: ingest does not run, or has just started.");
  const known = new Map();
  return {
    element,
    show({ queues: reported = [] }) {
      setText(note, reported.length ? "one cell per partition or worker; a stronger colour means fuller" : "");
      const wanted = reported.map((queue) => {
        const key = `${queue.process} ${queue.kind} ${queue.name}`;
        const card = known.get(key) ?? known.set(key, queueCard()).get(key);
        card.update(queue);
        return card.element;
      });
      setChildren(list, wanted);
      setChildren(element, [element.firstChild, wanted.length ? list : empty]);
    },
  };
}

function queueCard() {
  const name = h("h3");
  const where = h("span", { class: "sub" });
  const depth = h("strong");
  const room = h("span", { class: "sub" });
  const row = h("div", { class: "heat", role: "img" });
  const threads = h("ul", { class: "threads" });
  const figures = h("p", { class: "sub figures" });
  const moves = h("ul", { class: "moves" });
  const moved = h("summary");
  const details = h("details", { class: "moved" }, moved, moves);
  const element = h("article", { class: "queue" }, h("header", {}, name, where, h("span", { class: "depth" }, depth, room)), row, threads, figures, details);
  const cells = [];
  const bars = [];
  return {
    element,
    update(queue) {
      const unit = queue.unit ? ` ${queue.unit}` : "";
      setText(name, queue.name);
      setText(where, `${KINDS[queue.kind] ?? "queue"} of ${queue.process}`);
      const part = queue.kind === "flows" ? "worker" : "partition";
      setText(depth, count(queue.depth));
      setText(room, queue.capacity ? ` of ${count(queue.capacity)}${unit}` : unit);
      const fills = (queue.partitions ?? []).map((partition) => share(partition.depth, partition.capacity));
      grow(cells, row, fills.length, () => h("span", { class: "cell" }));
      fills.forEach((fill, index) => {
        const { depth: now, capacity } = queue.partitions[index];
        setAttribute(cells[index], "data-heat", heat(fill));
        // A single partition is a bar: there are no others to compare it with.
        cells[index].style.width = fills.length === 1 ? `${Math.max(fill > 0 ? 0.5 : 0, Math.min(1, fill) * 100)}%` : "";
        setAttribute(cells[index], "title", `${part === "worker" ? "Worker" : "Partition"} ${index}: ${count(now)}${capacity ? ` of ${count(capacity)}` : ", unbounded"}`);
      });
      element.classList.toggle("single", fills.length === 1);
      const used = fills.filter((fill) => fill > 0).length;
      setAttribute(row, "aria-label", `${countOf(fills.length, part)}, ${count(used)} in use, the fullest ${percent(Math.max(0, ...fills))}`);
      grow(bars, threads, (queue.threads ?? []).length, () => {
        const label = h("span");
        const bar = h("span", { class: "bar", "aria-hidden": "true" }, h("span"));
        const load = h("span", { class: "load" });
        return Object.assign(h("li", {}, label, bar, load), { update({ name: text, load: busy }) {
          const own = text.startsWith(`${queue.name}-`);
          setText(label, own ? `thread ${text.slice(queue.name.length + 1)}` : text);
          setAttribute(label, "title", text);
          setText(load, percent(busy));
          bar.firstChild.style.width = `${Math.round(Math.min(1, busy) * 100)}%`;
        } });
      });
      (queue.threads ?? []).forEach((thread, index) => bars[index].update(thread));
      const rejected = Object.entries(queue.rejected ?? {}).filter(([, n]) => n);
      const flows = queue.flows ? `${countOf(queue.flows.active, "flow")} active, ${count(queue.flows.assigned)} assigned, ${count(queue.flows.completed)} completed; ` : "";
      setText(figures, `${flows}${count(queue.accepted)} accepted${rejected.length ? `, refused: ${rejected.map(([why, n]) => `${count(n)} ${why}`).join(", ")}` : ", none refused"}`);
      const last = queue.last_moves ?? [];
      details.hidden = !queue.moves;
      setText(moved, `${countOf(queue.moves, "move")} by the balancer${last[0] ? `; last: ${last[0]} (UTC)` : ""}`);
      setChildren(moves, []);
      moves.append(...last.map((move) => h("li", {}, move)));
    },
  };
}

function grow(parts, parent, wanted, make) {
  while (parts.length > wanted) parts.pop().remove();
  while (parts.length < wanted) {
    parts.push(make());
    parent.append(parts.at(-1));
  }
}
