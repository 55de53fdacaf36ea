// Messages to the reader: results of actions in sight, changes of state to screen readers.

import { byId, make } from "./dom.js";

/** Tell screen readers only, politely, of a change of state, never of figures. */
export function announce(text) {
  const line = make("p", {}, text);
  const announcer = byId("announcer");
  announcer.append(line);
  while (announcer.childElementCount > 5) announcer.firstElementChild.remove();
}

const SHOWN_FOR = 6000;

/** A message at the foot of the page; a failure stays until it is dismissed. */
export function showMessage(text, { failed = false } = {}) {
  const close = make("button", { type: "button", class: "quiet" }, "Dismiss");
  const message = make("div", { class: failed ? "message bad" : "message", role: failed ? "alert" : "status" });
  message.append(make("p", {}, text), close);
  close.addEventListener("click", () => message.remove());
  byId("messages").append(message);
  if (!failed) setTimeout(() => message.remove(), SHOWN_FOR);
}
