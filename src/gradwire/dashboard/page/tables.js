// Tables that can be sorted. A cell is a string or an element; strings are text.
"use strict";

(function () {
  const g = gradwire;
  const SHOWN = 200; // rows, until somebody wants all

  class Table {
    // columns: {key, name, right, kind, cell(row), value(row)}; key(row) names a row
    constructor({ id, columns, sort = null, down = false, key = null, mark = () => "" }) {
      this.columns = columns;
      this.sort = sort;
      this.down = down;
      this.key = key;
      this.mark = mark;
      this.rows = [];
      this.all = false;
      this.body = g.element("tbody");
      this.heads = columns.map((column) => this._head(column));
      this.more = g.element("button", { type: "button", class: "plain more", onclick: () => { this.all = true; this._show(); } });
      this.element = g.element("div", { class: "tablebox", id, tabindex: -1 },
        g.element("table", {}, g.element("thead", {}, g.element("tr", {}, this.heads)), this.body), this.more);
    }

    _head(column) {
      const label = column.fixed ? column.name : g.element("button", { type: "button", "data-key": column.key, onclick: () => this.sortBy(column.key) }, column.name);
      return g.element("th", { scope: "col", class: column.right ? "right" : "" }, label);
    }

    sortBy(key) {
      this.down = this.sort === key ? !this.down : false;
      this.sort = key;
      this._show();
    }

    set(rows) {
      const said = JSON.stringify(rows);
      if (said === this._said) return;
      this._said = said;
      this.rows = rows;
      this._show();
    }

    refresh() {
      this._show();
    }

    _value(column, row) {
      return column.value ? column.value(row) : row[column.key];
    }

    _sorted() {
      const column = this.columns.find((each) => each.key === this.sort);
      if (!column) return this.rows;
      const sign = this.down ? -1 : 1;
      const missing = (value) => value === null || value === undefined || Number.isNaN(value);
      return [...this.rows].sort((first, second) => {
        const a = this._value(column, first), b = this._value(column, second);
        if (missing(a) || missing(b)) return missing(a) - missing(b); // at the end, whichever way
        return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
      });
    }

    _show() {
      const active = document.activeElement;
      const focused = active && this.body.contains(active) ? active.dataset.focus : null;
      const sorted = this._sorted(), shown = this.all ? sorted : sorted.slice(0, SHOWN);
      this.body.replaceChildren(...shown.map((row) => g.element("tr", { class: this.mark(row) },
        this.columns.map((column) => g.element("td", { class: [column.right ? "right" : "", column.class || ""].join(" ").trim() || null }, column.cell ? column.cell(row) : String(row[column.key] ?? g.NONE))))));
      this.heads.forEach((head, i) => {
        if (this.columns[i].key === this.sort) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      this.more.hidden = shown.length === sorted.length;
      this.more.textContent = `show all ${g.count(sorted.length)}`;
      if (focused) for (const each of this.body.querySelectorAll("[data-focus]")) if (each.dataset.focus === focused) each.focus({ preventScroll: true });
    }
  }

  // A number with a bar beside it.
  function barCell(value, most, second = false) {
    const bar = g.element("i");
    bar.style.width = g.known(value) && most > 0 ? `${Math.min(100, (100 * value) / most)}%` : "0";
    return [g.known(value) ? g.significant(value, 3) : g.NONE, g.element("span", { class: second ? "cellbar second" : "cellbar" }, bar)];
  }

  // Buttons of which one is on.
  function choice(label, options, chosen, onchange) {
    const buttons = options.map(([value, text]) => g.element("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen) }, text));
    const box = g.element("span", { class: "switch", role: "group", "aria-label": label }, buttons);
    for (const button of buttons) button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      onchange(button.dataset.value);
    });
    return box;
  }

  Object.assign(gradwire, { Table, barCell, choice });
})();
