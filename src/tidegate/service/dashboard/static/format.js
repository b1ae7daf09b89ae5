// Numbers, times and keys as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export function count(value) {
  return Math.abs(value) < 100_000 ? WHOLE.format(value) : SHORT.format(value);
}

export function rate(value) {
  if (value >= 10_000) return SHORT.format(value);
  return value >= 100 || Number.isInteger(value) ? WHOLE.format(value) : ONE.format(value);
}

export function micros(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${WHOLE.format(value)} µs`;
  if (value < 1_000_000) return `${ONE.format(value / 1000)} ms`;
  return `${ONE.format(value / 1_000_000)} s`;
}

const UNITS = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];

/** Write seconds in their two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1) return seconds > 0 ? "< 1 s" : "now";
  let left = Math.round(seconds);
  const parts = [];
  for (const [unit, size] of UNITS) {
    const amount = Math.floor(left / size);
    left -= amount * size;
    if (amount || parts.length) parts.push(amount ? `${amount} ${unit}` : "");
  }
  return parts.slice(0, 2).filter(Boolean).join(" ");
}

export function clock(milliseconds) {
  return CLOCK.format(new Date(milliseconds));
}

/** A key of several parts is shown with its parts apart. */
export function key(value) {
  return Array.isArray(value) ? value.join(" › ") : value;
}

/** A limit in few words: 100 / 1m, or 9,000 tokens / day. */
export function limit({ quota, unit, name }) {
  if (name === "blocked") return "blocked";
  return unit === "requests" ? `${count(quota)} / ${name}` : `${count(quota)} ${unit} / ${name}`;
}

export function share(used, of) {
  return of > 0 ? `${WHOLE.format((100 * used) / of)} %` : "–";
}
