// The dialog for the token.

import { readToken, saveToken } from "./api.js";
import { byId, setText } from "./dom.js";

export function openTokenDialog(message) {
  setText(byId("token-message"), message);
  if (!byId("token").open) byId("token").showModal();
  byId("token-value").focus();
}

/** Register the event handlers; `onChange` is called when the token has changed. */
export function setUpTokenDialog(onChange) {
  const close = () => {
    byId("token-value").value = "";
    byId("token").close();
    onChange();
  };
  byId("token-open").addEventListener("click", () => openTokenDialog(readToken() ? "A token is set." : "No token is set."));
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = byId("token-value").value.trim();
    if (!/^[!-~]+$/.test(value)) {
      setText(byId("token-message"), "A token consists of printable ASCII characters without spaces.");
      return;
    }
    saveToken(value);
    close();
  });
  byId("token-forget").addEventListener("click", () => {
    saveToken("");
    close();
  });
}
