// Formats numbers, times, keys and limits for display.

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE_DECIMAL = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const MONEY = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });
const CENT = 10_000; // millionths of a currency
const TIME = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const SHORT_TIME = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DATE = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SECONDS_DATE = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = 86_400_000; // milliseconds

export function formatCount(value) {
  return Math.abs(value) < 100_000 ? INTEGER.format(value) : COMPACT.format(value);
}

export const countOf = (number, one, several) => `${formatCount(number)} ${number === 1 ? one : several}`;

export function formatRate(value) {
  if (value >= 10_000) return COMPACT.format(value);
  return value >= 100 || Number.isInteger(value) ? INTEGER.format(value) : ONE_DECIMAL.format(value);
}

export function formatMicroseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${INTEGER.format(value)} µs`;
  if (value < 1_000_000) return `${ONE_DECIMAL.format(value / 1000)} ms`;
  return `${ONE_DECIMAL.format(value / 1_000_000)} s`;
}

/** Format millionths of a currency: cents, or below one cent two significant digits, so that it is not shown as 0.00. */
export function formatMoney(micros) {
  const size = Math.abs(micros);
  const step = size >= CENT ? CENT : 10 ** Math.max(0, String(size).length - 2);
  return MONEY.format((Math.sign(micros) * Math.round(size / step) * step) / 1e6);
}

const UNITS = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];

/** Format seconds in their two largest units. */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1) return seconds > 0 ? "< 1 s" : "now";
  let rest = Math.round(seconds);
  const parts = [];
  for (const [unit, size] of UNITS) {
    const amount = Math.floor(rest / size);
    rest -= amount * size;
    if (amount || parts.length) parts.push(amount ? `${amount} ${unit}` : "");
  }
  return parts.slice(0, 2).filter(Boolean).join(" ");
}

export function formatTime(milliseconds) {
  return TIME.format(new Date(milliseconds));
}

/** Format a time as hours and minutes; with the date if it is not today. */
export function formatSince(milliseconds, now) {
  return (now - milliseconds < DAY / 2 ? SHORT_TIME : DATE).format(new Date(milliseconds));
}

export const formatDate = (milliseconds) => DATE.format(new Date(milliseconds));

/** Format a range of time; the second date only if it is another day. */
export function formatRange(from, to) {
  const sameDay = new Date(from).toDateString() === new Date(to).toDateString();
  return `${SECONDS_DATE.format(new Date(from))} to ${(sameDay ? TIME : SECONDS_DATE).format(new Date(to))}`;
}

/** Format a time for the axis of a chart that spans this many milliseconds. */
export function formatTimeOfDay(milliseconds, span) {
  return (span < 600_000 ? TIME : SHORT_TIME).format(new Date(milliseconds));
}

/** Format a key; the parts of a composite key are separated by "›". */
export function formatKey(value) {
  return (Array.isArray(value) ? value.join(" › ") : value) || "(empty)";
}

/** The text that the search field accepts for a key: a composite key as a JSON array. */
export const copyableKey = (value) => (Array.isArray(value) ? JSON.stringify(value) : value);

/** Parse the search field: a string, or the parts of a composite key as a JSON array. */
export function parseKey(input) {
  if (!input.startsWith("[")) return input;
  try {
    const parts = JSON.parse(input);
    if (Array.isArray(parts) && parts.length && parts.every((part) => typeof part === "string")) return parts;
  } catch {
    // Not JSON: a string that starts with a bracket.
  }
  return input;
}

export const sameKey = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Why a call was denied: "over 5 per minute", or "blocked". */
export function formatReason(over, shadow = false) {
  const limits = over.length ? over.join(" and ") : "its limit";
  const reason = limits === "blocked" ? "blocked" : `over ${limits}`;
  return shadow ? `${reason} (shadow)` : reason;
}

export function formatPercent(part, total) {
  if (!(total > 0)) return "–";
  const percent = (100 * part) / total;
  return percent > 0 && percent < 1 ? "< 1 %" : `${INTEGER.format(percent)} %`;
}
