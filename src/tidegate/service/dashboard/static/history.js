// The last five minutes as this page knows them: each answer brings the seconds that are new.

import { SLOTS } from "./charts.js";

const RECENT = 3; // seconds that a present rate is taken over: one alone would flicker

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.tick = null;
    this.process = null;
    this.tracks = new Map();
    this.latency = [[], []];
  }

  /** What to ask for. */
  get query() {
    return this.tick === null ? "" : `?since=${this.tick}`;
  }

  /** Take an answer; false: it is another process's, whose seconds have to be asked for from the beginning. */
  take(answer) {
    if (this.tick !== null && (this.process !== answer.process.id || answer.tick < this.tick)) {
      this.forget();
      return false;
    }
    this.tick = answer.tick;
    this.process = answer.process.id;
    const before = this.latency[0].length;
    this.latency = this.latency.map((values, index) => join(values, answer.latency[index]));
    for (const [name, columns] of Object.entries(answer.tracks)) {
      const known = this.tracks.get(name) ?? columns.map(() => new Array(before).fill(0));
      this.tracks.set(name, known.map((values, index) => join(values, columns[index])));
    }
    return true;
  }

  /** Admitted, denied and waiting of a policy, second by second. */
  of(name) {
    return this.tracks.get(name) ?? [[], [], []];
  }

  /** The sums over all policies: admitted, denied and waiting. */
  sums() {
    const sums = [0, 1, 2].map(() => new Array(this.latency[0].length).fill(0));
    for (const columns of this.tracks.values()) {
      sums.forEach((sum, index) => columns[index].forEach((value, second) => { sum[second] += value; }));
    }
    return sums;
  }
}

function join(values, more) {
  return [...values, ...more].slice(-SLOTS);
}

/** The rate at present. */
export function present(values) {
  const recent = values.slice(-RECENT);
  return recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
}

/** The last value there is, within a few seconds. */
export function latest(values) {
  return values.slice(-10).findLast((value) => value !== null) ?? null;
}
