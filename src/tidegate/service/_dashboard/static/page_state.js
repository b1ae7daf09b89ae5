// What the page shows, in its URL, so that it can be shared: the time range, the policy, and the key.

export const RANGES = { "5m": 300, "1h": 3600, "6h": 21_600, "24h": 86_400 }; // seconds
const DEFAULT_RANGE = "5m";
const MIN_ZOOM = 10_000; // milliseconds

const listeners = new Set();
let current = read();

/** { range, from, to, policy, key }: `from` and `to` are milliseconds since 1970, null unless a part is zoomed. */
export const state = () => current;

function read() {
  const query = new URLSearchParams(location.search);
  const range = query.get("range") ?? "";
  const [from, to] = [Number(query.get("from")), Number(query.get("to"))];
  const zoomed = Number.isFinite(from) && Number.isFinite(to) && from > 0 && to - from >= MIN_ZOOM;
  const parts = query.getAll("key");
  return {
    range: range in RANGES ? range : DEFAULT_RANGE,
    from: zoomed ? Math.round(from) : null,
    to: zoomed ? Math.round(to) : null,
    policy: query.get("policy") || null,
    key: parts.length > 1 ? parts : parts[0] ?? null,
  };
}

function write({ range, from, to, policy, key }) {
  const query = new URLSearchParams();
  if (range !== DEFAULT_RANGE) query.set("range", range);
  if (from !== null) {
    query.set("from", from);
    query.set("to", to);
  }
  if (policy !== null) query.set("policy", policy);
  for (const part of key === null ? [] : [key].flat()) query.append("key", part);
  const text = query.toString();
  return text ? `?${text}` : location.pathname;
}

/** Change a part of what is shown. `push` adds an entry to the history of the browser. */
export function change(part, { push = true } = {}) {
  const next = { ...current, ...part };
  if (next.from !== null && next.to - next.from < MIN_ZOOM) return;
  current = next;
  history[push ? "pushState" : "replaceState"](null, "", write(current));
  for (const listener of listeners) listener(current);
}

export function onChange(listener) {
  listeners.add(listener);
}

addEventListener("popstate", () => {
  current = read();
  for (const listener of listeners) listener(current);
});
