// DOM helpers. External data is always inserted as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** Create an HTML element; children are nodes or strings. */
export function createElement(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function createSvg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Set the text of a node only if it differs: otherwise browsers repaint it and screen readers repeat it. */
export function setText(node, value) {
  const string = String(value);
  if (node.textContent !== string) node.textContent = string;
}

export function setAttribute(node, name, value) {
  const string = String(value);
  if (node.getAttribute(name) !== string) node.setAttribute(name, string);
}

/**
 * Render one row per item. Existing rows are reused, so that the layout does not shift and a focused button keeps the
 * focus. `create` returns a new row; `fill` is called with the cells, the item and the row.
 */
export function renderRows(table, items, create, fill) {
  const body = table.tBodies[0];
  table.hidden = items.length === 0;
  while (body.rows.length > items.length) body.lastElementChild.remove();
  items.forEach((item, index) => {
    let row = body.rows[index];
    if (!row) {
      row = create();
      body.append(row);
    }
    fill(row.cells, item, row);
  });
}

/** Create a row of empty cells with these classes; the first cell is the row header. */
export function createRow(...classes) {
  const row = createElement("tr");
  classes.forEach((name, index) => {
    const cell = createElement(index ? "td" : "th", name ? { class: name } : {});
    if (!index) cell.scope = "row";
    row.append(cell);
  });
  return row;
}

const TAIL_LENGTH = 9; // characters at the end of a long name that are always shown
const MAX_SHORT_NAME = 20;

/** Show a name. If there is too little room, its middle is hidden, so names that differ at their ends stay different. */
export function setName(node, value, title = value) {
  const string = String(value);
  setAttribute(node, "title", title);
  if (node.dataset.name === string) return;
  node.dataset.name = string;
  if (string.length <= MAX_SHORT_NAME) node.replaceChildren(string);
  else {
    const head = createElement("span", { class: "name-head" }, string.slice(0, -TAIL_LENGTH));
    const tail = createElement("span", { class: "name-tail" }, string.slice(-TAIL_LENGTH));
    node.replaceChildren(createElement("span", { class: "long-name" }, head, tail));
  }
}
