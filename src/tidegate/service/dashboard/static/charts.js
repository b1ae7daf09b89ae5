// SVG charts with one point per second, the newest at the right. They show one minute at first, then up to five.

import { createElement, createSvg, setAttribute, setText } from "./dom.js";

export const MAX_SECONDS = 300;
const TIME_SPANS = [60, 120, MAX_SECONDS]; // seconds
const HEIGHT = 100;

/** Return how many seconds a chart shows if this many are known. */
export function visibleSeconds(known) {
  return TIME_SPANS.find((seconds) => seconds >= known) ?? MAX_SECONDS;
}

/** Round up to 1, 2, 3, 5 or 10 times a power of ten, so that the scale of a chart rarely changes. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 3, 5, 10]) if (step * power >= value) return step * power;
  return 10 * power;
}

const round = (value) => Math.round(value * 100) / 100;

/** Return the SVG path of a line, interrupted where a value is null. */
export function linePath(values, highest, seconds = MAX_SECONDS) {
  const start = seconds - values.length;
  let path = "";
  let command = "M";
  values.forEach((value, index) => {
    if (value === null) {
      command = "M";
      return;
    }
    path += `${command}${start + index} ${round(HEIGHT - (value / highest) * HEIGHT)}`;
    command = "L";
  });
  return path;
}

/** Return the SVG path of the area below a line. */
export function areaPath(values, highest, seconds = MAX_SECONDS) {
  if (!values.length) return "";
  const known = values.map((value) => value ?? 0);
  return `${linePath(known, highest, seconds)}L${seconds - 1} ${HEIGHT}L${seconds - values.length} ${HEIGHT}Z`;
}

function createPlot(attributes) {
  return createSvg("svg", { viewBox: `0 0 ${MAX_SECONDS - 1} ${HEIGHT}`, preserveAspectRatio: "none", ...attributes });
}

/** A line chart with a scale, a legend, and a tooltip for the second under the pointer. */
export class Chart {
  constructor(host, legend, series, format, title) {
    this.series = series;
    this.format = format;
    this.title = title;
    this.values = series.map(() => []);
    this.plot = createPlot({ role: "img" });
    this.paths = series.map(({ name, filled }) => {
      const fill = filled ? createSvg("path", { class: `fill s-${name}` }) : null;
      const stroke = createSvg("path", { class: `stroke s-${name}` });
      if (fill) this.plot.append(fill);
      this.plot.append(stroke);
      return { fill, stroke };
    });
    this.yLabels = [1, 0.5, 0].map((fraction) => ({ fraction, label: createElement("span", { class: "y-label" }) }));
    for (const { fraction, label } of this.yLabels) label.style.top = `${(1 - fraction) * 100}%`;
    this.cursor = createElement("span", { class: "cursor", hidden: "" });
    this.tooltip = createElement("span", { class: "tooltip", hidden: "" });
    this.area = createElement("div", { class: "plot" });
    this.area.append(this.plot, this.cursor);
    this.startLabel = createElement("span");
    const xLabels = createElement("p", { class: "x-labels", "aria-hidden": "true" }, this.startLabel, createElement("span", {}, "now"));
    host.append(...this.yLabels.map(({ label }) => label), this.area, this.tooltip, xLabels);
    for (const { name, title: label } of series) legend.append(createElement("li", { class: `s-${name}` }, createElement("i"), label));
    this.area.addEventListener("pointermove", (event) => this.onPointerMove(event));
    this.area.addEventListener("pointerleave", () => this.hideTooltip());
    this.highest = 1;
    this.seconds = TIME_SPANS[0];
    this.updateLabels();
  }

  update(values) {
    this.values = values;
    const highest = Math.max(0, ...values.flat().filter((value) => value !== null));
    this.highest = roundUp(highest * 1.05);
    this.seconds = visibleSeconds(values[0].length);
    setAttribute(this.plot, "viewBox", `0 0 ${this.seconds - 1} ${HEIGHT}`);
    this.paths.forEach(({ fill, stroke }, index) => {
      stroke.setAttribute("d", linePath(values[index], this.highest, this.seconds));
      if (fill) fill.setAttribute("d", areaPath(values[index], this.highest, this.seconds));
    });
    this.updateLabels();
    if (this.pointedSecond !== undefined) this.showTooltip();
  }

