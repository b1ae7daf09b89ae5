// The page: asks once a second, and shows what it is told. Everything that moves is drawn from one answer.

import { Problem, get, keep, token } from "./api.js";
import { Chart } from "./charts.js";
import { $, text } from "./dom.js";
import { clock, count, duration, micros, rate } from "./format.js";
import { History, latest, present } from "./history.js";
import * as key from "./key.js";
import * as panels from "./panels.js";
import * as parts from "./parts.js";

const PERIOD = 1000;
const history = new History();
let chosen = null; // the policy that is shown alone in the chart
let shown = null; // the last answer
let seen = 0; // when the service answered last
let waiting = false; // for a token
let asking = false; // two answers at once would bring the same seconds twice

const decisions = new Chart($("chart-decisions"), $("legend-decisions"), [
  { name: "admitted", title: "admitted", filled: true },
  { name: "denied", title: "denied" },
  { name: "waiting", title: "waiting" },
], rate, "Decisions per second");
const latency = new Chart($("chart-latency"), $("legend-latency"), [
  { name: "median", title: "typical", filled: true },
  { name: "rare", title: "1 in 100" },
], micros, "Time to answer");

function show(answer) {
  shown = answer;
  const sums = history.sums();
  const [admitted, denied] = sums;
  if (!history.tracks.has(chosen)) chosen = null;
  decisions.update(chosen === null ? sums : history.of(chosen));
  text($("note-decisions"), chosen === null ? "all policies" : chosen);
  latency.update(history.latency);
  text($("now-admitted"), rate(present(admitted)));
  text($("now-denied"), rate(present(denied)));
  text($("now-waiting"), count(answer.waiting));
  text($("now-median"), micros(latest(history.latency[0])));
  text($("now-rare"), micros(latest(history.latency[1])));
  key.hear(answer.blocks);
  panels.choices(answer);
  panels.policies(answer, history, chosen, choose);
  panels.near(answer, key.open);
  panels.denials(answer, key.open);
  panels.state(answer);
  parts.budgets(answer.panels.budgets);
  parts.sources(answer.panels.sources);
  parts.swarm(answer.panels.swarm, answer.at);
  footer(answer);
}

function choose(policy) {
  chosen = policy;
  show(shown);
}

function footer({ process, at }) {
  const several = process.workers > 1 ? `, one of ${process.workers}: the figures are its own` : "";
  text($("process"), `tidegate ${process.version} · process ${process.id}${several} · up ${duration((at - process.since) / 1000)}`);
}

function health(state, words) {
  $("health").dataset.state = state;
  text($("health-text"), words);
}

function notice(words) {
  text($("notice"), words);
}

// ---- asking ---------------------------------------------------------------------------------------------------------

async function look() {
  let answer = await get(`/v1/overview${history.query}`);
  if (!history.take(answer)) {
    answer = await get("/v1/overview");
    history.take(answer);
  }
  seen = Date.now();
  show(answer);
  const lost = answer.store.lost;
  health(lost ? "bad" : "good", lost ? "store lost" : "live");
  notice(answer.rules.refused ? `The file is refused, the former rules stay in force: ${answer.rules.refused}` : "");
}

async function turn() {
  if (asking || waiting || document.hidden) return;
  asking = true;
  try {
    await Promise.all([look(), key.refresh()]);
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (problem.wantsToken) askToken(problem.message);
    else {
      health("bad", "no answer");
      notice(`${problem.message}${seen ? `; these figures are of ${clock(seen)}` : ""}; trying again`);
    }
  } finally {
    asking = false;
  }
}

async function run() {
  for (;;) {
    const began = performance.now();
    try {
      await turn();
    } finally {
      await new Promise((wake) => setTimeout(wake, Math.max(100, PERIOD - (performance.now() - began))));
    }
  }
}

// ---- token ----------------------------------------------------------------------------------------------------------

function askToken(why) {
  waiting = !seen;
  if (waiting) health("wait", "needs a token");
  text($("token-why"), why);
  if (!$("token").open) $("token").showModal();
  $("token-value").focus();
}

function setUpToken() {
  $("token-open").addEventListener("click", () => askToken(token() ? "A token is in use." : "No token is in use."));
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = $("token-value").value.trim();
    if (!/^[!-~]+$/.test(typed)) {
      text($("token-why"), "A token has printable ASCII characters only, and no spaces.");
      return;
    }
    keep(typed);
    begin();
  });
  $("token-forget").addEventListener("click", () => {
    keep("");
    begin();
  });
}

function begin() {
  $("token-value").value = "";
  waiting = false;
  $("token").close();
  turn();
}

async function start() {
  setUpToken();
  key.setUp(askToken);
  document.addEventListener("visibilitychange", turn);
  try {
    const access = await get("/dashboard/access.json");
    if (access.token && !token()) askToken("This service shows its figures to who has a token.");
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
  }
  run();
}

start();
