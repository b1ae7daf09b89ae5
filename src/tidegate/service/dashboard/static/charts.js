// Charts in SVG, one place for each second, the newest at the right. They show a minute, and more once there is more.

import { attribute, el, svg, text } from "./dom.js";

export const SLOTS = 300;
const SPANS = [60, 120, SLOTS]; // seconds
const TOP = 100;

/** Choose how many seconds to show. */
export function span(known) {
  return SPANS.find((seconds) => seconds >= known) ?? SLOTS;
}

/** Find a round number at or above a value: the scale of a chart then rarely changes. */
export function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 3, 5, 10]) if (step * power >= value) return step * power;
  return 10 * power;
}

const round = (value) => Math.round(value * 100) / 100;

/** Draw values as a line, broken where there is none. */
export function line(values, highest, slots = SLOTS) {
  const from = slots - values.length;
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${from + index} ${round(TOP - (value / highest) * TOP)}`;
    pen = "L";
  });
  return path;
}

/** Draw values as an area; below lies what is at `under`. */
export function area(values, highest, slots = SLOTS) {
  if (!values.length) return "";
  const known = values.map((value) => value ?? 0);
  return `${line(known, highest, slots)}L${slots - 1} ${TOP}L${slots - values.length} ${TOP}Z`;
}

/** A chart with a scale, and with the figures of the second that is pointed at. */
export class Chart {
  constructor(host, legend, series, format, about) {
    this.series = series;
    this.format = format;
    this.about = about;
    this.values = series.map(() => []);
    this.plot = svg("svg", { viewBox: `0 0 ${SLOTS - 1} ${TOP}`, preserveAspectRatio: "none", role: "img" });
    this.paths = series.map(({ name, filled }) => {
      const fill = filled ? svg("path", { class: `fill s-${name}` }) : null;
      const stroke = svg("path", { class: `stroke s-${name}` });
      if (fill) this.plot.append(fill);
      this.plot.append(stroke);
      return { fill, stroke };
    });
    this.scale = [1, 0.5, 0].map((part) => ({ part, label: el("span", { class: "scale" }) }));
    for (const { part, label } of this.scale) label.style.top = `${(1 - part) * 100}%`;
    this.cursor = el("span", { class: "cursor", hidden: "" });
    this.tip = el("span", { class: "tip", hidden: "" });
    this.area = el("div", { class: "plot" });
    this.area.append(this.plot, this.cursor);
    this.since = el("span");
    const ends = el("p", { class: "ends", "aria-hidden": "true" }, this.since, el("span", {}, "now"));
    host.append(...this.scale.map(({ label }) => label), this.area, this.tip, ends);
    for (const { name, title } of series) legend.append(el("li", { class: `s-${name}` }, el("i"), title));
    this.area.addEventListener("pointermove", (event) => this.point(event));
    this.area.addEventListener("pointerleave", () => this.leave());
    this.highest = 1;
    this.slots = SPANS[0];
    this.label();
  }

  update(values) {
    this.values = values;
    const most = Math.max(0, ...values.flat().filter((value) => value !== null));
    this.highest = ceiling(most * 1.05);
    this.slots = span(values[0].length);
    attribute(this.plot, "viewBox", `0 0 ${this.slots - 1} ${TOP}`);
    this.paths.forEach(({ fill, stroke }, index) => {
      stroke.setAttribute("d", line(values[index], this.highest, this.slots));
      if (fill) fill.setAttribute("d", area(values[index], this.highest, this.slots));
    });
    this.label();
    if (this.at !== undefined) this.tell();
  }

  label() {
    text(this.since, `${this.slots / 60} min ago`);
    for (const { part, label } of this.scale) text(label, this.format(this.highest * part));
    const now = this.series.map(({ title }, index) => `${title} ${this.format(this.values[index].at(-1) ?? 0)}`);
    attribute(this.plot, "aria-label", `${this.about}. Now: ${now.join(", ")}.`);
  }

  point(event) {
    const box = this.area.getBoundingClientRect();
    const part = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    this.at = Math.round(part * (this.slots - 1));
    this.tell();
  }

  tell() {
    const said = this.series.map(({ title }, index) => {
      const values = this.values[index];
      const value = values[this.at - (this.slots - values.length)];
      return `${title} ${value === undefined || value === null ? "–" : this.format(value)}`;
    });
    const ago = this.slots - 1 - this.at;
    text(this.tip, `${ago ? `${ago} s ago` : "now"} · ${said.join(" · ")}`);
    this.cursor.style.left = `${(this.at / (this.slots - 1)) * 100}%`;
    this.cursor.hidden = this.tip.hidden = false;
  }

  leave() {
    this.at = undefined;
    this.cursor.hidden = this.tip.hidden = true;
  }
}

/** A small chart in a cell: what was admitted, and what was denied on top of it. */
export function spark(cell, admitted, denied) {
  if (!cell.firstElementChild) {
    const made = svg("svg", { viewBox: `0 0 ${SLOTS - 1} ${TOP}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" });
    made.append(svg("path", { class: "fill s-admitted" }), svg("path", { class: "stroke s-admitted" }), svg("path", { class: "stroke s-denied" }));
    cell.append(made);
  }
  const highest = Math.max(1, ...admitted, ...denied) * 1.1;
  const slots = span(admitted.length);
  attribute(cell.firstElementChild, "viewBox", `0 0 ${slots - 1} ${TOP}`);
  const [fill, above, below] = cell.firstElementChild.children;
  fill.setAttribute("d", area(admitted, highest, slots));
  above.setAttribute("d", line(admitted, highest, slots));
  below.setAttribute("d", line(denied, highest, slots));
}

