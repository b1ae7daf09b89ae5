// The cursor and the zoom that several charts share: by mouse, and by keyboard.

const MIN_DRAG = 8; // pixels

/** Charts with one time axis. `onZoom` is called with the start and the end of a selection. */
export class ChartGroup {
  constructor(onZoom) {
    this.charts = [];
    this.onZoom = onZoom;
    this.time = null;
    this.dragStart = null; // { x, time }
    this.keyStart = null; // the time at which Enter was pressed
  }

  add(chart) {
    this.charts.push(chart);
    const { area } = chart;
    area.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return; // a finger scrolls the page
      area.setPointerCapture(event.pointerId);
      this.dragStart = { x: event.clientX, time: this.timeAt(chart, event) };
    });
    area.addEventListener("pointermove", (event) => this.onPointerMove(chart, event));
    area.addEventListener("pointerup", (event) => this.onPointerUp(chart, event));
    area.addEventListener("pointercancel", () => this.endDrag());
    area.addEventListener("pointerleave", () => this.setCursor(null));
    area.addEventListener("blur", () => this.endKeys());
    area.addEventListener("keydown", (event) => this.onKeyDown(chart, event));
  }

  update(columns) {
    for (const chart of this.charts) chart.update(columns);
    this.setCursor(this.time);
  }

  timeAt({ area, columns }, event) {
    const box = area.getBoundingClientRect();
    const fraction = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    return columns.from + fraction * (columns.to - columns.from);
  }

  setCursor(time) {
    this.time = time;
    for (const chart of this.charts) chart.showCursor(time);
  }

  onPointerMove(chart, event) {
    if (!chart.columns) return;
    const time = this.timeAt(chart, event);
    this.setCursor(time);
    const dragging = this.dragStart !== null && Math.abs(event.clientX - this.dragStart.x) >= MIN_DRAG;
    this.select(dragging ? this.dragStart.time : null, time);
  }

  onPointerUp(chart, event) {
    const start = this.dragStart;
    this.endDrag();
    if (start === null || Math.abs(event.clientX - start.x) < MIN_DRAG) return;
    const [from, to] = [start.time, this.timeAt(chart, event)].sort((a, b) => a - b);
    this.onZoom(Math.round(from), Math.round(to));
  }

  endDrag() {
    this.dragStart = null;
    this.select(null);
  }

  onKeyDown(chart, event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.endKeys();
    if (event.key === "Enter" && this.time !== null) this.onEnter();
    if (!steps || !chart.columns) return;
    event.preventDefault();
    const { from, to, step } = chart.columns;
    const jump = step * 1000 * steps * (event.shiftKey ? 10 : 1);
    this.setCursor(Math.max(from, Math.min(to, (this.time ?? to) + jump)));
    if (this.keyStart !== null) this.select(this.keyStart, this.time);
  }

  /** Start a selection at the cursor, or zoom to it. */
  onEnter() {
    const start = this.keyStart;
    this.keyStart = start === null ? this.time : null;
    if (start === null) return;
    this.select(null);
    this.onZoom(...[start, this.time].sort((a, b) => a - b).map(Math.round));
  }

  endKeys() {
    this.keyStart = null;
    this.select(null);
    this.setCursor(null);
  }

  select(from, to = null) {
    const [start, end] = from === null ? [null, null] : [from, to].sort((a, b) => a - b);
    for (const each of this.charts) each.showSelection(start, end);
  }
}
