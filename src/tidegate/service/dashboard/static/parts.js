// What some services have: budgets, providers and sources, a swarm. Each says what would show it.

import { Capacity } from "./charts.js";
import { $, attribute, bar, cells, empty, rows, text } from "./dom.js";
import { clock, count, duration, share } from "./format.js";

const WHAT = new Map(); // the words of a panel that is empty, as the page has them

/** Show why a panel has nothing; true: it has. */
function filled(table, said) {
  const note = table.parentElement.querySelector(".empty");
  if (!WHAT.has(note)) WHAT.set(note, [...note.childNodes]);
  if (said && !said.error) {
    note.hidden = true;
    return true;
  }
  if (said?.error) empty(table, true, `This cannot be shown now: ${said.error}.`);
  else {
    note.hidden = false;
    if (note.firstChild !== WHAT.get(note)[0]) note.replaceChildren(...WHAT.get(note));
  }
  return false;
}

// ---- budgets --------------------------------------------------------------------------------------------------------

export function budgets(said) {
  const table = $("budgets");
  const tiers = filled(table, said) ? said.flatMap((budget) => budget.tiers.map((tier) => ({ budget, ...tier }))) : [];
  rows(table, tiers, () => cells("c-tier", "c-bar", "num", "c-ahead"), (row, tier) => {
    text(row[0], said.length > 1 ? `${tier.budget.name}: ${tier.name}` : tier.name);
    bar(row[1], tier.used / tier.quota, `${count(tier.used)} of ${count(tier.quota)}`);
    text(row[2], tier.used ? duration(tier.reset_after) : "–");
    text(row[3], ahead(tier));
  });
  text($("note-budgets"), tiers.length && said.length === 1 ? `${said[0].name}, ${said[0].strategy} windows` : "");
}

function ahead(tier) {
  if (tier.remaining <= 0) return "used up";
  if (tier.runs_out_in !== null) return `runs out in ${duration(tier.runs_out_in)}`;
  return tier.pace ? "lasts" : "not in use";
}

// ---- providers and sources ------------------------------------------------------------------------------------------

export function sources(said) {
  const [providers, table] = [$("providers"), $("sources")];
  const there = filled(table, said);
  const limits = there ? said.providers.flatMap((each) => each.limits.map((limit, index) => ({ each, index, ...limit }))) : [];
  rows(providers, limits, () => cells("c-key", "narrow-off", "c-bar", "c-ahead"), (row, limit) => {
    text(row[0], [limit.each.name, limit.each.account].filter(Boolean).join(" "));
    text(row[1], limit.text);
    bar(row[2], limit.used / limit.quota, `${count(limit.used)} of ${count(limit.quota)}`);
    text(row[3], limit.index ? "" : capacity(limit.each));
  });
  rows(table, there ? said.sources : [], () => cells("c-key", "num", "c-ahead", "num narrow-off"), (row, source) => {
    text(row[0], source.name);
    attribute(row[0], "title", `${source.provider ?? "unlimited"}, ${source.schedule}`);
    text(row[1], source.state === "idle" ? `in ${duration(source.due_in)}` : source.state);
    text(row[2], source.last_ago === null ? "not fetched yet" : `${source.last_result}, ${duration(source.last_ago)} ago`);
    text(row[3], source.failed ? `${count(source.ok)}, ${count(source.failed)} failed` : count(source.ok));
  });
  text($("note-sources"), there ? said.notes.at(-1) ?? "" : "");
}

function capacity(provider) {
  if (provider.frozen_for > 0) return `paused for ${duration(provider.frozen_for)}`;
  const whole = Math.max(...provider.limits.map((limit) => limit.quota));
  return provider.limits.some((limit) => limit.quota === provider.capacity) || provider.capacity >= whole
    ? "whole" : `reduced to ${count(provider.capacity)}`;
}

// ---- swarm ----------------------------------------------------------------------------------------------------------

const charts = new Map();

export function swarm(said, now) {
  const [agents, reductions] = [$("agents"), $("reductions")];
  const there = filled(agents, said);
  const rowsOf = there ? said.agents.flatMap((agent) => agent.resources.map((each) => ({ agent, ...each }))) : [];
  const told = there ? [...said.reductions].sort((a, b) => b.at - a.at) : [];
  rows(agents, rowsOf, () => cells("c-key", "c-tier", "c-bar", "num narrow-off"), (row, item) => {
    text(row[0], item.agent.id);
    text(row[1], item.name);
    bar(row[2], item.total / Math.max(1, item.original), `${count(item.total)} of ${count(item.original)}`);
    attribute(row[2].firstElementChild, "data-level", item.total < item.original ? "high" : "fine");
    text(row[3], item.frozen_for > 0 ? `paused ${duration(item.frozen_for)}` : count(item.in_flight));
  });
  rows(reductions, told, () => cells("c-time", "c-tier", "num c-short", "c-ahead", "narrow-off c-tier"), (row, update) => {
    text(row[0], clock(update.at));
    text(row[1], update.resource);
    text(row[2], count(update.capacity));
    text(row[3], (update.reason || "no reason given") + (update.pause ? `, no calls for ${duration(update.pause)}` : ""));
    text(row[4], update.agent);
  });
  resources(there ? said.resources : {}, told, now);
  text($("note-swarm"), there ? words(said.agents.length) : "");
}

function words(number) {
  if (!number) return "nobody answers yet: are agents on this bus, and is the secret theirs?";
  return number === 1 ? "1 agent" : `${number} agents`;
}

function resources(found, told, now) {
  for (const [name, chart] of charts) {
    if (!(name in found)) {
      chart.node.remove();
      charts.delete(name);
    }
  }
  for (const [name, moments] of Object.entries(found)) {
    if (!charts.has(name)) {
      charts.set(name, new Capacity());
      $("resources").append(charts.get(name).node);
    }
    const [, total, original] = moments.at(-1);
    const said = total < original ? `${count(total)} of ${count(original)} (${share(total, original)})` : `${count(total)}, whole`;
    charts.get(name).update(name, moments, told.filter(({ resource }) => resource === name), now, said);
  }
}
