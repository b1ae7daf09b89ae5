// The values of table cells, and how they are rendered. A cell is a string, or an object that one of these returns.

import { createElement, setAttribute, setName, setText } from "./dom.js";
import { formatCount, formatDuration, formatTime } from "./format.js";

/** A name, which keeps its end if it is too long; all of it is shown on hover. */
export const name = (value, title = value) => ({ kind: "name", value: String(value), title });

/** Text; `state` ("good", "warn", "bad") colours it, `title` is shown on hover. */
export const text = (value, { state = "", title = value } = {}) => ({ kind: "text", value: String(value), state, title });

/** How much of a quota is used: a bar, and the numbers. */
export const meter = (used, quota, label = `${formatCount(used)} of ${formatCount(quota)}`) => ({ kind: "meter", fraction: used / quota, label });

/** How much of a capacity is left: a bar, and the numbers. If less than the whole is left, the bar is highlighted. */
export const share = (part, total) => ({ ...meter(part, Math.max(1, total), `${formatCount(part)} of ${formatCount(total)}`), level: part < total ? "high" : "normal" });

export const count = (value) => formatCount(value);
export const duration = (seconds) => formatDuration(seconds);
export const time = (milliseconds) => formatTime(milliseconds);

/** Render a cell into a table cell; existing elements are reused. */
export function renderCell(node, cell) {
  const value = typeof cell === "object" && cell !== null ? cell : text(cell ?? "");
  if (value.kind === "meter") renderMeter(node, value);
  else if (value.kind === "name") setName(node, value.value, value.title);
  else {
    setAttribute(node, "data-state", value.state);
    setAttribute(node, "title", value.title);
    setText(node, value.value);
  }
}

/** Render a bar with a label beside it, so that colour is not the only indication. */
export function renderMeter(node, { fraction, label, level }) {
  if (!node.querySelector(".bar")) {
    node.replaceChildren(createElement("span", { class: "bar", "aria-hidden": "true" }, createElement("i")), createElement("span", { class: "bar-label" }));
  }
  const [bar, labelNode] = node.children;
  const filled = Math.max(0, Math.min(1, fraction || 0));
  const width = `${(filled * 100).toFixed(1)}%`;
  if (bar.firstElementChild.style.width !== width) bar.firstElementChild.style.width = width;
  setAttribute(bar, "data-level", level ?? (filled >= 1 ? "full" : filled >= 0.8 ? "high" : "normal"));
  setText(labelNode, label);
}
