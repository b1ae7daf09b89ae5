// The page of one key: policies with data about it, the decision for its next call, its denials, and its audit log.

import { RequestError, get } from "./api.js";
import { renderMeter } from "./cells.js";
import { confirmAction } from "./confirm.js";
import { byId, createElement, createRow, renderRows, setAttribute, setName, setText } from "./dom.js";
import { copyableKey, formatCount, formatDate, formatDuration, formatKey, formatReason, sameKey } from "./format.js";
import { change, state } from "./page_state.js";
import { renderDenialBars } from "./small_charts.js";

let shownKey = null;
let lastNow = 0; // the time of the service, in milliseconds since 1970

/** Request the key of the URL again, if there is one. */
export async function refreshKey(now = lastNow) {
  lastNow = now;
  const { key } = state();
  byId("key-page").hidden = key === null;
  if (key === null) {
    shownKey = null;
    return;
  }
  if (!sameKey(key, shownKey)) {
    shownKey = key;
    setName(byId("key-title"), formatKey(key));
    renderVerdict("", "");
    renderRows(byId("key-limits"), [], createKeyRow, () => {});
  }
  try {
    const query = new URLSearchParams([key].flat().map((part) => ["key", part]));
    const report = await get(`v1/key?${query}`);
    if (sameKey(key, state().key)) renderKey(report, now);
  } catch (error) {
    if (!(error instanceof RequestError) || error.needsToken) throw error;
    renderVerdict(error.message, "bad");
  }
}

function renderVerdict(message, level) {
  setText(byId("key-verdict"), message);
  setAttribute(byId("key-verdict"), "data-state", level);
}

function renderKey(report, now) {
  const blocked = report.policies.filter(({ block }) => block);
  const denied = report.policies.filter(({ block, next }) => !block && next && !next.allowed);
  if (report.store_lost) {
    renderVerdict("The store is unavailable: the usage of this key is unknown. on_store_error decides its next call.", "bad");
  } else if (!report.seen) {
    renderVerdict("Never seen: no policy has any usage or block for this key, and it is not among the denied keys of the last 24 hours.", "");
  } else if (blocked.length) renderVerdict(blocked.map(describeBlock).join(". "), "bad");
  else if (denied.length) renderVerdict(`Its next call is denied by ${denied.map(({ policy, next }) => `${policy} (${formatReason(next.over)})`).join(", ")}.`, "warn");
  else renderVerdict("Its next call is admitted by every policy.", "good");
  renderLimits(report);
  renderHistory(report, now);
}

function describeBlock({ policy, block }) {
  const why = `${block.actor ? ` by ${block.actor}` : ""}${block.reason ? `: ${block.reason}` : ""}`;
  return `Blocked in ${policy} for another ${formatDuration(block.seconds)}${why}`;
}

function createKeyRow() {
  const row = createRow("c-name", "", "c-bar", "num hide-on-phone", "c-next", "c-actions");
  const buttons = ["Reset…", "Block…"].map((label) => createElement("button", { type: "button", class: "small" }, label));
  for (const button of buttons) button.addEventListener("click", () => button.run());
  row.cells[5].append(createElement("div", { class: "row-actions" }, ...buttons));
  return row;
}

function renderLimits(report) {
  const items = report.policies.flatMap((policy) => (policy.limits ?? []).map((limit, index) => ({ policy, limit, first: index === 0 })));
  renderRows(byId("key-limits"), items, createKeyRow, (cells, { policy, limit, first }) => {
    setName(cells[0], policy.policy);
    setText(cells[1], limit.text);
    const total = limit.used + limit.remaining;
    renderMeter(cells[2], { fraction: limit.used / total, label: `${formatCount(limit.used)} of ${formatCount(total)}` });
    setText(cells[3], limit.used ? formatDuration(limit.reset_after) : "–");
    setText(cells[4], first ? describeNext(policy) : "");
    setAttribute(cells[4], "data-state", !first || policy.next.allowed ? "" : "bad");
    const [reset, block] = cells[5].firstElementChild.children;
    reset.hidden = block.hidden = !first;
    const verb = policy.block ? "unblock" : "block";
    setText(block, policy.block ? "Unblock…" : "Block…");
    setAttribute(block, "class", policy.block ? "small" : "small danger");
    setAttribute(block, "aria-label", `${verb} in ${policy.policy}`);
    setAttribute(reset, "aria-label", `reset in ${policy.policy}`);
    reset.run = () => confirmAction("reset", policy.policy, report.key, () => refreshKey());
    block.run = () => confirmAction(verb, policy.policy, report.key, () => refreshKey());
  });
}

function describeNext({ next, block, mode }) {
  if (block) return "denied: blocked";
  if (next.allowed) return mode === "shadow" ? "admitted (shadow)" : "admitted";
  return `denied: ${formatReason(next.over)}, retry in ${formatDuration(next.retry_after)}`;
}

function renderHistory(report, now) {
  byId("key-history").hidden = !report.seen && !report.audit.length;
  const from = Math.max(Math.min(report.minutes_since, now - 3_600_000), now - 86_400_000);
  renderDenialBars(byId("key-minutes"), report.minutes, from, Math.max(now, from + 60_000));
  const total = report.minutes.reduce((sum, { denied }) => sum + denied, 0);
  const text = total ? `${formatCount(total)} denied calls since ${formatDate(from)}, counting only minutes in which the key was one of the ten most denied keys.` : `Not among the most denied keys since ${formatDate(from)}.`;
  setText(byId("key-minutes-text"), text);
  const lines = report.audit.map(({ at, action, policy, actor, reason, seconds }) => {
    const long = seconds ? ` for ${formatDuration(seconds)}` : "";
    return `${formatDate(at)}: ${action} in ${policy}${long}${actor ? ` by ${actor}` : ""}${reason ? `: ${reason}` : ""}`;
  });
  const list = byId("key-audit");
  const wanted = lines.length ? lines : ["Nobody has blocked, unblocked or reset this key."];
  if ([...list.children].map((item) => item.textContent).join("\n") !== wanted.join("\n")) list.replaceChildren(...wanted.map((line) => createElement("li", {}, line)));
}

export function closeKey() {
  change({ key: null });
  byId("search-key").focus({ preventScroll: true });
}

/** Register the event handlers of the page. */
export function setUpKeyPage(copy) {
  byId("key-close").addEventListener("click", closeKey);
  byId("key-copy").addEventListener("click", () => copy(copyableKey(state().key), byId("key-copy")));
}
