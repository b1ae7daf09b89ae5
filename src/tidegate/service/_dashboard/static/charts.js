// SVG charts of columns with one value per step. All charts of a ChartGroup share the time axis, the cursor and the zoom.

import { createElement, createSvg, setAttribute, setText } from "./dom.js";
import { formatTimeOfDay, formatTime } from "./format.js";
import { RUNNING, STORE_LOST } from "./history.js";

const WIDTH = 1000;
const HEIGHT = 100;

const round = (value) => Math.round(value * 100) / 100;

/** Round up to 1, 2, 4, 6, 8 or 10 times a power of ten: so that half of it is short, and it rarely changes. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= value);
}

/** A linear scale from 0: its labels, and the height of a value. */
export function linearScale(highest) {
  const top = Math.max(2, roundUp(highest * 1.05));
  return { labels: [top, top / 2, 0], y: (value) => HEIGHT - (value / top) * HEIGHT };
}

/** A logarithmic scale: its labels are powers of ten, at most four. */
export function logScale(lowest, highest) {
  const low = Math.floor(Math.log10(Math.max(1, lowest)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(1, highest))));
  const every = Math.ceil((high - low) / 4);
  const labels = [];
  for (let power = high; power >= low; power -= every) labels.push(10 ** power);
  return { labels, y: (value) => HEIGHT - ((Math.log10(Math.max(1, value)) - low) / (high - low)) * HEIGHT };
}

/** Whether a step or one beside it has a value above 0: the line of an empty area would hide the one below. */
const isNearValue = (values, step) => values[step - 1] > 0 || values[step] > 0 || values[step + 1] > 0;

/** The x of the end of each step, as a function of its place in the columns. */
function stepPositions({ from, to, end, step }, length) {
  const x = (time) => ((time - from) / (to - from)) * WIDTH;
  return (index) => round(x(end - (length - 1 - index) * step * 1000));
}

/** Return the SVG path of a line; it is interrupted where a value is null. */
export function linePath(values, position, y) {
  let path = "";
  let command = "M";
  values.forEach((value, index) => {
    if (value === null) command = "M";
    else {
      path += `${command}${position(index)} ${round(y(value))}`;
      command = "L";
    }
  });
  return path;
}

/** Return the SVG path of the area between two lines: `lower` and `upper` have values at the same steps. */
export function areaPath(lower, upper, position, y) {
  let path = "";
  let start = null;
  const close = (end) => {
    for (let index = end; index >= start; index -= 1) path += `L${position(index)} ${round(y(lower[index]))}`;
    path += "Z";
    start = null;
  };
  upper.forEach((value, index) => {
    if (value === null) {
      if (start !== null) close(index - 1);
      return;
    }
    path += `${start === null ? "M" : "L"}${position(index)} ${round(y(value))}`;
    start ??= index;
  });
  if (start !== null) close(upper.length - 1);
  return path;
}

/**
 * A chart. `series` are { name, title, stacked }: those that are stacked are drawn as areas, one above the other.
 * `log` selects a logarithmic scale.
 */
export class Chart {
  constructor(group, host, legend, { series, format, title, log = false }) {
    Object.assign(this, { group, series, format, title, log });
    this.plot = createSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.bands = createSvg("g");
    this.plot.append(this.bands);
    this.paths = series.map(({ name, stacked }) => {
      const area = stacked ? createSvg("path", { class: `fill s-${name}` }) : null;
      const stroke = createSvg("path", { class: `stroke s-${name}` });
      this.plot.append(...(area ? [area, stroke] : [stroke]));
      return { area, stroke };
    });
    this.yLabels = createElement("div", { class: "y-labels", "aria-hidden": "true" });
    this.cursor = createElement("span", { class: "cursor", hidden: "" });
    this.selection = createElement("span", { class: "selection", hidden: "" });
    this.marks = createElement("div", { class: "markers" });
    this.bandLabel = createElement("span", { class: "band-label", hidden: "" }, "store unavailable");
    this.tooltip = createElement("p", { class: "tooltip", hidden: "" });
    this.area = createElement("div", { class: "plot", tabindex: "0", role: "group" }, this.plot, this.marks, this.bandLabel, this.cursor, this.selection);
    this.xLabels = createElement("p", { class: "x-labels", "aria-hidden": "true" }, createElement("span"), createElement("span"), createElement("span"));
    host.append(this.yLabels, this.area, this.tooltip, this.xLabels);
    for (const { name, title: label } of series) legend.append(createElement("li", { class: `s-${name}` }, createElement("i"), label));
    group.add(this);
  }

