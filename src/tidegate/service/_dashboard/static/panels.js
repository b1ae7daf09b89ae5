// The panels of every service: policies, keys near their limit, denials, audit log, store and bus.

import { renderMeter } from "./cells.js";
import { byId, createElement, createRow, renderRows, setAttribute, setName, setText } from "./dom.js";
import { countOf, formatCount, formatDate, formatDuration, formatKey, formatPercent, formatRate, formatReason, formatTime, sameKey } from "./format.js";
import { currentRate, sum } from "./history.js";
import { renderSparkline } from "./small_charts.js";

const SORT_INTERVAL = 5000; // milliseconds: rows that change places every second cannot be read
const RECENT_SECONDS = 60;
const NEAR_SHARE = 0.5; // of a limit that is used: below, a key is not near its limit
let order = new Map(); // the place of each policy
let sortedAt = 0;

// ---- policies -------------------------------------------------------------------------------------------------------

/** Sort policies: most denied calls in the last minute first, then most waiting calls, then most calls. */
function sortPolicies(overview, history) {
  const isNew = overview.policies.some(({ name }) => !order.has(name));
  if (isNew || overview.at - sortedAt >= SORT_INTERVAL) {
    sortedAt = overview.at;
    const trouble = (policy) => {
      const [admitted, denied] = history.policy(policy.name).map((values) => sum(values.slice(-RECENT_SECONDS)));
      return [denied, policy.waiting, policy.shadow, admitted];
    };
    const ranked = overview.policies.map((policy, index) => ({ name: policy.name, index, rank: trouble(policy) }));
    ranked.sort((a, b) => b.rank.map((value, place) => value - a.rank[place]).find((difference) => difference) ?? a.index - b.index);
    order = new Map(ranked.map(({ name }, place) => [name, place]));
  }
  return [...overview.policies].sort((a, b) => order.get(a.name) - order.get(b.name));
}

/** Render the policies; a click on a name shows only that policy on the whole page, a second click all policies. */
export function renderPolicies(overview, history, selected, select) {
  const table = byId("policies");
  const denying = overview.policies.filter(({ name }) => sum(history.policy(name)[1].slice(-RECENT_SECONDS))).length;
  renderRows(table, sortPolicies(overview, history), createPolicyRow, (cells, policy, row) => {
    const [admitted, denied] = history.policy(policy.name);
    const [name, mode] = cells[0].firstElementChild.children;
    setName(name, policy.name, `${policy.name}: show only this policy`);
    setAttribute(name, "aria-pressed", policy.name === selected);
    setAttribute(row, "data-selected", policy.name === selected ? "yes" : "no");
    name.run = () => select(policy.name === selected ? null : policy.name);
    setText(mode, formatMode(policy));
    mode.hidden = !mode.textContent;
    setText(cells[1], policy.limit_texts.join(", "));
    setAttribute(cells[1], "title", policy.limits.join(", "));
    renderSparkline(cells[2], admitted, denied);
    setText(cells[3], formatRate(currentRate(admitted)));
    setText(cells[4], formatRate(currentRate(denied)));
    setText(cells[5], formatCount(policy.waiting));
    setText(cells[6], `${formatCount(policy.denied)} (${formatPercent(policy.denied, policy.denied + policy.admitted)})`);
    setAttribute(cells[4], "data-level", currentRate(denied) > 0 ? "some" : "none");
  });
  table.parentElement.querySelector(".empty").hidden = overview.policies.length > 0;
  const notes = [countOf(overview.policies.length, "policy", "policies")];
  if (denying) notes.push(`${denying} of them denied calls in the last minute`);
  if (denying && overview.policies.length > 1) notes.push("most denied first");
  setText(byId("note-policies"), notes.join(", "));
}

function createPolicyRow() {
  const row = createRow("c-name", "c-limits hide-on-tablet", "c-spark", "num", "num denied", "num hide-on-phone", "num hide-on-tablet");
  const name = createElement("button", { type: "button", class: "link name" });
  name.addEventListener("click", () => name.run());
  row.cells[0].append(createElement("div", { class: "name-cell" }, name, createElement("span", { class: "tag" })));
  return row;
}

function formatMode(policy) {
  if (policy.mode === "shadow") return "shadow";
  return policy.rollout < 100 ? `enforced for ${policy.rollout} %` : "";
}

/** Fill the list of policies in the filter, and select one. */
export function renderPolicyFilter(overview, selected) {
  const list = byId("policy");
  const names = overview.policies.map(({ name }) => name);
  if (selected !== null && !names.includes(selected)) names.push(selected);
  const wanted = ["", ...names];
  const current = [...list.options].map((option) => option.value);
  if (wanted.length !== current.length || wanted.some((name, index) => name !== current[index])) {
    list.replaceChildren(...wanted.map((name) => {
      const option = createElement("option", {}, name || "all policies");
      option.value = name;
      return option;
    }));
  }
  if (list.value !== (selected ?? "")) list.value = selected ?? "";
}

// ---- keys -----------------------------------------------------------------------------------------------------------