/** The capacity of a resource over time, as steps, with a mark for each reduction. */
export class Capacity {
  constructor() {
    this.title = el("h3");
    this.said = el("span", { class: "aside" });
    this.plot = svg("svg", { viewBox: `0 0 ${SLOTS - 1} ${TOP}`, preserveAspectRatio: "none", role: "img" });
    this.fill = svg("path", { class: "fill s-admitted" });
    this.stroke = svg("path", { class: "stroke s-admitted" });
    this.original = svg("path", { class: "stroke s-original" });
    this.plot.append(this.fill, this.original, this.stroke);
    this.marks = el("div", { class: "marks" });
    const plot = el("div", { class: "plot" });
    plot.append(this.plot, this.marks);
    this.node = el("div", { class: "resource" }, el("div", { class: "head" }, this.title, this.said), plot);
  }

  update(name, moments, reductions, now, words) {
    const slots = span(moments.length ? (now - moments[0][0]) / 1000 : 0);
    const x = (at) => Math.max(0, slots - 1 - (now - at) / 1000);
    attribute(this.plot, "viewBox", `0 0 ${slots - 1} ${TOP}`);
    const highest = Math.max(1, ...moments.map((moment) => Math.max(moment[1], moment[2]))) * 1.1;
    const y = (value) => round(TOP - (value / highest) * TOP);
    let path = "";
    for (const [at, total] of moments) path += path ? `H${round(x(at))}V${y(total)}` : `M${round(x(at))} ${y(total)}`;
    const [first, last] = [moments[0], moments.at(-1)];
    if (path) path += `H${slots - 1}`;
    this.stroke.setAttribute("d", path);
    this.fill.setAttribute("d", path && `${path}V${TOP}H${round(x(first[0]))}Z`);
    this.original.setAttribute("d", last ? `M0 ${y(last[2])}H${slots - 1}` : "");
    text(this.title, name);
    text(this.said, words);
    const shown = reductions.filter(({ at }) => now - at < slots * 1000);
    while (this.marks.children.length > shown.length) this.marks.lastElementChild.remove();
    shown.forEach((reduction, index) => {
      const mark = this.marks.children[index] ?? this.marks.appendChild(el("span", { class: "mark" }, "▾"));
      mark.style.left = `${(x(reduction.at) / (slots - 1)) * 100}%`;
      attribute(mark, "title", `to ${reduction.capacity}: ${reduction.reason || "no reason given"}`);
    });
    const marked = shown.length ? `, ${shown.length} reductions lately` : "";
    attribute(this.plot, "aria-label", `Capacity of ${name}: ${words}${marked}.`);
  }
}
