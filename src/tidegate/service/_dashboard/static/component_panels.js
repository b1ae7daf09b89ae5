// The panels of the components that a service uses. Each entry describes how to show the data of one panel of
// /v1/overview (`panels` in service/dashboard/panels.py). A panel appears when its component is configured.
//
//   title      the heading
//   note       optional: a short text beside the heading, from the data
//   tables     each table: `rows` returns its items, `columns` is a list of [heading, cell, classes]. A cell is a
//              function of an item that returns a string, or one of the values of cells.js: meter, duration, count …
//   draw       optional: draws charts above the tables, into an element, for a range of time { from, to }
//
// To add a panel: a function in panels.py that returns its data, and an entry here.

import { CapacityChart } from "./small_charts.js";
import { count, duration, meter, name, share, text, time } from "./cells.js";
import { formatCount, formatDuration, formatMicroseconds, formatMoney, formatPercent } from "./format.js";

export const COMPONENT_PANELS = {
  inbound: {
    title: "Inbound requests",
    note: () => "by category and route, since the start",
    tables: [{
      rows: (routes) => routes,
      columns: [
        ["Category", (route) => name(route.category)],
        ["Route", (route) => name(route.route)],
        ["Limits", (route) => route.limits.join(", "), "hide-on-phone"],
        ["Denied", (route) => meter(route.denied, Math.max(1, route.admitted + route.denied)), "c-wide"],
      ],
    }],
  },
  budgets: {
    title: "Budgets",
    note: (budgets) => budgets.map((budget) => [budgets.length === 1 || budget.note ? budget.name : "", budgets.length === 1 ? `${budget.strategy} windows` : "", budget.note].filter(Boolean).join(", ")).filter(Boolean).join("; "),
    tables: [{
      rows: (budgets) => budgets.flatMap((budget) => budget.tiers.map((tier) => ({ ...tier, budget: budgets.length > 1 ? `${budget.name}: ` : "" }))),
      columns: [
        ["Tier", (tier) => tier.budget + tier.name, "c-tier"],
        ["Used", (tier) => meter(tier.used, tier.quota), "c-wide"],
        ["Resets in", (tier) => (tier.used ? duration(tier.reset_after) : "–"), "num c-duration"],
        ["Forecast", formatForecast, "c-forecast"],
      ],
    }],
  },
  sources: {
    title: "Providers",
    note: (panel) => panel.notes.at(-1) ?? "",
    tables: [{
      rows: (panel) => panel.providers.flatMap((provider) => provider.limits.map((limit, index) => ({ provider, index, ...limit }))),
      columns: [
        ["Provider", ({ provider, index }) => name(index ? "" : [provider.name, provider.account].filter(Boolean).join(" "))],
        ["Limit", (limit) => limit.text, "c-limit"],
        ["Used", (limit) => meter(limit.used, limit.quota, formatUsed(limit)), "c-used"],
        ["State", (limit) => (limit.index ? "" : formatProvider(limit.provider)), "c-state"],
      ],
    }, {
      rows: (panel) => panel.sources,
      columns: [
        ["Source", (source) => name(source.name, `${source.name}: ${source.provider ?? "unlimited"}, ${source.schedule}`)],
        ["Next run", (source) => (source.state !== "idle" ? source.state : source.due_in < 1 ? "now" : `in ${formatDuration(source.due_in)}`), "num"],
        ["Last result", (source) => (source.last_ago === null ? "not fetched yet" : `${source.last_result}, ${formatDuration(source.last_ago)} ago`), "c-wide"],
        ["Fetched", (source) => (source.failed ? `${formatCount(source.ok)}, ${formatCount(source.failed)} failed` : count(source.ok)), "num hide-on-phone"],
      ],
    }],
  },
  pools: {
    title: "Pools",
    note: (members) => (isOnePool(members) ? members[0].pool : ""),
    tables: [{
      rows: (members) => members.flatMap((member) => member.limits.map((limit, index) => ({ member, index, limit, alone: isOnePool(members) }))),
      columns: [
        ["Member", ({ member, index, alone }) => name(index ? "" : alone ? member.member : `${member.pool}/${member.member}`)],
        ["Limit", ({ limit }) => limit.text, "c-limit hide-on-phone"],
        ["Used", ({ limit }) => meter(limit.used, limit.quota, formatUsed(limit)), "c-used"],
        ["State", ({ member, index }) => (index ? "" : text(formatMember(member), { state: member.state === "ready" ? "" : "warn" }))],
        ["Refused", ({ member, index }) => (index ? "" : count(member.refused)), "num c-short hide-on-phone"],
        ["Cost", ({ member, index }) => (index ? "" : formatCost(member)), "num c-money"],
      ],
    }],
  },
  egress: {
    title: "Calls through the gateway",
    note: (panel) => panel.listen,
    tables: [{
      rows: (panel) => panel.rows,
      columns: [
        ["Caller", (row) => name(row.caller)],
        ["Provider", (row) => name(row.provider)],
        ["Sent", (row) => count(row.requests), "num"],
        ["Waiting", (row) => count(row.waiting), "num"],
        ["Denied", (row) => text(formatCount(row.denied), { state: row.denied ? "bad" : "" }), "num"],
        ["Refused", (row) => text(formatCount(row.refused), { state: row.refused ? "bad" : "" }), "num hide-on-phone"],
        ["Tokens", (row) => count(row.input_tokens + row.output_tokens), "num hide-on-phone"],
        ["First byte", (row) => formatMicroseconds(row.first_byte === null ? null : 1e6 * row.first_byte), "num hide-on-phone"],
      ],
    }],
  },
  runs: {
    title: "Runs of agents",
    note: (rows) => { const runs = new Set(rows.map((row) => row.run)).size; return runs === 1 ? "1 run" : `${runs} runs`; },
    tables: [{
      rows: (rows) => rows,
      columns: [
        ["Node", (row) => name(row.more ? `… ${formatCount(row.more)} more nodes` : row.first ? "\u2003".repeat(row.depth) + row.name : "", row.id)],
        ["Limit", (row) => row.limit ?? "", "c-limit hide-on-phone"],
        ["Used", (row) => (row.more ? "" : row.quota ? meter(row.used, row.quota, formatUsed(row)) : (row.used === 1 ? "1 call" : `${formatCount(row.used)} calls`)), "c-used"],
        ["State", (row) => (row.more || !row.first ? "" : formatRun(row)), "c-state"],
      ],
    }],
  },
  swarm: {
    title: "Agents and capacity",
    note: formatAgents,
    draw: drawCapacities,
    tables: [{
      rows: (panel) => panel.agents.flatMap((agent) => agent.resources.map((resource) => ({ agent: agent.id, ...resource }))),
      columns: [
        ["Agent", (resource) => name(resource.agent)],
        ["Resource", (resource) => name(resource.name)],
        ["Capacity", (resource) => share(resource.total, resource.original), "c-wide"],
        ["State", (resource) => (resource.frozen_for > 0 ? text(`frozen for ${formatDuration(resource.frozen_for)}`, { state: "bad" }) : `${formatCount(resource.in_flight)} in flight`)],
      ],
    }, {
      rows: (panel) => [...panel.reductions].sort((a, b) => b.at - a.at),
      columns: [
        ["Reduced at", (reduction) => time(reduction.at), "c-time"],
        ["Resource", (reduction) => name(reduction.resource)],
        ["To", (reduction) => count(reduction.capacity), "num c-short"],
        ["Reason", (reduction) => (reduction.reason || "no reason given") + (reduction.pause ? `, frozen for ${formatDuration(reduction.pause)}` : ""), "c-wide"],
        ["Agent", (reduction) => name(reduction.agent), "hide-on-phone"],
      ],
    }],
  },
};

