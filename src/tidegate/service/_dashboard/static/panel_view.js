// Creates and updates the panels that component_panels.js describes.

import { renderCell } from "./cells.js";
import { createElement, createRow, renderRows, setText } from "./dom.js";

/** A section of the page with a heading, tables, and a message instead of them. */
class PanelView {
  constructor(name, spec) {
    this.spec = spec;
    const heading = createElement("h2", { id: `h-${name}` }, spec.title);
    this.note = createElement("p", { class: "aside" });
    this.drawing = createElement("div");
    this.tables = spec.tables.map(({ columns }, index) => createTable(`${name}-${index}`, columns));
    this.message = createElement("p", { class: "empty" });
    const body = createElement("div", { class: "body", tabindex: "0", role: "group", "aria-label": spec.title }, this.drawing, ...this.tables, this.message);
    const head = createElement("div", { class: "head" }, heading, this.note);
    this.node = createElement("section", { class: "panel half", id: `panel-${name}`, "aria-labelledby": heading.id }, head, body);
  }

  update(data, range) {
    const failed = data.error !== undefined;
    setText(this.note, failed ? "" : this.spec.note?.(data) ?? "");
    if (this.spec.draw && !failed) this.spec.draw(this.drawing, data, range);
    let rowCount = 0;
    this.spec.tables.forEach(({ rows, columns }, index) => {
      const items = failed ? [] : rows(data);
      rowCount += items.length;
      this.tables[index].hidden = items.length === 0;
      const create = () => createRow(...columns.map(([, , classes]) => classes ?? ""));
      renderRows(this.tables[index], items, create, (cells, item) => columns.forEach(([, cell], place) => renderCell(cells[place], cell(item))));
    });
    this.message.hidden = rowCount > 0;
    setText(this.message, failed ? `This panel is not available: ${data.error}` : "Nothing to show yet");
  }
}

function createTable(id, columns) {
  const headings = columns.map(([heading, , classes]) => createElement("th", { scope: "col", ...(classes ? { class: classes } : {}) }, heading));
  return createElement("table", { id }, createElement("thead", {}, createElement("tr", {}, ...headings)), createElement("tbody"));
}

/** The panels on the page; those whose data is missing are removed. */
export class PanelViews {
  constructor(host, specs) {
    this.host = host;
    this.specs = specs;
    this.views = new Map();
  }

  update(panels, range) {
    for (const [name, spec] of Object.entries(this.specs)) {
      const view = this.views.get(name);
      if (panels[name] === undefined) {
        view?.node.remove();
        this.views.delete(name);
      } else if (view) view.update(panels[name], range);
      else this.add(name, spec).update(panels[name], range);
    }
  }

  add(name, spec) {
    const view = new PanelView(name, spec);
    this.views.set(name, view);
    const names = Object.keys(this.specs);
    const next = names.slice(names.indexOf(name) + 1).find((later) => this.views.has(later));
    this.host.insertBefore(view.node, next ? this.views.get(next).node : null);
    return view;
  }
}
