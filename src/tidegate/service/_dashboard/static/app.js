// The dashboard: requests /v1/overview once a second and renders every panel from the response.

import { RequestError, get, readToken } from "./api.js";
import { ChartGroup } from "./chart_group.js";
import { Chart } from "./charts.js";
import { COMPONENT_PANELS } from "./component_panels.js";
import { confirmAction, setUpConfirm } from "./confirm.js";
import { byId, createElement, setAttribute, setText } from "./dom.js";
import { formatCount, formatDuration, formatMicroseconds, formatPercent, formatRange, formatRate, formatTime, parseKey, sameKey } from "./format.js";
import { LiveHistory, RangeHistory, currentRate, latestValue } from "./history.js";
import { closeKey, refreshKey, setUpKeyPage } from "./key_page.js";
import { change, onChange, state } from "./page_state.js";
import { PanelViews } from "./panel_view.js";
import * as panels from "./panels.js";
import { renderStatus } from "./status_line.js";
import { openTokenDialog, setUpTokenDialog } from "./token_dialog.js";
import { renderTop, setUpTop } from "./top_denied.js";

const POLL_INTERVAL = 1000; // milliseconds
const MIN_PAUSE = 100; // milliseconds between two requests
const COPIED_TIME = 1500; // milliseconds
const live = new LiveHistory();
const ranges = new RangeHistory();
const facePanels = new PanelViews(byId("face-panels"), COMPONENT_PANELS);
let lastOverview = null;
let lastResponseAt = 0; // milliseconds since 1970
let waitingForToken = false;
let requesting = false; // two requests at once would return the same seconds twice

const charts = new ChartGroup((from, to) => change({ from, to }));
new Chart(charts, byId("chart-decisions"), byId("legend-decisions"), {
  title: "Decisions per second",
  format: formatRate,
  series: [
    { name: "admitted", title: "admitted", stacked: true },
    { name: "denied", title: "denied", stacked: true },
    { name: "waiting", title: "waiting" },
  ],
});
new Chart(charts, byId("chart-latency"), byId("legend-latency"), {
  title: "Latency",
  format: formatMicroseconds,
  log: true,
  series: [{ name: "median", title: "median" }, { name: "p99", title: "p99" }],
});

// ---- rendering ------------------------------------------------------------------------------------------------------

const openKey = (key) => change({ key });
const selectPolicy = (policy) => change({ policy });
const confirm = (verb, policy, key) => confirmAction(verb, policy, key, update);
const actions = { openKey, selectPolicy, confirm, copy };

function render(overview, columns) {
  lastOverview = overview;
  const { policy } = state();
  const isShown = (item) => policy === null || item.policy === policy;
  renderStatus(overview, actions);
  renderFilter(overview, columns);
  renderStats(overview, policy);
  charts.update(columns);
  renderTop(columns, isShown, overview.blocks, actions);
  panels.renderPolicies(overview, live, policy, selectPolicy);
  panels.renderNearLimit(overview, isShown, openKey);
  panels.renderDenials(overview, isShown, openKey);
  panels.renderAudit(overview, isShown, openKey);
  panels.renderHints(overview);
  panels.renderState(overview);
  facePanels.update(overview.panels, columns);
  renderFooter(overview);
  byId("main").dataset.loading = "no";
}

function renderFilter(overview, { from, to }) {
  const { range, from: zoomedFrom, policy } = state();
  const zoomed = zoomedFrom !== null;
  panels.renderPolicyFilter(overview, policy);
  if (byId("range").value !== range) byId("range").value = range;
  byId("zoom-out").hidden = !zoomed;
  const unknown = policy !== null && overview.policies.every(({ name }) => name !== policy);
  setText(byId("filter-note"), [zoomed && formatRange(from, to), unknown && `There is no policy ${policy}.`].filter(Boolean).join(". "));
  setText(byId("note-decisions"), policy ?? "all policies");
  setText(byId("note-latency"), policy === null ? "" : "all policies"); // it is not measured by policy
}

function renderStats(overview, policy) {
  const [admitted, denied] = (policy === null ? live.total : live.policy(policy)).map(currentRate);
  const waiting = policy === null ? overview.waiting : overview.policies.find(({ name }) => name === policy)?.waiting ?? 0;
  setText(byId("now-admitted"), formatRate(admitted));
  setText(byId("now-denied"), formatRate(denied));
  setText(byId("now-unit"), denied > 0 ? "per second now, " : "");
  setText(byId("now-share"), denied > 0 ? `${formatPercent(denied, admitted + denied)} of calls` : "per second now");
  setAttribute(byId("stat-denied"), "data-level", denied > 0.25 * (admitted + denied) && denied > 0 ? "bad" : denied > 0 ? "some" : "none");
  setText(byId("now-waiting"), formatCount(waiting));
  setText(byId("now-median"), formatMicroseconds(latestValue(live.latency[0])));
  setText(byId("now-p99"), formatMicroseconds(latestValue(live.latency[1])));
}

