// The dashboard: requests /v1/overview once a second and renders every panel from the response.

import { RequestError, get, readToken, saveToken } from "./api.js";
import { Chart } from "./charts.js";
import { byId, setText } from "./dom.js";
import { formatCount, formatDuration, formatMicroseconds, formatRate, formatTime } from "./format.js";
import { History, currentRate, latestValue } from "./history.js";
import * as keyDialog from "./key_dialog.js";
import { COMPONENT_PANELS } from "./component_panels.js";
import { PanelViews } from "./panel_view.js";
import * as panels from "./panels.js";

const POLL_INTERVAL = 1000; // milliseconds
const MIN_PAUSE = 100; // milliseconds between two requests
const history = new History();
const facePanels = new PanelViews(byId("face-panels"), COMPONENT_PANELS);
let selectedPolicy = null; // the only policy in the chart; null: all policies
let lastOverview = null;
let lastResponseAt = 0; // milliseconds since 1970
let waitingForToken = false;
let requesting = false; // two requests at once would return the same seconds twice

const decisionChart = new Chart(byId("chart-decisions"), byId("legend-decisions"), [
  { name: "admitted", title: "admitted", filled: true },
  { name: "denied", title: "denied" },
  { name: "waiting", title: "waiting" },
], formatRate, "Decisions per second");
const latencyChart = new Chart(byId("chart-latency"), byId("legend-latency"), [
  { name: "median", title: "median", filled: true },
  { name: "p99", title: "p99" },
], formatMicroseconds, "Latency");

function render(overview) {
  lastOverview = overview;
  const totals = history.totals();
  const [admitted, denied] = totals;
  if (!history.policies.has(selectedPolicy)) selectedPolicy = null;
  decisionChart.update(selectedPolicy === null ? totals : history.policy(selectedPolicy));
  setText(byId("note-decisions"), selectedPolicy === null ? "all policies" : selectedPolicy);
  latencyChart.update(history.latency);
  setText(byId("now-admitted"), formatRate(currentRate(admitted)));
  setText(byId("now-denied"), formatRate(currentRate(denied)));
  setText(byId("now-waiting"), formatCount(overview.waiting));
  setText(byId("now-median"), formatMicroseconds(latestValue(history.latency[0])));
  setText(byId("now-p99"), formatMicroseconds(latestValue(history.latency[1])));
  keyDialog.setBlocks(overview.blocks);
  panels.renderSearchPolicies(overview);
  panels.renderPolicies(overview, history, selectedPolicy, selectPolicy);
  panels.renderNearLimit(overview, keyDialog.open);
  panels.renderDenials(overview, keyDialog.open);
  panels.renderState(overview);
  facePanels.update(overview.panels, overview.at);
  renderFooter(overview);
}

function selectPolicy(policy) {
  selectedPolicy = policy;
  render(lastOverview);
}

function renderFooter({ process, at }) {
  const workers = process.workers > 1 ? ` with ${process.workers} workers` : "";
  setText(byId("process"), `tidegate ${process.version} · process ${process.id}${workers} · up ${formatDuration((at - process.since) / 1000)}`);
}

function setHealth(state, label) {
  byId("health").dataset.state = state;
  setText(byId("health-text"), label);
}

function setNotice(message) {
  setText(byId("notice"), message);
}

// ---- polling --------------------------------------------------------------------------------------------------------

async function updateOverview() {
  let overview = await get(`/v1/overview${history.query}`);
  if (!history.add(overview)) {
    overview = await get("/v1/overview");
    history.add(overview);
  }
  lastResponseAt = Date.now();
  render(overview);
  const lost = overview.store.lost;
  setHealth(lost ? "bad" : "good", lost ? "store down" : "live");
  const error = overview.rules.error;
  setNotice(error ? `The configuration file is invalid, the previous configuration stays active: ${error}` : "");
}

async function update() {
  if (requesting || waitingForToken || document.hidden) return;
  requesting = true;
  try {
    await Promise.all([updateOverview(), keyDialog.refresh()]);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (error.needsToken) openTokenDialog(error.message);
    else {
      setHealth("bad", "no response");
      setNotice(`${error.message}${lastResponseAt ? `; the values are from ${formatTime(lastResponseAt)}` : ""}; retrying`);
    }
  } finally {
    requesting = false;
  }
}

async function poll() {
  for (;;) {
    const started = performance.now();
    try {
      await update();
    } finally {
      await new Promise((resolve) => setTimeout(resolve, Math.max(MIN_PAUSE, POLL_INTERVAL - (performance.now() - started))));
    }
  }
}

// ---- token ----------------------------------------------------------------------------------------------------------

function openTokenDialog(message) {
  waitingForToken = !lastResponseAt;
  if (waitingForToken) setHealth("wait", "token required");
  setText(byId("token-message"), message);
  if (!byId("token").open) byId("token").showModal();
  byId("token-value").focus();
}

function setUpTokenDialog() {
  byId("token-open").addEventListener("click", () => openTokenDialog(readToken() ? "A token is set." : "No token is set."));
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = byId("token-value").value.trim();
    if (!/^[!-~]+$/.test(value)) {
      setText(byId("token-message"), "A token consists of printable ASCII characters without spaces.");
      return;
    }
    saveToken(value);
    closeTokenDialog();
  });
  byId("token-forget").addEventListener("click", () => {
    saveToken("");
    closeTokenDialog();
  });
}

function closeTokenDialog() {
  byId("token-value").value = "";
  waitingForToken = false;
  byId("token").close();
  update();
}

async function start() {
  setUpTokenDialog();
  keyDialog.setUp(openTokenDialog);
  document.addEventListener("visibilitychange", update);
  try {
    const access = await get("/dashboard/access.json");
    if (access.token && !readToken()) openTokenDialog("This service requires a token.");
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
  }
  poll();
}

start();
