// The API key: asked for when the server wants one, kept in this tab's sessionStorage and nowhere else.

import { action, byId, setText, show } from "./dom.js";

const NAME = "batchwright.key";
/** Name of an event of the window. */
export const KEY_GIVEN = "batchwright-key-given";

export const currentKey = () => sessionStorage.getItem(NAME);

let asking = null;

/** Ask for a key; callers at the same time share one dialog. False: none was given. */
export function askForKey() {
  asking ??= ask().finally(() => {
    asking = null;
  });
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  setText(byId("key-wrong"), currentKey() ? "The service did not accept this key." : "");
  sessionStorage.removeItem(NAME);
  showForget();
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

const showForget = () => show(byId("forget-key"), currentKey() !== null);

export function connectKey() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key-input").value.trim();
    if (!key) return;
    if (!/^[\x21-\x7e]+$/.test(key)) {
      setText(byId("key-wrong"), "A key has only letters, digits and signs, without blanks.");
      return;
    }
    sessionStorage.setItem(NAME, key);
    showForget();
    dialog.close("given");
    window.dispatchEvent(new Event(KEY_GIVEN));
  });
  action(dialog, "later").addEventListener("click", () => dialog.close(""));
  byId("forget-key").addEventListener("click", () => {
    sessionStorage.removeItem(NAME);
    location.reload();
  });
  showForget();
}