  updateLabels() {
    setText(this.startLabel, `${this.seconds / 60} min ago`);
    for (const { fraction, label } of this.yLabels) setText(label, this.format(this.highest * fraction));
    const current = this.series.map(({ title }, index) => `${title} ${this.format(this.values[index].at(-1) ?? 0)}`);
    setAttribute(this.plot, "aria-label", `${this.title}. Now: ${current.join(", ")}.`);
  }

  onPointerMove(event) {
    const box = this.area.getBoundingClientRect();
    const fraction = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    this.pointedSecond = Math.round(fraction * (this.seconds - 1));
    this.showTooltip();
  }

  showTooltip() {
    const labels = this.series.map(({ title }, index) => {
      const values = this.values[index];
      const value = values[this.pointedSecond - (this.seconds - values.length)];
      return `${title} ${value === undefined || value === null ? "–" : this.format(value)}`;
    });
    const ago = this.seconds - 1 - this.pointedSecond;
    setText(this.tooltip, `${ago ? `${ago} s ago` : "now"} · ${labels.join(" · ")}`);
    this.cursor.style.left = `${(this.pointedSecond / (this.seconds - 1)) * 100}%`;
    this.cursor.hidden = this.tooltip.hidden = false;
  }

  hideTooltip() {
    this.pointedSecond = undefined;
    this.cursor.hidden = this.tooltip.hidden = true;
  }
}

/** Render a small chart of admitted and denied calls in a table cell. */
export function renderSparkline(cell, admitted, denied) {
  if (!cell.firstElementChild) {
    const plot = createPlot({ class: "spark", "aria-hidden": "true" });
    for (const name of ["fill s-admitted", "stroke s-admitted", "stroke s-denied"]) plot.append(createSvg("path", { class: name }));
    cell.append(plot);
  }
  const highest = Math.max(1, ...admitted, ...denied) * 1.1;
  const seconds = visibleSeconds(admitted.length);
  setAttribute(cell.firstElementChild, "viewBox", `0 0 ${seconds - 1} ${HEIGHT}`);
  const [fill, admittedLine, deniedLine] = cell.firstElementChild.children;
  fill.setAttribute("d", areaPath(admitted, highest, seconds));
  admittedLine.setAttribute("d", linePath(admitted, highest, seconds));
  deniedLine.setAttribute("d", linePath(denied, highest, seconds));
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

  /** `points` are [milliseconds, total, original]; `label` is the current capacity as text. */
  update(name, points, reductions, now, label) {
    const seconds = visibleSeconds(points.length ? (now - points[0][0]) / 1000 : 0);
    const x = (at) => Math.max(0, seconds - 1 - (now - at) / 1000);
    setAttribute(this.plot, "viewBox", `0 0 ${seconds - 1} ${HEIGHT}`);
    const highest = Math.max(1, ...points.map((point) => Math.max(point[1], point[2]))) * 1.1;
    const y = (value) => round(HEIGHT - (value / highest) * HEIGHT);
    let path = "";
    for (const [at, total] of points) path += path ? `H${round(x(at))}V${y(total)}` : `M${round(x(at))} ${y(total)}`;
    const [first, last] = [points[0], points.at(-1)];
    if (path) path += `H${seconds - 1}`;
    this.stroke.setAttribute("d", path);
    this.fill.setAttribute("d", path && `${path}V${HEIGHT}H${round(x(first[0]))}Z`);
    this.original.setAttribute("d", last ? `M0 ${y(last[2])}H${seconds - 1}` : "");
    setText(this.title, name);
    setText(this.label, label);
    const visible = reductions.filter(({ at }) => now - at < seconds * 1000);
    while (this.markers.children.length > visible.length) this.markers.lastElementChild.remove();
    visible.forEach((reduction, index) => {
      const marker = this.markers.children[index] ?? this.markers.appendChild(createElement("span", { class: "marker" }, "▾"));
      marker.style.left = `${(x(reduction.at) / (seconds - 1)) * 100}%`;
      setAttribute(marker, "title", `reduced to ${reduction.capacity}: ${reduction.reason || "no reason given"}`);
    });
    const count = visible.length ? `, ${visible.length} recent reductions` : "";
    setAttribute(this.plot, "aria-label", `Capacity of ${name}: ${label}${count}.`);
  }
}
