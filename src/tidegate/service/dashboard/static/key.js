// One key: each of its limits, reset and block.

import { Problem, post } from "./api.js";
import { $, bar, cells, rows, text } from "./dom.js";
import { count, duration, key as shown, limit as limitOf } from "./format.js";

let subject = null;
let blocks = [];
let askToken = () => {};

/** Read what was typed: a text, or the parts of a key as a JSON list. */
export function read(typed) {
  if (!typed.startsWith("[")) return typed;
  try {
    const parts = JSON.parse(typed);
    if (Array.isArray(parts) && parts.length && parts.every((part) => typeof part === "string")) return parts;
  } catch {
    // then it is a text that begins with a bracket
  }
  return typed;
}

export function open(policy, key) {
  subject = { policy, key };
  text($("key-title"), shown(key) || "(empty)");
  about();
  say("");
  draw([]);
  if (!$("key").open) $("key").showModal();
  return refresh();
}

/** Take the blocks that the service knows of. */
export function hear(found) {
  blocks = found;
  if (subject) about();
}

function about() {
  const same = (block) => block.policy === subject.policy && JSON.stringify(block.key) === JSON.stringify(subject.key);
  const block = blocks.find(same);
  text($("key-policy"), `policy ${subject.policy}${block ? ` · blocked for another ${duration(block.seconds)}` : ""}`);
}

/** Look again, while it is shown. */
export async function refresh() {
  const asked = subject;
  if (!asked || !$("key").open) return;
  try {
    const { limits } = await post("usage", asked);
    if (asked === subject) draw(limits);
  } catch (problem) {
    if (asked === subject) fail(problem);
  }
}

function draw(limits) {
  rows($("uses"), limits, () => cells("", "c-bar", "num", "num"), (row, limit) => {
    text(row[0], limitOf(limit));
    const whole = limit.used + limit.remaining;
    bar(row[1], limit.used / whole, `${count(limit.used)} of ${count(whole)}`);
    text(row[2], count(limit.remaining));
    text(row[3], limit.used ? duration(limit.reset_after) : "now");
  });
  $("uses").hidden = false;
}

function say(words, state = "") {
  const said = $("key-said");
  text(said, words);
  said.dataset.state = state;
}

function fail(problem) {
  if (!(problem instanceof Problem)) throw problem;
  say(problem.message, "bad");
  if (problem.wantsToken) askToken("This needs a token that is allowed it.");
}

async function act(verb, body, done) {
  const buttons = [$("key-reset"), $("key-block"), $("key-unblock")];
  for (const button of buttons) button.disabled = true;
  try {
    await post(verb, { ...subject, ...body });
    say(done, "good");
    await refresh();
  } catch (problem) {
    fail(problem);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

export function setUp(onToken) {
  askToken = onToken;
  $("key").addEventListener("close", () => { subject = null; });
  $("key-reset").addEventListener("click", () => act("reset", {}, "Reset: all of its limits are free again."));
  $("key-block").addEventListener("click", () => {
    const seconds = Number($("key-for").value);
    act("block", { seconds }, `Blocked for ${duration(seconds)}.`);
  });
  $("key-unblock").addEventListener("click", () => act("unblock", {}, "Not blocked any more."));
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const [policy, typed] = [$("search-policy").value, $("search-key").value.trim()];
    if (policy && typed) open(policy, read(typed));
    else $("search-key").focus();
  });
  document.addEventListener("keydown", (event) => {
    const busy = event.target.closest?.("input, select, textarea, dialog");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || busy) return;
    event.preventDefault();
    $("search-key").focus();
  });
}
