// The first lines of the page: what is wrong, what it means for callers, and what to do. /v1/overview has the findings.

import { byId, createElement, setAttribute, setText } from "./dom.js";
import { formatKey, formatSince, sameKey } from "./format.js";

const SYMBOLS = { bad: "✕", warn: "!", good: "✓", wait: "…" };
let announced = "";

/** Keep a number and its percent sign on one line. */
const keepTogether = (text) => text.replace(/(\d) %/g, "$1\u00a0%");

function describe(finding, now) {
  const since = finding.since ? `${finding.since_text} ${formatSince(finding.since, now)}` : "";
  return `${finding.title}${since}${finding.detail ? `: ${finding.detail}` : ""}`;
}

/** Render the findings; `actions` are the functions openKey, confirm and selectPolicy. */
export function renderStatus(overview, actions) {
  const { blocks, findings, at } = overview;
  const list = byId("findings");
  while (list.children.length > findings.length) list.lastElementChild.remove();
  findings.forEach((finding, index) => {
    const isBlocked = blocks.some(({ policy, key }) => policy === finding.policy && sameKey(key, finding.key));
    renderFinding(list.children[index] ?? list.appendChild(createItem()), { ...finding, isBlocked }, at, actions);
  });
  setAttribute(byId("status"), "data-level", findings[0].level);
  const first = describe(findings[0], at);
  document.title = findings[0].level === "good" ? "tidegate" : `${SYMBOLS[findings[0].level]} ${first}`;
  announce(findings, at);
}

/** Tell screen readers, but only if the kind of a finding changes: its numbers change every second. */
function announce(findings, at) {
  const kinds = findings.map(({ kind, level, policy, key }) => JSON.stringify([kind, level, policy, key])).join();
  if (kinds === announced) return;
  announced = kinds;
  setText(byId("announcement"), findings.map((finding) => describe(finding, at)).join(". "));
}

function createItem() {
  return createElement("li", { class: "finding" },
    createElement("span", { class: "symbol", "aria-hidden": "true" }),
    createElement("div", { class: "finding-text" }, createElement("p", { class: "sentence" }), createElement("p", { class: "meaning" })),
    createElement("div", { class: "actions" }));
}

function renderFinding(item, finding, now, { openKey, confirm, selectPolicy }) {
  const [symbol, words, buttons] = item.children;
  setAttribute(item, "data-level", finding.level);
  setAttribute(item, "data-kind", finding.kind);
  setText(symbol, SYMBOLS[finding.level]);
  setText(words.children[0], keepTogether(describe(finding, now)));
  setAttribute(words.children[0], "title", describe(finding, now));
  setText(words.children[1], keepTogether(finding.meaning));
  const wanted = JSON.stringify([finding.policy, finding.key, finding.isBlocked]);
  if (item.dataset.actions === wanted) return;
  item.dataset.actions = wanted;
  buttons.replaceChildren();
  const add = (label, action, options = {}) => {
    const button = createElement("button", { type: "button", ...options }, label);
    button.addEventListener("click", action);
    buttons.append(button);
  };
  if (finding.key !== null) {
    add("Look up", () => openKey(finding.key), { "aria-label": `Look up ${formatKey(finding.key)}` });
    const [verb, label, options] = finding.isBlocked ? ["unblock", "Unblock", {}] : ["block", "Block", { class: "danger" }];
    add(`${label}…`, () => confirm(verb, finding.policy, finding.key), { ...options, "aria-label": `${label} ${formatKey(finding.key)} in ${finding.policy}` });
  }
  if (finding.policy !== null) add("Only this policy", () => selectPolicy(finding.policy), { "aria-label": `Show only the policy ${finding.policy}` });
}
