// Small charts without a cursor: the trend of a policy in a table, the capacity of a resource, the denials of a key.

import { areaPath, linePath } from "./charts.js";
import { createElement, createSvg, setAttribute, setText } from "./dom.js";
import { visibleSeconds } from "./history.js";

const HEIGHT = 100;
const MAX_SECONDS = 300;
const round = (value) => Math.round(value * 100) / 100;

function createPlot(attributes) {
  return createSvg("svg", { viewBox: `0 0 ${MAX_SECONDS - 1} ${HEIGHT}`, preserveAspectRatio: "none", ...attributes });
}

/** Render admitted and denied calls of the last five minutes in a table cell, one above the other. */
export function renderSparkline(cell, admitted, denied) {
  if (!cell.firstElementChild) {
    const plot = createPlot({ class: "spark", "aria-hidden": "true" });
    for (const name of ["fill s-admitted", "fill s-denied", "stroke s-admitted"]) plot.append(createSvg("path", { class: name }));
    cell.append(plot);
  }
  const total = admitted.map((value, index) => value + denied[index]);
  const highest = Math.max(1, ...total) * 1.1;
  const y = (value) => HEIGHT - (value / highest) * HEIGHT;
  const seconds = visibleSeconds(admitted.length);
  const position = (index) => seconds - admitted.length + index;
  setAttribute(cell.firstElementChild, "viewBox", `0 0 ${seconds - 1} ${HEIGHT}`);
  const [lower, upper, line] = cell.firstElementChild.children;
  lower.setAttribute("d", areaPath(admitted.map(() => 0), admitted, position, y));
  upper.setAttribute("d", areaPath(admitted, total, position, y));
  line.setAttribute("d", linePath(admitted, position, y));
}

/** Render the denials of a key: `minutes` are { at, denied }, from `from` to `to` in milliseconds. */
export function renderDenialBars(plot, minutes, from, to) {
  const highest = Math.max(1, ...minutes.map(({ denied }) => denied));
  const width = Math.max(2, (60_000 / (to - from)) * 1000);
  setAttribute(plot, "viewBox", `0 0 1000 ${HEIGHT}`);
  plot.replaceChildren(...minutes.map(({ at, denied }) => {
    const height = Math.max(3, (denied / highest) * HEIGHT);
    return createSvg("rect", { class: "bar-denied", x: round(((at - from) / (to - from)) * 1000), y: round(HEIGHT - height), width: round(width), height: round(height) });
  }));
}

/** A step chart of the capacity of a resource, with a marker for each reduction. */
export class CapacityChart {
  constructor() {
    this.title = createElement("h3");
    this.label = createElement("span", { class: "aside" });
    this.plot = createPlot({ role: "img" });
    this.fill = createSvg("path", { class: "fill s-admitted" });
    this.stroke = createSvg("path", { class: "stroke s-admitted" });
    this.original = createSvg("path", { class: "stroke s-original" });
    this.plot.append(this.fill, this.original, this.stroke);
    this.markers = createElement("div", { class: "markers" });
    const plot = createElement("div", { class: "plot" });
    plot.append(this.plot, this.markers);
    this.node = createElement("div", { class: "resource" }, createElement("div", { class: "head" }, this.title, this.label), plot);
  }

  /** `points` are [milliseconds, total, original]; `label` is the current capacity as text; shown is `from` to `to`. */
  update(name, points, reductions, { from, to }, label) {
    const width = MAX_SECONDS - 1;
    const x = (at) => round((Math.min(Math.max((at - from) / (to - from), 0), 1)) * width);
    const highest = Math.max(1, ...points.map((point) => Math.max(point[1], point[2]))) * 1.1;
    const y = (value) => round(HEIGHT - (value / highest) * HEIGHT);
    let path = "";
    for (const [at, total] of points) path += path ? `H${x(at)}V${y(total)}` : `M${x(at)} ${y(total)}`;
    const [first, last] = [points[0], points.at(-1)];
    this.stroke.setAttribute("d", path);
    this.fill.setAttribute("d", path && `${path}V${HEIGHT}H${x(first[0])}Z`);
    this.original.setAttribute("d", last ? `M0 ${y(last[2])}H${width}` : "");
    setText(this.title, name);
    setText(this.label, label);
    const visible = reductions.filter(({ at }) => at >= from && at <= to);
    while (this.markers.children.length > visible.length) this.markers.lastElementChild.remove();
    visible.forEach((reduction, index) => {
      const marker = this.markers.children[index] ?? this.markers.appendChild(createElement("span", { class: "reduction" }, "▾"));
      marker.style.left = `${(x(reduction.at) / width) * 100}%`;
      setAttribute(marker, "title", `reduced to ${reduction.capacity}: ${reduction.reason || "no reason given"}`);
    });
    const count = visible.length ? `, ${visible.length} recent reductions` : "";
    setAttribute(this.plot, "aria-label", `Capacity of ${name}: ${label}${count}.`);
  }
}
