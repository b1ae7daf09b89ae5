// The history in the form that charts draw: columns with one value per step, the newest last.
//
// The last five minutes come second by second with /v1/overview. Longer ranges come from /v1/history, in steps of ten
// seconds or a minute.

import { get } from "./api.js";
import { RANGES } from "./page_state.js";

export const LIVE_SECONDS = 300;
const LIVE_SPANS = [60, 120, LIVE_SECONDS]; // seconds that charts show, while fewer are known
const RATE_SECONDS = 3; // current rates are averages over these seconds: single seconds vary too much to read
const LATEST_SECONDS = 10;
export const RUNNING = 1; // bits of the state of a step
export const STORE_LOST = 2;

/** How many seconds live charts show if this many are known. */
export const visibleSeconds = (known) => LIVE_SPANS.find((span) => span >= known) ?? LIVE_SECONDS;

/** The last five minutes, in total and by policy: `total` has the columns of `policy` for all policies. Each response of /v1/overview adds the seconds since the previous one. */
export class LiveHistory {
  constructor() {
    this.clear();
  }

  clear() {
    this.tick = null;
    this.process = null;
    this.policies = new Map();
    this.total = [[], [], []];
    this.latency = [[], []];
    this.states = [];
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
    const length = this.states.length;
    this.latency = this.latency.map((values, index) => append(values, overview.latency[index]));
    this.states = append(this.states, overview.states);
    this.total = this.total.map((values, index) => append(values, overview.total[index]));
    for (const [name, columns] of Object.entries(overview.tracks)) {
      const known = this.policies.get(name) ?? columns.map(() => new Array(length).fill(0));
      this.policies.set(name, known.map((values, index) => append(values, columns[index])));
    }
    return true;
  }

  /** Admitted, denied and waiting calls of a policy, per second. */
  policy(name) {
    return this.policies.get(name) ?? [0, 1, 2].map(() => new Array(this.states.length).fill(0));
  }

  /** The history of a policy, or of all, for charts. */
  columns(overview, policy) {
    const [admitted, denied, waiting] = policy === null ? this.total : this.policy(policy);
    const [median, p99] = this.latency;
    const end = overview.at;
    return { step: 1, from: end - visibleSeconds(this.states.length) * 1000, to: end, end, admitted, denied, waiting, median, p99, states: this.states, marks: overview.marks, top: overview.top };
  }
}

function append(values, newValues) {
  return [...values, ...newValues].slice(-LIVE_SECONDS);
}

/** Fetches a range that the live history does not have, when a step of it has ended. */
export class RangeHistory {
  constructor() {
    this.wanted = "";
    this.fetchedAt = 0;
    this.columns = null;
  }

  /** Return the columns for this state of the page, at this time of the service; null for the live history. */
  async read({ range, from, to, policy }, now) {
    if (range === "5m" && from === null) return null;
    const wanted = [range, from, to, policy].join("\n");
    if (wanted !== this.wanted || (from === null && now - this.fetchedAt >= this.columns.step * 1000)) {
      const begin = from ?? now - RANGES[range] * 1000;
      const query = new URLSearchParams({ from: begin, to: to ?? now, ...(policy === null ? {} : { policy }) });
      const columns = await get(`v1/history?${query}`);
      for (const name of ["admitted", "denied"]) columns[name] = columns[name].map((value) => value / columns.step);
      this.columns = { ...columns, from: begin, to: to ?? now, zoomed: from !== null };
      this.wanted = wanted;
      this.fetchedAt = now;
    }
    return this.columns;
  }
}

/** The average over the last few seconds. */
export function currentRate(values) {
  const recent = values.slice(-RATE_SECONDS);
  return recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
}

export const sum = (values) => values.reduce((a, b) => a + b, 0);

/** The latest value that is not null, within the last few seconds. */
export function latestValue(values) {
  return values.slice(-LATEST_SECONDS).findLast((value) => value !== null) ?? null;
}
