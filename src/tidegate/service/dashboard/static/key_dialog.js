// The dialog of one key: its limits, reset, block and unblock.

import { RequestError, post } from "./api.js";
import { renderMeter } from "./cells.js";
import { byId, createRow, renderRows, setText } from "./dom.js";
import { formatCount, formatDuration, formatKey, formatLimit } from "./format.js";

let subject = null; // the policy and the key that the dialog shows
let blocks = [];
let openTokenDialog = () => {};

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

export function open(policy, key) {
  subject = { policy, key };
  setText(byId("key-title"), formatKey(key) || "(empty)");
  renderSubject();
  setStatus("");
  renderLimits([]);
  if (!byId("key").open) byId("key").showModal();
  return refresh();
}

/** Set the list of blocked keys. */
export function setBlocks(newBlocks) {
  blocks = newBlocks;
  if (subject) renderSubject();
}

function renderSubject() {
  const isSubject = (block) => block.policy === subject.policy && JSON.stringify(block.key) === JSON.stringify(subject.key);
  const block = blocks.find(isSubject);
  setText(byId("key-policy"), `policy ${subject.policy}${block ? ` · blocked for another ${formatDuration(block.seconds)}` : ""}`);
}

/** Request the usage of the key again, if the dialog is open. */
export async function refresh() {
  const requested = subject;
  if (!requested || !byId("key").open) return;
  try {
    const { limits } = await post("usage", requested);
    if (requested === subject) renderLimits(limits);
  } catch (error) {
    if (requested === subject) showError(error);
  }
}

function renderLimits(limits) {
  renderRows(byId("key-limits"), limits, () => createRow("", "c-bar", "num", "num"), (cells, limit) => {
    setText(cells[0], formatLimit(limit));
    const total = limit.used + limit.remaining;
    renderMeter(cells[1], { fraction: limit.used / total, label: `${formatCount(limit.used)} of ${formatCount(total)}` });
    setText(cells[2], formatCount(limit.remaining));
    setText(cells[3], limit.used ? formatDuration(limit.reset_after) : "now");
  });
  byId("key-limits").hidden = false;
}

function setStatus(message, state = "") {
  const status = byId("key-status");
  setText(status, message);
  status.dataset.state = state;
}

function showError(error) {
  if (!(error instanceof RequestError)) throw error;
  setStatus(error.message, "bad");
  if (error.needsToken) openTokenDialog("This action requires a token with more permissions.");
}

async function send(verb, body, message) {
  const buttons = [byId("key-reset"), byId("key-block"), byId("key-unblock")];
  for (const button of buttons) button.disabled = true;
  try {
    await post(verb, { ...subject, ...body });
    setStatus(message, "good");
    await refresh();
  } catch (error) {
    showError(error);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

/** Register the event handlers of the dialog and of the search form. */
export function setUp(onTokenNeeded) {
  openTokenDialog = onTokenNeeded;
  byId("key").addEventListener("close", () => { subject = null; });
  byId("key-reset").addEventListener("click", () => send("reset", {}, "Reset: the usage of all limits is zero."));
  byId("key-block").addEventListener("click", () => {
    const seconds = Number(byId("key-block-seconds").value);
    send("block", { seconds }, `Blocked for ${formatDuration(seconds)}.`);
  });
  byId("key-unblock").addEventListener("click", () => send("unblock", {}, "Unblocked."));
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const [policy, input] = [byId("search-policy").value, byId("search-key").value.trim()];
    if (policy && input) open(policy, parseKey(input));
    else byId("search-key").focus();
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
    event.preventDefault();
    byId("search-key").focus();
  });
}
