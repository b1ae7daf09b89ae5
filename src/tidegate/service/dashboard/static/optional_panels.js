// The panels that a service has only if it is configured: budgets, providers and sources, swarm.

import { CapacityChart } from "./charts.js";
import { byId, createRow, renderBar, renderRows, setAttribute, setText, toggleEmptyMessage } from "./dom.js";
import { formatCount, formatDuration, formatPercent, formatTime } from "./format.js";

const emptyMessages = new Map(); // the original child nodes of each "empty" message, which an error replaces

/** Returns whether a panel has data; otherwise shows its error, or how to configure it. */
function hasData(table, panel) {
  const message = table.parentElement.querySelector(".empty");
  if (!emptyMessages.has(message)) emptyMessages.set(message, [...message.childNodes]);
  if (panel && !panel.error) {
    message.hidden = true;
    return true;
  }
  if (panel?.error) toggleEmptyMessage(table, true, `This panel is not available: ${panel.error}.`);
  else {
    message.hidden = false;
    if (message.firstChild !== emptyMessages.get(message)[0]) message.replaceChildren(...emptyMessages.get(message));
  }
  return false;
}

// ---- budgets --------------------------------------------------------------------------------------------------------

export function renderBudgets(budgets) {
  const table = byId("budgets");
  const tiers = hasData(table, budgets) ? budgets.flatMap((budget) => budget.tiers.map((tier) => ({ budget, ...tier }))) : [];
  renderRows(table, tiers, () => createRow("c-tier", "c-bar", "num", "c-detail"), (cells, tier) => {
    setText(cells[0], budgets.length > 1 ? `${tier.budget.name}: ${tier.name}` : tier.name);
    renderBar(cells[1], tier.used / tier.quota, `${formatCount(tier.used)} of ${formatCount(tier.quota)}`);
    setText(cells[2], tier.used ? formatDuration(tier.reset_after) : "–");
    setText(cells[3], formatForecast(tier));
  });
  setText(byId("note-budgets"), tiers.length && budgets.length === 1 ? `${budgets[0].name}, ${budgets[0].strategy} windows` : "");
}

function formatForecast(tier) {
  if (tier.remaining <= 0) return "used up";
  if (tier.runs_out_in !== null) return `runs out in ${formatDuration(tier.runs_out_in)}`;
  return tier.pace ? "sufficient" : "not in use";
}

// ---- providers and sources ------------------------------------------------------------------------------------------

export function renderSources(panel) {
  const [providerTable, sourceTable] = [byId("providers"), byId("sources")];
  const available = hasData(sourceTable, panel);
  const limits = available ? panel.providers.flatMap((provider) => provider.limits.map((limit, index) => ({ provider, index, ...limit }))) : [];
  renderRows(providerTable, limits, () => createRow("c-key", "hide-on-phone", "c-bar", "c-detail"), (cells, limit) => {
    setText(cells[0], [limit.provider.name, limit.provider.account].filter(Boolean).join(" "));
    setText(cells[1], limit.text);
    renderBar(cells[2], limit.used / limit.quota, `${formatCount(limit.used)} of ${formatCount(limit.quota)}`);
    setText(cells[3], limit.index ? "" : formatCapacity(limit.provider));
  });
  renderRows(sourceTable, available ? panel.sources : [], () => createRow("c-key", "num", "c-detail", "num hide-on-phone"), (cells, source) => {
    setText(cells[0], source.name);
    setAttribute(cells[0], "title", `${source.provider ?? "unlimited"}, ${source.schedule}`);
    setText(cells[1], source.state === "idle" ? `in ${formatDuration(source.due_in)}` : source.state);
    setText(cells[2], source.last_ago === null ? "not fetched yet" : `${source.last_result}, ${formatDuration(source.last_ago)} ago`);
    setText(cells[3], source.failed ? `${formatCount(source.ok)}, ${formatCount(source.failed)} failed` : formatCount(source.ok));
  });
  setText(byId("note-sources"), available ? panel.notes.at(-1) ?? "" : "");
}

function formatCapacity(provider) {
  if (provider.frozen_for > 0) return `paused for ${formatDuration(provider.frozen_for)}`;
  const highest = Math.max(...provider.limits.map((limit) => limit.quota));
  return provider.limits.some((limit) => limit.quota === provider.capacity) || provider.capacity >= highest
    ? "full" : `reduced to ${formatCount(provider.capacity)}`;
}

// ---- swarm ----------------------------------------------------------------------------------------------------------

const capacityCharts = new Map(); // by resource

export function renderSwarm(panel, now) {
  const [agentTable, reductionTable] = [byId("agents"), byId("reductions")];
  const available = hasData(agentTable, panel);
  const resources = available ? panel.agents.flatMap((agent) => agent.resources.map((resource) => ({ agent, ...resource }))) : [];
  const reductions = available ? [...panel.reductions].sort((a, b) => b.at - a.at) : [];
  renderRows(agentTable, resources, () => createRow("c-key", "c-tier", "c-bar", "num hide-on-phone"), (cells, resource) => {
    setText(cells[0], resource.agent.id);
    setText(cells[1], resource.name);
    renderBar(cells[2], resource.total / Math.max(1, resource.original), `${formatCount(resource.total)} of ${formatCount(resource.original)}`);
    setAttribute(cells[2].firstElementChild, "data-level", resource.total < resource.original ? "high" : "normal");
    setText(cells[3], resource.frozen_for > 0 ? `paused ${formatDuration(resource.frozen_for)}` : formatCount(resource.in_flight));
  });
  renderRows(reductionTable, reductions, () => createRow("c-time", "c-tier", "num c-short", "c-detail", "hide-on-phone c-tier"), (cells, reduction) => {
    setText(cells[0], formatTime(reduction.at));
    setText(cells[1], reduction.resource);
    setText(cells[2], formatCount(reduction.capacity));
    setText(cells[3], (reduction.reason || "no reason given") + (reduction.pause ? `, paused for ${formatDuration(reduction.pause)}` : ""));
    setText(cells[4], reduction.agent);
  });
  renderCapacityCharts(available ? panel.resources : {}, reductions, now);
  setText(byId("note-swarm"), available ? formatAgents(panel) : "");
}

function formatAgents({ agents, namespace }) {
  const where = namespace ? `namespace ${namespace}` : "no namespace";
  if (!agents.length) return `no agent responds (${where}): check the bus URL, the namespace and the secret`;
  return `${agents.length === 1 ? "1 agent" : `${agents.length} agents`}, ${where}`;
}

function renderCapacityCharts(resources, reductions, now) {
  for (const [name, chart] of capacityCharts) {
    if (!(name in resources)) {
      chart.node.remove();
      capacityCharts.delete(name);
    }
  }
  for (const [name, points] of Object.entries(resources)) {
    if (!capacityCharts.has(name)) {
      capacityCharts.set(name, new CapacityChart());
      byId("resources").append(capacityCharts.get(name).node);
    }
    const [, total, original] = points.at(-1);
    const label = total < original ? `${formatCount(total)} of ${formatCount(original)} (${formatPercent(total, original)})` : `${formatCount(total)} (full)`;
    capacityCharts.get(name).update(name, points, reductions.filter(({ resource }) => resource === name), now, label);
  }
}