  update(columns) {
    this.columns = columns;
    const values = this.series.map(({ name }) => columns[name].map((value, index) => ((columns.states[index] ?? RUNNING) & RUNNING ? value : null)));
    const tops = [];
    let below = columns.admitted.map(() => 0);
    values.forEach((column, index) => {
      if (!this.series[index].stacked) tops.push(column);
      else {
        const lower = below;
        below = column.map((value, step) => (value === null ? lower[step] : value + lower[step]));
        tops.push(column.map((value, step) => (value === null ? null : below[step])));
      }
    });
    const numbers = tops.flat().filter((value) => value !== null);
    const highest = numbers.reduce((a, b) => Math.max(a, b), 0);
    const scale = this.log ? logScale(numbers.reduce((a, b) => Math.min(a, b), highest), highest) : linearScale(highest);
    const position = stepPositions(columns, columns.admitted.length);
    let lower = columns.admitted.map(() => 0);
    this.paths.forEach(({ area, stroke }, index) => {
      const line = area && index ? tops[index].map((value, step) => (isNearValue(values[index], step) ? value : null)) : tops[index];
      stroke.setAttribute("d", linePath(line, position, scale.y));
      if (!area) return;
      area.setAttribute("d", areaPath(lower, tops[index], position, scale.y));
      lower = tops[index].map((value, step) => value ?? lower[step]);
    });
    this.drawScale(scale, position, numbers.length > 0);
    this.describe(numbers.length > 0);
  }

  drawScale(scale, position, hasValues) {
    const { columns } = this;
    const labels = (hasValues || !this.log ? scale.labels : []).map((value) => {
      const label = createElement("span", { class: "y-label" }, this.format(value));
      label.style.top = `${scale.y(value)}%`;
      return label;
    });
    this.yLabels.replaceChildren(...labels);
    const times = [columns.from, (columns.from + columns.to) / 2, columns.to];
    times.forEach((time, index) => setText(this.xLabels.children[index], formatTimeOfDay(time, columns.to - columns.from)));
    this.drawBands(position);
    this.drawMarks();
  }

  /** Draw a band for each time in which the store was unavailable. */
  drawBands(position) {
    const { states } = this.columns;
    const bands = [];
    let start = null;
    [...states, 0].forEach((state, index) => {
      if (state & STORE_LOST) start ??= index;
      else if (start !== null) {
        const [x, end] = [start ? position(start - 1) : position(start), position(index - 1)];
        bands.push(createSvg("rect", { class: "band", x, y: 0, width: Math.max(2, end - x), height: HEIGHT }));
        start = null;
      }
    });
    this.bands.replaceChildren(...bands);
    this.bandLabel.hidden = bands.length === 0;
    const left = bands.length ? Number(bands.at(-1).getAttribute("x")) / 10 : 0;
    Object.assign(this.bandLabel.style, left > 55 ? { left: "auto", right: "0" } : { left: `${Math.max(0, left)}%`, right: "auto" });
  }

  drawMarks() {
    const { from, to, marks } = this.columns;
    const visible = marks.filter(({ at }) => at >= from && at <= to);
    const nodes = visible.map((mark) => {
      const node = createElement("span", { class: "marker", "data-kind": mark.kind, title: describeMark(mark) }, createElement("i"));
      node.style.left = `${((mark.at - from) / (to - from)) * 100}%`;
      return node;
    });
    this.marks.replaceChildren(...nodes);
  }

  describe(hasValues) {
    const latest = this.series.map(({ name, title }) => `${title} ${this.format(this.columns[name].findLast((value) => value !== null) ?? 0)}`);
    const help = "Arrow keys move the cursor. To zoom, drag, or press Enter at the start and at the end.";
    setAttribute(this.area, "aria-label", `${this.title}. ${hasValues ? `Latest: ${latest.join(", ")}.` : "No data."} ${help}`);
  }

  /** Show the values at a time; null hides them. */
  showCursor(time) {
    const { columns } = this;
    const hidden = time === null || !columns;
    this.cursor.hidden = this.tooltip.hidden = hidden;
    if (hidden) return;
    const last = columns.admitted.length - 1;
    const index = last - Math.floor((columns.end - time) / (columns.step * 1000));
    const state = columns.states[index];
    const labels = this.series.map(({ name, title }) => {
      const value = columns[name][index];
      return `${title} ${value === undefined || value === null ? "–" : this.format(value)}`;
    });
    const marks = columns.marks.filter(({ at }) => Math.abs(at - time) <= Math.max(columns.step * 1000, (columns.to - columns.from) / 200));
    const notes = [...(state & STORE_LOST ? ["store unavailable"] : []), ...(state === 0 ? ["not running"] : []), ...marks.map(describeMark)];
    setText(this.tooltip, [formatTime(time), ...labels, ...notes].join(" · "));
    this.cursor.style.left = `${((time - columns.from) / (columns.to - columns.from)) * 100}%`;
  }

  showSelection(from, to) {
    this.selection.hidden = from === null;
    if (from === null) return;
    const percent = (time) => ((time - this.columns.from) / (this.columns.to - this.columns.from)) * 100;
    this.selection.style.left = `${percent(from)}%`;
    this.selection.style.width = `${percent(to) - percent(from)}%`;
  }
}

function describeMark({ kind, text, at }) {
  return kind === "rules" ? `rules changed at ${formatTime(at)}: ${text}` : `${text} at ${formatTime(at)}`;
}