/** Render a key as a button that opens its page, with its policy below. */
function renderKeyCell(cell, policy, key, openKey) {
  if (!cell.firstElementChild) {
    const button = createElement("button", { type: "button", class: "link" });
    button.addEventListener("click", () => button.run());
    cell.append(button, createElement("span", { class: "subtitle" }));
  }
  const [button, subtitle] = cell.children;
  setName(button, formatKey(key));
  setName(subtitle, policy);
  button.run = () => openKey(key);
}

/** Render blocked keys, then the keys with the smallest part of a limit left. */
export function renderNearLimit({ blocks, near }, isShown, openKey) {
  const blocked = blocks.filter(isShown).map((block) => ({ ...block, blocked: true }));
  const isBlocked = (item) => blocked.some(({ policy, key }) => policy === item.policy && sameKey(key, item.key));
  const isNear = ({ used, remaining }) => used >= NEAR_SHARE * (used + remaining);
  const items = [...blocked, ...near.filter((item) => isShown(item) && isNear(item) && !isBlocked(item))];
  byId("panel-near").hidden = items.length === 0;
  renderRows(byId("near"), items, () => createRow("c-key", "hide-on-phone", "c-bar", "num", "num"), (cells, item) => {
    renderKeyCell(cells[0], item.policy, item.key, openKey);
    const limit = item.blocked ? `blocked${item.actor ? ` by ${item.actor}` : ""}${item.reason ? `: ${item.reason}` : ""}` : item.text;
    setText(cells[1], limit);
    setAttribute(cells[1], "title", limit);
    const total = item.blocked ? 1 : item.used + item.remaining;
    renderMeter(cells[2], item.blocked ? { fraction: 1, label: "blocked" } : { fraction: item.used / total, label: formatPercent(item.used, total) });
    setText(cells[3], item.blocked ? "–" : formatCount(item.remaining));
    setText(cells[4], formatDuration(item.blocked ? item.seconds : item.reset_after));
  });
}

export function renderDenials({ denials }, isShown, openKey) {
  const items = denials.filter(isShown);
  byId("panel-denials").hidden = items.length === 0;
  renderRows(byId("denials"), items, () => createRow("c-time", "c-key", "c-detail", "num hide-on-phone"), (cells, denial) => {
    setText(cells[0], formatTime(denial.at));
    renderKeyCell(cells[1], denial.policy, denial.key, openKey);
    setText(cells[2], formatReason(denial.over, denial.shadow));
    setAttribute(cells[2], "title", cells[2].textContent);
    setText(cells[3], formatDuration(denial.retry_after));
  });
}

export function renderAudit({ audit }, isShown, openKey) {
  const items = audit.filter(isShown);
  byId("panel-audit").hidden = items.length === 0;
  renderRows(byId("audit"), items, () => createRow("c-date", "c-short", "c-key", "", "hide-on-phone"), (cells, entry) => {
    setText(cells[0], formatDate(entry.at));
    setText(cells[1], entry.action);
    renderKeyCell(cells[2], entry.policy, entry.key, openKey);
    setName(cells[3], entry.actor || "not given");
    setText(cells[4], entry.reason || "–");
    setAttribute(cells[4], "title", entry.reason);
  });
}

/** Show how to start, as long as there are no calls and no component is configured. */
export function renderHints(overview) {
  const calls = overview.policies.reduce((total, { admitted, denied }) => total + admitted + denied, 0);
  byId("panel-hints").hidden = calls > 0 || Object.keys(overview.panels).length > 0;
  const [policy] = overview.policies;
  setText(byId("hint-call"), `curl --json '{"policy": "${policy?.name ?? "api"}", "key": "user:42"}' ${location.origin}${location.pathname}v1/acquire`);
}

// ---- store and bus --------------------------------------------------------------------------------------------------

const COUNT_LABELS = {
  entries: "keys stored", max_entries: "maximum keys", overflowed: "calls in shared bucket", transactions: "transactions",
  waits: "waits for file lock", failures: "failures", connections: "connections", losses: "outages",
  allowed_without_store: "allowed during outages", denied_without_store: "denied during outages", published: "messages sent",
  received: "messages received", dropped: "messages dropped", scripts: "scripts sent", calls: "calls", processes: "processes",
};

export function renderState(overview) {
  const { store, services, panels: { bus } } = overview;
  const rows = [["Store", store.lost ? "unavailable" : "available", store.lost ? "bad" : "good"]];
  rows.push(["type", store.leased ? `${store.kind}, with leases` : store.kind]);
  if (services.length > 1) {
    rows.push(["services on this store", services.map(({ name, own }) => (own ? `${name} (this one)` : name)).join(", ")]);
  }
  rows.push(...countRows(store.counts));
  if (!bus) rows.push(["Bus", "not configured"]);
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
  return Object.entries(counts).filter(([name, value]) => name in COUNT_LABELS && !(name === "processes" && !value)).map(([name, value]) => [COUNT_LABELS[name], formatCount(value)]);
}
