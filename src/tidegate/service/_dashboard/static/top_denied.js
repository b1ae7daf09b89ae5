// The keys and policies with the most denials in the time range of the page.

import { renderMeter } from "./cells.js";
import { byId, createElement, createRow, renderRows, setAttribute, setName, setText } from "./dom.js";
import { copyableKey, countOf, formatCount, formatKey, formatPercent, formatReason, formatTime, sameKey } from "./format.js";
import { STORE_LOST, sum } from "./history.js";

const MAX_ROWS = 20; // that the service returns
let paused = null; // `last` when the user paused
let last = null; // { rows, total, zoomed, storeLost }: `total` is the number of all denials in the range
let current = null; // { blocks, actions }

/** Add up rows of one key, or of one policy. */
function group(rows, by) {
  if (by === "both") return rows;
  const found = new Map();
  for (const row of rows) {
    const place = by === "key" ? JSON.stringify(row.key) : row.policy;
    const known = found.get(place);
    if (!known) found.set(place, { ...row, policies: [row.policy], keys: 1 });
    else {
      known.denied += row.denied;
      known.last_at = Math.max(known.last_at, row.last_at);
      known.over = [...new Set([...known.over, ...row.over])];
      known.keys += 1;
      if (!known.policies.includes(row.policy)) known.policies.push(row.policy);
    }
  }
  return [...found.values()].sort((a, b) => b.denied - a.denied);
}

/** Render the denied keys of the columns that `isShown`. `actions` are openKey, selectPolicy, confirm and copy. */
export function renderTop(columns, isShown, blocks, actions) {
  last = { rows: columns.top.filter(isShown), total: Math.round(sum(columns.denied) * columns.step), zoomed: columns.zoomed === true, storeLost: columns.states.some((state) => state & STORE_LOST) };
  current = { blocks, actions };
  renderLast();
}

function renderLast() {
  const { blocks, actions } = current;
  const shown = paused ?? last;
  const by = byId("top-group").value;
  const wanted = byId("top-filter").value.trim().toLowerCase();
  const grouped = group(shown.rows, by);
  const items = grouped.filter((row) => `${formatKey(row.key)} ${row.policy}`.toLowerCase().includes(wanted));
  byId("panel-top").hidden = shown.rows.length === 0;
  const listed = shown.rows.reduce((sum, row) => sum + row.denied, 0);
  const all = Math.max(shown.total, listed);
  renderRows(byId("top"), items, createTopRow, (cells, row) => {
    const isBlocked = blocks.some((block) => block.policy === row.policy && sameKey(block.key, row.key));
    const isPolicy = by === "policy";
    const label = isPolicy ? row.policy : formatKey(row.key);
    const open = cells[0].firstElementChild;
    setName(open, label, isPolicy ? `show only the policy ${label}` : `look up ${label}`);
    open.run = () => (isPolicy ? actions.selectPolicy(row.policy) : actions.openKey(row.key));
    const policy = isPolicy ? `${row.keys} ${row.keys === 1 ? "key" : "keys"} listed` : (row.policies ?? [row.policy]).join(", ");
    setName(cells[1], policy);
    setText(cells[2], formatCount(row.denied));
    renderMeter(cells[3], { fraction: row.denied / all, label: formatPercent(row.denied, all), level: "denied" });
    setText(cells[4], isBlocked ? "blocked" : formatReason(row.over));
    setAttribute(cells[4], "title", cells[4].textContent);
    setText(cells[5], formatTime(row.last_at));
    const [block, copy] = cells[6].firstElementChild.children;
    block.hidden = isPolicy || by === "key";
    copy.hidden = isPolicy;
    setText(block, isBlocked ? "Unblock…" : "Block…");
    setAttribute(block, "class", isBlocked ? "small" : "small danger");
    setAttribute(block, "aria-label", `${isBlocked ? "Unblock" : "Block"} ${label} in ${row.policy}`);
    setAttribute(copy, "aria-label", `Copy ${label}`);
    block.run = () => actions.confirm(isBlocked ? "unblock" : "block", row.policy, row.key);
    copy.run = () => actions.copy(copyableKey(row.key), copy);
  });
  byId("top").hidden = items.length === 0;
  byId("top-empty").hidden = items.length > 0;
  const notes = [listed < all ? `${formatCount(listed)} of ${countOf(all, "denied call", "denied calls")} listed` : countOf(all, "denied call", "denied calls")];
  if (shown.zoomed) notes.push("keys of full minutes");
  if (shown.storeLost) notes.push("not listed: denied without the store");
  if (shown.rows.length >= MAX_ROWS) notes.push(`the ${MAX_ROWS} most denied keys`);
  if (paused) notes.push("paused");
  setText(byId("note-top"), notes.join(", "));
}

function createTopRow() {
  const row = createRow("c-key", "c-policy hide-on-phone", "num", "c-bar", "hide-on-tablet", "c-time hide-on-narrow", "c-actions");
  const open = createElement("button", { type: "button", class: "link name" });
  const block = createElement("button", { type: "button", class: "small danger" }, "Block…");
  const copy = createElement("button", { type: "button", class: "small hide-on-phone" }, "Copy");
  for (const button of [open, block, copy]) button.addEventListener("click", () => button.run());
  row.cells[0].append(open);
  row.cells[6].append(createElement("div", { class: "row-actions" }, block, copy));
  return row;
}

/** Register the event handlers of the panel. */
export function setUpTop() {
  const again = () => last && renderLast();
  byId("top-group").addEventListener("change", again);
  byId("top-filter").addEventListener("input", again);
  byId("top-pause").addEventListener("click", () => {
    paused = paused ? null : last;
    setAttribute(byId("top-pause"), "aria-pressed", paused !== null);
    setText(byId("top-pause"), paused ? "Resume" : "Pause");
    again();
  });
}
