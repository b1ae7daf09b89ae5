// What every service has: policies, keys near their limit, denials, store and bus.

import { spark } from "./charts.js";
import { $, attribute, bar, cells, el, empty, rows, text } from "./dom.js";
import { clock, count, duration, key, limit, rate, share } from "./format.js";
import { present } from "./history.js";

/** Policies; the name of one shows it alone in the chart, and all again. */
export function policies(answer, history, chosen, choose) {
  const table = $("policies");
  rows(table, answer.policies, policyRow, (row, policy) => {
    const [admitted, denied] = history.of(policy.name);
    const [name, mode] = row[0].children;
    text(name, policy.name);
    attribute(name, "aria-pressed", policy.name === chosen);
    name.choose = () => choose(policy.name === chosen ? null : policy.name);
    text(mode, modeOf(policy));
    mode.hidden = !mode.textContent;
    text(row[1], policy.limits.join(", "));
    spark(row[2], admitted, denied);
    text(row[3], rate(present(admitted)));
    text(row[4], rate(present(denied)));
    text(row[5], count(policy.waiting));
    text(row[6], `${count(policy.denied)} (${share(policy.denied, policy.denied + policy.admitted)})`);
    attribute(row[4], "data-level", present(denied) > 0 ? "some" : "none");
  });
  empty(table, !answer.policies.length);
  text($("note-policies"), answer.rules.refused ? "the file as it stands is refused: see the log" : "");
}

function policyRow() {
  const row = cells("c-name", "c-limits wide", "c-spark", "num", "num denied", "num narrow-off", "num wide");
  const name = el("button", { type: "button", class: "link name", title: "show it alone in the chart" });
  name.addEventListener("click", () => name.choose());
  row.cells[0].append(name, el("span", { class: "tag" }));
  return row;
}

function modeOf(policy) {
  if (policy.mode === "shadow") return "shadow";
  return policy.rollout < 100 ? `enforced for ${policy.rollout} %` : "";
}

/** A key that opens all of its limits. */
function keyCell(cell, policy, value, open, searchable) {
  if (!cell.firstElementChild) {
    const button = el("button", { type: "button", class: "link" });
    button.addEventListener("click", () => button.open());
    cell.append(button, el("span", { class: "sub" }));
  }
  const [button, below] = cell.children;
  text(button, key(value) || "(empty)");
  attribute(button, "title", key(value));
  text(below, policy);
  button.disabled = !searchable.has(policy);
  button.open = () => open(policy, value);
}

export function near(answer, open) {
  const table = $("near");
  const searchable = named(answer);
  const blocks = answer.blocks.map(({ policy, key: blocked, seconds }) => (
    { policy, key: blocked, limit: "blocked", unit: "requests", quota: 1, used: 1, remaining: 0, reset_after: seconds }));
  const items = [...blocks, ...answer.near.filter((item) => item.limit !== "blocked")];
  rows(table, items, () => cells("c-key", "narrow-off", "c-bar", "num", "num"), (row, item) => {
    keyCell(row[0], item.policy, item.key, open, searchable);
    const words = limit({ ...item, name: item.limit });
    text(row[1], words);
    attribute(row[1], "title", words);
    bar(row[2], item.used / (item.used + item.remaining), share(item.used, item.used + item.remaining));
    text(row[3], count(item.remaining));
    text(row[4], duration(item.reset_after));
  });
  empty(table, !items.length);
}

export function denials(answer, open) {
  const table = $("denials");
  const searchable = named(answer);
  rows(table, answer.denials, () => cells("c-time", "c-key", "c-ahead", "num narrow-off"), (row, item) => {
    text(row[0], clock(item.at));
    keyCell(row[1], item.policy, item.key, open, searchable);
    text(row[2], why(item));
    text(row[3], duration(item.retry_after));
  });
  empty(table, !answer.denials.length);
}

function why(denial) {
  const said = denial.violated.length ? denial.violated.join(" and ") : "no limit named";
  const words = said === "blocked" ? "blocked" : `over ${said}`;
  return denial.shadow ? `${words} (shadow: let through)` : words;
}

function named(answer) {
  return new Set(answer.policies.filter((policy) => policy.searchable).map((policy) => policy.name));
}

/** Fill in the policies that can be searched, keeping the choice. */
export function choices(answer) {
  const select = $("search-policy");
  const names = [...named(answer)];
  const shown = [...select.options].map((option) => option.value);
  if (names.length === shown.length && names.every((name, index) => name === shown[index])) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => {
    const option = el("option", {}, name);
    option.value = name;
    return option;
  }));
  if (names.includes(chosen)) select.value = chosen;
}

// ---- store and bus --------------------------------------------------------------------------------------------------

const COUNTS = {
  entries: "keys kept", max_entries: "room for keys", overflowed: "calls without room", transactions: "transactions",
  waits: "waits for the file", failures: "failures", connections: "connections", losses: "times lost",
  allowed_without_store: "allowed without it", denied_without_store: "denied without it", published: "messages sent",
  received: "messages received", dropped: "messages dropped", scripts: "scripts sent", calls: "calls", peers: "processes",
};

export function state(answer) {
  const { store, panels: { bus } } = answer;
  const pairs = [["Store", store.lost ? "lost: each policy decides by on_store_error" : "answers", store.lost ? "bad" : "good"]];
  pairs.push(["kept in", store.leased ? `${store.kind}, leased` : store.kind]);
  pairs.push(...counts(store.counts));
  if (!bus) pairs.push(["Bus", "none is set: bus: nats://… in the file shares reductions"]);
  else if (bus.error) pairs.push(["Bus", bus.error, "bad"]);
  else {
    pairs.push(["Bus", bus.connected ? "connected" : "not connected, trying again", bus.connected ? "good" : "bad"]);
    if (bus.where) pairs.push(["at", bus.where]);
    pairs.push(...counts(bus.counts));
  }
  for (const [kind, number] of Object.entries(answer.problems)) pairs.push([`answered ${kind}`, count(number)]);
  rows($("state"), pairs, () => cells("", ""), (row, [name, words, level = ""]) => {
    text(row[0], name);
    text(row[1], words);
    attribute(row[1], "data-state", level);
    attribute(row[0], "data-first", level ? "yes" : "no");
  });
}

function counts(values) {
  return Object.entries(values).filter(([name]) => name in COUNTS).map(([name, value]) => [COUNTS[name], count(value)]);
}
