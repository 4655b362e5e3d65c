// Tables that are updated in place: rows have a key, and only differences are changed.

import { h, setAttribute, setChildren } from "./dom.js";

// columns: [{key, label, title, numeric, header, make(cell) -> update(row, cell), value(row)}]
// make builds a cell once, update fills it; value is the key of a local sort.
// With `sort` ({key, order}), headers of columns that have `value` or `sortable` are buttons;
// with `onSort` the caller sorts, else the table does.
export class DataTable {
  #columns;
  #key;
  #rows = new Map();
  #heads = new Map();
  #body = h("tbody");
  #sort;
  #onSort;
  #unsorted = [];

  constructor({ caption, columns, key, className = "", sort = null, onSort = null }) {
    this.#columns = columns;
    this.#key = key;
    this.#sort = sort;
    this.#onSort = onSort;
    const head = h("tr", { role: "row" }, ...columns.map((column) => this.#head(column)));
    this.element = h(
      "table",
      // Explicit roles, because narrow pages lay the rows out as blocks.
      { class: `data ${className}`, role: "table" },
      h("caption", { class: "hidden" }, caption),
      h("thead", { role: "rowgroup" }, head),
      this.#body,
    );
    this.#body.setAttribute("role", "rowgroup");
    this.#mark();
  }

  #head(column) {
    const sortable = this.#sort && (column.sortable || column.value);
    const content = sortable
      ? h("button", { type: "button", title: column.title, onclick: () => this.#chosen(column) }, column.label)
      : column.label;
    const head = h("th", { scope: "col", role: "columnheader", class: column.numeric ? "num" : "" }, content);
    if (column.title && !sortable) head.title = column.title;
    if (sortable) this.#heads.set(column.key, head);
    return head;
  }

  #chosen(column) {
    const { key, order } = this.#sort;
    const first = column.first ?? (column.numeric ? "desc" : "asc");
    const next = key !== column.key ? first : order === "asc" ? "desc" : "asc";
    this.setSort({ key: column.key, order: next });
    if (this.#onSort) this.#onSort(this.#sort);
    else this.update(this.#unsorted);
  }

  setSort(sort) {
    this.#sort = sort;
    this.#mark();
  }

  #mark() {
    for (const [key, head] of this.#heads) {
      const order = this.#sort.key === key ? (this.#sort.order === "asc" ? "ascending" : "descending") : "none";
      setAttribute(head, "aria-sort", order);
    }
  }

  update(rows) {
    this.#unsorted = rows;
    const current = new Map();
    for (const row of this.#onSort ? rows : this.#sorted(rows)) {
      const key = this.#key(row);
      if (current.has(key)) continue;
      const known = this.#rows.get(key) ?? this.#make();
      known.update(row);
      current.set(key, known);
    }
    this.#rows = current;
    setChildren(this.#body, [...current.values()].map((row) => row.element));
  }

  #sorted(rows) {
    const column = this.#sort && this.#columns.find(({ key }) => key === this.#sort.key);
    if (!column?.value) return rows;
    const sign = this.#sort.order === "asc" ? 1 : -1;
    return [...rows].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (x === y) return 0;
      if (x === null || x === undefined) return 1; // unknown values come last
      if (y === null || y === undefined) return -1;
      return (typeof x === "string" ? x.localeCompare(y) : x - y) * sign;
    });
  }

  #make() {
    const updates = [];
    const cells = this.#columns.map((column) => {
      const tag = column.header ? "th" : "td";
      const role = column.header ? "rowheader" : "cell";
      const cell = h(tag, { scope: column.header ? "row" : null, role, class: [column.numeric ? "num" : "", column.className ?? ""].join(" ").trim() });
      updates.push(column.make(cell));
      return cell;
    });
    return { element: h("tr", { role: "row" }, ...cells), update: (row) => updates.forEach((update) => update(row)) };
  }
}

// A cell with a text.
export const text = (of) => (cell) => (row) => {
  const wanted = of(row);
  if (cell.textContent !== wanted) cell.textContent = wanted;
};

// A cell with a number and its unit, coloured by its grade if there is one.
export const figure = (of, grade = null) => (cell) => {
  const unit = h("span", { class: "unit" });
  const value = document.createTextNode("");
  const shown = h("span", {}, value, unit);
  cell.append(shown);
  return (row) => {
    const formatted = of(row);
    const [number, name] = formatted ?? ["–", ""];
    if (value.data !== number) value.data = number;
    if (unit.textContent !== name) unit.textContent = name;
    const level = formatted === null ? "none" : grade?.(row) ? `is-${grade(row)}` : "";
    if (shown.className !== level) shown.className = level;
  };
};

// A sortable column of numbers; the lowest success rate comes first. Good values have no colour.
export const number = (key, label, format, grade = null) => ({
  key,
  label,
  numeric: true,
  first: key === "success" ? "asc" : "desc",
  value: (row) => row[key] ?? null,
  make: figure((row) => format(row[key]), grade && ((row) => (grade(row[key]) === "good" ? "" : grade(row[key])))),
});

// Two columns of a relation: as the caller saw its calls, and as the callee did. They differ: a call
// that timed out failed for the caller only, and the network takes time at the caller only.
export const bothSides = (key, label, format, grade = null) =>
  ["caller", "callee"].map((side) => {
    const of = (row) => row[side]?.[key] ?? null;
    return {
      ...number(`${side}-${key}`, `${label}, ${side}`, format, grade),
      title: `${label} as the ${side} measured it; – if it does not report`,
      first: key === "success" ? "asc" : "desc",
      value: of,
      make: figure((row) => format(of(row)), grade && ((row) => (grade(of(row)) === "good" ? "" : grade(of(row))))),
    };
  });

// A cell with a link.
export const link = (of) => (cell) => {
  const anchor = h("a");
  cell.append(anchor);
  return (row) => {
    const { text: label, href, title } = of(row);
    if (anchor.textContent !== label) anchor.textContent = label;
    setAttribute(anchor, "href", href);
    setAttribute(anchor, "title", title);
  };
};
