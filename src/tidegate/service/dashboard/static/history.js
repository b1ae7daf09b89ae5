// The last five minutes, second by second. Each response of /v1/overview adds the seconds since the previous one.

import { MAX_SECONDS } from "./charts.js";

const RATE_SECONDS = 3; // current rates are averages over these seconds: single seconds vary too much to read
const LATEST_SECONDS = 10;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.tick = null;
    this.process = null;
    this.policies = new Map();
    this.latency = [[], []];
  }

  /** The query string that requests only new seconds. */
  get query() {
    return this.tick === null ? "" : `?since=${this.tick}`;
  }

  /** Add a response. Returns false if it is from another service: then the whole history must be requested again. */
  add(overview) {
    if (this.tick !== null && (this.process !== overview.process.id || overview.tick < this.tick)) {
      this.clear();
      return false;
    }
    this.tick = overview.tick;
    this.process = overview.process.id;
    const length = this.latency[0].length;
    this.latency = this.latency.map((values, index) => append(values, overview.latency[index]));
    for (const [name, columns] of Object.entries(overview.tracks)) {
      const known = this.policies.get(name) ?? columns.map(() => new Array(length).fill(0));
      this.policies.set(name, known.map((values, index) => append(values, columns[index])));
    }
    return true;
  }

  /** Admitted, denied and waiting calls of a policy, per second. */
  policy(name) {
    return this.policies.get(name) ?? [[], [], []];
  }

  /** Admitted, denied and waiting calls of all policies, per second. */
  totals() {
    const totals = [0, 1, 2].map(() => new Array(this.latency[0].length).fill(0));
    for (const columns of this.policies.values()) {
      totals.forEach((total, index) => columns[index].forEach((value, second) => { total[second] += value; }));
    }
    return totals;
  }
}

function append(values, newValues) {
  return [...values, ...newValues].slice(-MAX_SECONDS);
}

/** The average over the last few seconds. */
export function currentRate(values) {
  const recent = values.slice(-RATE_SECONDS);
  return recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
}

/** The latest value that is not null, within the last few seconds. */
export function latestValue(values) {
  return values.slice(-LATEST_SECONDS).findLast((value) => value !== null) ?? null;
}
