// Formats numbers, times, keys and limits for display.

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE_DECIMAL = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const TIME = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export function formatCount(value) {
  return Math.abs(value) < 100_000 ? INTEGER.format(value) : COMPACT.format(value);
}

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

/** Format a key; the parts of a composite key are separated by "›". */
export function formatKey(value) {
  return Array.isArray(value) ? value.join(" › ") : value;
}

/** Format a limit: "100 / 1m", or "9,000 tokens / day". */
export function formatLimit({ quota, unit, name }) {
  if (name === "blocked") return "blocked";
  return unit === "requests" ? `${formatCount(quota)} / ${name}` : `${formatCount(quota)} ${unit} / ${name}`;
}

export function formatPercent(part, total) {
  return total > 0 ? `${INTEGER.format((100 * part) / total)} %` : "–";
}
