// Block, unblock and reset: each asks once, with a reason and a name for the audit log.

import { RequestError, post } from "./api.js";
import { byId, setText } from "./dom.js";
import { formatKey } from "./format.js";

const ACTOR_KEY = "tidegate-actor";
const ACTIONS = {
  block: { title: (key, policy) => `Block ${key} in ${policy}?`, meaning: "Every call of this key is denied, whatever its limits, in all processes that use the store.", yes: "Block" },
  unblock: { title: (key, policy) => `Unblock ${key} in ${policy}?`, meaning: "Its limits apply again.", yes: "Unblock" },
  reset: { title: (key, policy) => `Reset ${key} in ${policy}?`, meaning: "Its usage of all limits becomes zero: its next calls are admitted.", yes: "Reset" },
};
let pending = null; // { verb, policy, key, done }
let openTokenDialog = () => {};

/** Ask, and then send the request; `done` is called after it. */
export function confirmAction(verb, policy, key, done = () => {}) {
  pending = { verb, policy, key, done };
  const { title, meaning, yes } = ACTIONS[verb];
  setText(byId("confirm-title"), title(formatKey(key), policy));
  setText(byId("confirm-meaning"), meaning);
  setText(byId("confirm-yes"), yes);
  setText(byId("confirm-status"), "");
  byId("confirm-duration").hidden = verb !== "block";
  byId("confirm-reason").value = "";
  try {
    byId("confirm-actor").value = sessionStorage.getItem(ACTOR_KEY) ?? "";
  } catch {
    // The browser blocks sessionStorage: the name is typed each time.
  }
  byId("confirm").showModal();
  byId("confirm-yes").focus();
}

async function send() {
  const { verb, policy, key, done } = pending;
  const [reason, actor] = [byId("confirm-reason").value.trim(), byId("confirm-actor").value.trim()];
  try {
    if (actor) sessionStorage.setItem(ACTOR_KEY, actor);
  } catch {
    // As above.
  }
  const seconds = Number(byId("confirm-seconds").value);
  byId("confirm-yes").disabled = true;
  try {
    await post(verb, { policy, key, ...(reason ? { reason } : {}), ...(actor ? { actor } : {}), ...(verb === "block" ? { seconds } : {}) });
    byId("confirm").close();
    done();
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    setText(byId("confirm-status"), error.message);
    byId("confirm-status").dataset.state = "bad";
    if (error.needsToken) openTokenDialog("This action requires the admin token.");
  } finally {
    byId("confirm-yes").disabled = false;
  }
}

/** Register the event handlers of the dialog. */
export function setUpConfirm(onTokenNeeded) {
  openTokenDialog = onTokenNeeded;
  byId("confirm-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
}
