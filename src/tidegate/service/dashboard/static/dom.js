// Small helpers around the DOM. Whatever comes from outside becomes text, never markup.

export const $ = (id) => document.getElementById(id);

/** Make an element; children are nodes or texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Set a text only if it is another one: what does not change is not drawn again, nor read out again. */
export function text(node, value) {
  const wanted = String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function attribute(node, name, value) {
  const wanted = String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

/**
 * Show items as rows. Rows stay where they are and get other contents, so that nothing moves and a key that has the
 * focus keeps it. `make` gives a row and what to fill; `fill` is called with both for each item.
 */
export function rows(table, items, make, fill) {
  const body = table.tBodies[0];
  table.hidden = items.length === 0;
  while (body.rows.length > items.length) body.lastElementChild.remove();
  items.forEach((item, index) => {
    let row = body.rows[index];
    if (!row) {
      row = make();
      body.append(row);
    }
    fill(row.cells, item, row);
  });
}

/** Make a row of empty cells with these classes; the first is its heading. */
export function cells(...classes) {
  const row = el("tr");
  classes.forEach((name, index) => {
    const cell = el(index ? "td" : "th", name ? { class: name } : {});
    if (!index) cell.scope = "row";
    row.append(cell);
  });
  return row;
}

/** Say what would fill a panel while nothing does. */
export function empty(table, isEmpty, why) {
  const note = table.parentElement.querySelector(".empty");
  if (why !== undefined) text(note, why);
  note.hidden = !isEmpty;
}

/** A bar in a cell, with its figures beside it: colour is never the only sign. */
export function bar(cell, share, words) {
  if (!cell.firstElementChild) {
    cell.append(el("span", { class: "bar", "aria-hidden": "true" }, el("i")), el("span", { class: "words" }));
  }
  const [track, said] = cell.children;
  const part = Math.max(0, Math.min(1, share || 0));
  const width = `${(part * 100).toFixed(1)}%`;
  if (track.firstElementChild.style.width !== width) track.firstElementChild.style.width = width;
  attribute(track, "data-level", part >= 1 ? "full" : part >= 0.8 ? "high" : "fine");
  text(said, words);
}
