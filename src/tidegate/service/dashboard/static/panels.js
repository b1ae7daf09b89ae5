// The panels of every service: policies, keys near their limit, denials, store and bus.

import { renderSparkline } from "./charts.js";
import { renderMeter } from "./cells.js";
import { byId, createElement, createRow, renderRows, setAttribute, setText, toggleEmptyMessage } from "./dom.js";
import { formatCount, formatDuration, formatKey, formatLimit, formatPercent, formatRate, formatTime } from "./format.js";
import { currentRate } from "./history.js";

/** Render the policies; a click on a name shows only that policy in the chart, a second click all policies. */
export function renderPolicies(overview, history, selected, select) {
  const table = byId("policies");
  renderRows(table, overview.policies, createPolicyRow, (cells, policy) => {
    const [admitted, denied] = history.policy(policy.name);
    const [name, mode] = cells[0].children;
    setText(name, policy.name);
    setAttribute(name, "aria-pressed", policy.name === selected);
    name.select = () => select(policy.name === selected ? null : policy.name);
    setText(mode, formatMode(policy));
    mode.hidden = !mode.textContent;
    setText(cells[1], policy.limits.join(", "));
    renderSparkline(cells[2], admitted, denied);
    setText(cells[3], formatRate(currentRate(admitted)));
    setText(cells[4], formatRate(currentRate(denied)));
    setText(cells[5], formatCount(policy.waiting));
    setText(cells[6], `${formatCount(policy.denied)} (${formatPercent(policy.denied, policy.denied + policy.admitted)})`);
    setAttribute(cells[4], "data-level", currentRate(denied) > 0 ? "some" : "none");
  });
  toggleEmptyMessage(table, !overview.policies.length);
  setText(byId("note-policies"), overview.rules.error ? "the configuration file is invalid: see the log" : "");
}

function createPolicyRow() {
  const row = createRow("c-name", "c-limits hide-on-tablet", "c-spark", "num", "num denied", "num hide-on-phone", "num hide-on-tablet");
  const name = createElement("button", { type: "button", class: "link name", title: "show only this policy in the chart" });
  name.addEventListener("click", () => name.select());
  row.cells[0].append(name, createElement("span", { class: "tag" }));
  return row;
}

function formatMode(policy) {
  if (policy.mode === "shadow") return "shadow";
  return policy.rollout < 100 ? `enforced for ${policy.rollout} %` : "";
}

/** Render a key as a button that opens the dialog of the key. */
function renderKeyCell(cell, policy, key, open, searchable) {
  if (!cell.firstElementChild) {
    const button = createElement("button", { type: "button", class: "link" });
    button.addEventListener("click", () => button.open());
    cell.append(button, createElement("span", { class: "subtitle" }));
  }
  const [button, subtitle] = cell.children;
  setText(button, formatKey(key) || "(empty)");
  setAttribute(button, "title", formatKey(key));
  setText(subtitle, policy);
  button.disabled = !searchable.has(policy);
  button.open = () => open(policy, key);
}

/** Render blocked keys, then the keys with the smallest part of a limit left. */
export function renderNearLimit(overview, open) {
  const table = byId("near");
  const searchable = searchablePolicies(overview);
  const blocked = overview.blocks.map(({ policy, key, seconds }) => (
    { policy, key, limit: "blocked", unit: "requests", quota: 1, used: 1, remaining: 0, reset_after: seconds }));
  const items = [...blocked, ...overview.near.filter((item) => item.limit !== "blocked")];
  renderRows(table, items, () => createRow("c-key", "hide-on-phone", "c-bar", "num", "num"), (cells, item) => {
    renderKeyCell(cells[0], item.policy, item.key, open, searchable);
    const limit = formatLimit({ ...item, name: item.limit });
    setText(cells[1], limit);
    setAttribute(cells[1], "title", limit);
    const total = item.used + item.remaining;
    renderMeter(cells[2], { fraction: item.used / total, label: formatPercent(item.used, total) });
    setText(cells[3], formatCount(item.remaining));
    setText(cells[4], formatDuration(item.reset_after));
  });
  toggleEmptyMessage(table, !items.length);
}

export function renderDenials(overview, open) {
  const table = byId("denials");
  const searchable = searchablePolicies(overview);
  renderRows(table, overview.denials, () => createRow("c-time", "c-key", "c-detail", "num hide-on-phone"), (cells, denial) => {
    setText(cells[0], formatTime(denial.at));
    renderKeyCell(cells[1], denial.policy, denial.key, open, searchable);
    setText(cells[2], formatReason(denial));
    setText(cells[3], formatDuration(denial.retry_after));
  });
  toggleEmptyMessage(table, !overview.denials.length);
}

function formatReason(denial) {
  const limits = denial.violated.length ? denial.violated.join(" and ") : "unknown limit";
  const reason = limits === "blocked" ? "blocked" : `exceeded ${limits}`;
  return denial.shadow ? `${reason} (shadow)` : reason;
}

function searchablePolicies(overview) {
  return new Set(overview.policies.filter((policy) => policy.searchable).map((policy) => policy.name));
}

/** Fill the policy list of the search form and keep its selection. */
export function renderSearchPolicies(overview) {
  const list = byId("search-policy");
  const names = [...searchablePolicies(overview)];
  const current = [...list.options].map((option) => option.value);
  if (names.length === current.length && names.every((name, index) => name === current[index])) return;
  const selected = list.value;
  list.replaceChildren(...names.map((name) => {
    const option = createElement("option", {}, name);
    option.value = name;
    return option;
  }));
  if (names.includes(selected)) list.value = selected;
}

// ---- store and bus --------------------------------------------------------------------------------------------------

const COUNT_LABELS = {
  entries: "keys stored", max_entries: "maximum keys", overflowed: "calls in shared bucket", transactions: "transactions",
  waits: "waits for file lock", failures: "failures", connections: "connections", losses: "outages",
  allowed_without_store: "allowed during outages", denied_without_store: "denied during outages", published: "messages sent",
  received: "messages received", dropped: "messages dropped", scripts: "scripts sent", calls: "calls", peers: "processes",
};

export function renderState(overview) {
  const { store, services, panels: { bus } } = overview;
  const rows = [["Store", store.lost ? "unavailable: on_store_error applies" : "available", store.lost ? "bad" : "good"]];
  rows.push(["type", store.leased ? `${store.kind}, with leases` : store.kind]);
  if (services.length > 1) {
    rows.push(["services on it", services.map(({ name, own }) => (own ? `${name} (this one)` : name)).join(", ")]);
  }
  rows.push(...countRows(store.counts));
  if (!bus) rows.push(["Bus", "not configured (bus: nats://…)"]);
  else if (bus.error) rows.push(["Bus", bus.error, "bad"]);
  else {
    rows.push(["Bus", bus.connected ? "connected" : "not connected, retrying", bus.connected ? "good" : "bad"]);
    if (bus.where) rows.push(["URL", bus.where]);
    rows.push(...countRows(bus.counts));
  }
  for (const [kind, number] of Object.entries(overview.problems)) rows.push([`errors: ${kind}`, formatCount(number)]);
  renderRows(byId("state"), rows, () => createRow("", ""), (cells, [label, value, state = ""]) => {
    setText(cells[0], label);
    setText(cells[1], value);
    setAttribute(cells[1], "data-state", state);
    setAttribute(cells[0], "data-first", state ? "yes" : "no");
  });
}

function countRows(counts) {
  return Object.entries(counts).filter(([name]) => name in COUNT_LABELS).map(([name, value]) => [COUNT_LABELS[name], formatCount(value)]);
}