function renderFooter({ process, at }) {
  const workers = process.workers > 1 ? ` with ${process.workers} workers` : "";
  setText(byId("process"), `tidegate ${process.version} · process ${process.id}${workers} · up ${formatDuration((at - process.since) / 1000)}`);
}

function setConnection(connectionState, label) {
  byId("connection").dataset.state = connectionState;
  setText(byId("connection-text"), label);
}

function setNotice(message) {
  setText(byId("notice"), message);
}

/** Copy text to the clipboard, and say so in the button. */
async function copy(value, button) {
  button.dataset.label ??= button.textContent; // a second click would find the label of the first
  const copied = await writeClipboard(value);
  button.textContent = copied ? "Copied" : "Not allowed";
  setText(byId("announcement"), copied ? `Copied ${value}` : "The browser does not allow copying");
  setTimeout(() => { button.textContent = button.dataset.label; }, COPIED_TIME);
}

/** Without HTTPS, browsers have no clipboard API: then the text is copied from an input. */
async function writeClipboard(value) {
  try {
    await navigator.clipboard.writeText(value);
    return true;
  } catch {
    const focused = document.activeElement;
    const input = createElement("input", { class: "off-screen", "aria-hidden": "true", tabindex: "-1" });
    document.body.append(input);
    input.value = value;
    input.focus();
    input.select();
    const copied = document.execCommand("copy");
    input.remove();
    focused?.focus();
    return copied;
  }
}

// ---- polling --------------------------------------------------------------------------------------------------------

async function updateOverview() {
  let overview = await get(`v1/overview${live.query}`);
  if (!live.add(overview)) {
    overview = await get("v1/overview");
    live.add(overview);
  }
  lastResponseAt = Date.now();
  const columns = await ranges.read(state(), overview.at) ?? live.columns(overview, state().policy);
  render(overview, columns);
  await refreshKey(overview.at);
  setConnection("good", "live");
  setNotice("");
}

async function update() {
  if (requesting || waitingForToken || document.hidden) return;
  requesting = true;
  try {
    await updateOverview();
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (error.needsToken) requestToken(readToken() ? "The service does not accept this token." : "This service requires a token.");
    else {
      setConnection("bad", "no response");
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

function requestToken(message) {
  waitingForToken = !lastResponseAt;
  if (waitingForToken) setConnection("wait", "token required");
  openTokenDialog(message);
}

// ---- start ----------------------------------------------------------------------------------------------------------

function setUpControls() {
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const input = byId("search-key").value.trim();
    if (input) openKey(parseKey(input));
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea, dialog");
    if (event.key === "Escape" && !typing && state().key !== null) closeKey();
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
    event.preventDefault();
    byId("search-key").focus();
  });
  byId("range").addEventListener("change", () => change({ range: byId("range").value, from: null, to: null }));
  byId("policy").addEventListener("change", () => change({ policy: byId("policy").value || null }));
  byId("zoom-out").addEventListener("click", () => change({ from: null, to: null }));
  byId("share").addEventListener("click", () => copy(location.href, byId("share")));
}

async function start() {
  setUpTokenDialog(() => {
    waitingForToken = false;
    update();
  });
  setUpConfirm(openTokenDialog);
  setUpKeyPage(copy);
  setUpTop();
  setUpControls();
  let shownKey = state().key;
  onChange(({ key }) => {
    const isNewKey = !sameKey(key, shownKey);
    shownKey = key;
    if (lastOverview === null) return;
    if (state().range === "5m" && state().from === null) render(lastOverview, live.columns(lastOverview, state().policy));
    refreshKey(lastOverview.at).catch(() => {});
    if (key !== null && isNewKey) {
      byId("key-page").scrollIntoView({ block: "start" });
      byId("key-title").focus({ preventScroll: true });
    }
    update();
  });
  document.addEventListener("visibilitychange", update);
  try {
    const access = await get("dashboard/access.json");
    if (access.token && !readToken()) requestToken("This service requires a token.");
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
  }
  poll();
}

start();