const NEARLY_USED_UP = 0.9; // of a tier, as in the status line

function formatForecast(tier) {
  if (tier.remaining <= 0) return text("used up", { state: "bad" });
  if (tier.runs_out_in !== null) return text(`runs out in ${formatDuration(tier.runs_out_in)}`, { state: tier.runs_out_in < 3600 ? "bad" : "" });
  if (tier.used >= NEARLY_USED_UP * tier.quota) return text("nearly used up", { state: "warn" });
  return tier.pace ? "sufficient" : "not in use";
}

function formatProvider(provider) {
  const { capacity, cost_micros: cost, frozen_for: pause, limits, refused, waiting } = provider;
  const quotas = limits.map((limit) => limit.quota);
  const isReduced = !quotas.includes(capacity) && capacity < Math.max(...quotas);
  const states = [
    pause > 0 && `paused for ${formatDuration(pause)}`,
    isReduced && `reduced to ${formatCount(capacity)}`,
    waiting > 0 && `${formatCount(waiting)} waiting`,
    refused > 0 && `${formatCount(refused)} refused`,
    cost > 0 && `cost ${formatCost(provider)}`,
  ].filter(Boolean);
  return text(states.join(", ") || "ready", { state: pause > 0 ? "bad" : isReduced ? "warn" : "" });
}

const formatRun = ({ state, ends_in: left }) => (state === "open" ? `ends in ${formatDuration(left)}` : text(state, { state: state === "stopped" ? "bad" : "" }));

const isOnePool = (members) => members.length > 0 && members.every((member) => member.pool === members[0].pool);

const formatMember = ({ state, frozen_for: pause }) => (state === "paused" ? `paused for ${formatDuration(pause)}` : state);

/** "0.15 usd"; a provider without prices has no cost. */
const formatCost = ({ cost_micros: cost, currency }) => (currency ? `${formatMoney(cost)} ${currency}` : "–");

/** "0.15 of 5.00 usd" for money, else "90,000 of 200K". */
function formatUsed({ quota, unit, used }) {
  if (!unit.endsWith("_micros")) return `${formatCount(used)} of ${formatCount(quota)}`;
  return `${formatMoney(used)} of ${formatCost({ cost_micros: quota, currency: unit.slice(0, -"_micros".length) })}`;
}

function formatAgents({ agents, namespace }) {
  const where = namespace ? `namespace ${namespace}` : "no namespace";
  if (!agents.length) return `no agent responds (${where}): check the bus URL, the namespace and the secret`;
  return `${agents.length === 1 ? "1 agent" : `${agents.length} agents`}, ${where}`;
}

const capacityCharts = new Map(); // by resource

function drawCapacities(host, { resources, reductions }, range) {
  host.classList.add("resources");
  for (const [resource, chart] of capacityCharts) {
    if (!(resource in resources)) {
      chart.node.remove();
      capacityCharts.delete(resource);
    }
  }
  for (const [resource, points] of Object.entries(resources)) {
    if (!capacityCharts.has(resource)) {
      capacityCharts.set(resource, new CapacityChart());
      host.append(capacityCharts.get(resource).node);
    }
    const [, total, original] = points.at(-1);
    const label = total < original ? `${formatCount(total)} of ${formatCount(original)} (${formatPercent(total, original)})` : `${formatCount(total)} (full)`;
    capacityCharts.get(resource).update(resource, points, reductions.filter((each) => each.resource === resource), range, label);
  }
}
