// Puts the page together: one stream of states in, every part of the page updated from each.

import { action, byId, fill, setText, show } from "./dom.js";
import { Details } from "./details.js";
import { Figures } from "./figures.js";
import { clock } from "./format.js";
import { Jobs } from "./jobs.js";
import { KEY_GIVEN, askForKey, connectKey } from "./key.js";
import { Live } from "./live.js";
import { announce } from "./messages.js";
import { Shared } from "./shared.js";
import { connectTheme } from "./theme.js";
import { Uploads, connectExample } from "./upload.js";

let latest = null;
let link = "connecting";

const figures = new Figures();
const shared = new Shared();
const details = new Details();
const jobs = new Jobs({ onDetails: (id) => details.open(jobs.job(id)) });
const uploads = new Uploads();
const showExample = connectExample(uploads, () => latest?.models[0] ?? "…");
const live = new Live({ onState, onLink });

function onState(state) {
  latest = state;
  for (const each of [figures, shared, jobs, details, uploads]) each.update(state);
  showExample();
  showLink();
}

function onLink(now, reason) {
  const before = link;
  link = now;
  document.documentElement.dataset.link = now;
  showLink();
  show(byId("banner"), now !== "live");
  if (now === "live") {
    if (before === "lost") announce("Connected again.");
    return;
  }
  const as = latest ? `The figures are those of ${clock(latest.at)}.` : "";
  const locked = now === "locked";
  fill(byId("banner"), {
    title: locked ? "An API key is needed." : "Reconnecting:",
    text: locked ? as : `${reason}. ${as}`,
  });
  setText(action(byId("banner"), "banner"), locked ? "Enter a key" : "Try now");
  if (before !== now) announce(locked ? "An API key is needed." : "The connection to the server is lost. Reconnecting.");
}

function showLink() {
  const trouble = { connecting: "Connecting…", lost: "Reconnecting…", locked: "Key needed" }[link];
  let text = trouble ?? "Live";
  let tone = trouble ? "bad" : "good";
  if (link === "connecting") tone = "off";
  if (link === "live" && latest.draining) [text, tone] = ["Stopping: takes no new work", "warn"];
  else if (link === "live" && !latest.ready) [text, tone] = ["Not ready for work", "warn"];
  fill(byId("link"), { link: text });
  byId("link").dataset.tone = tone;
}

action(byId("banner"), "banner").addEventListener("click", () => {
  if (link === "locked") askForKey();
  else live.retry();
});
for (const name of ["online", KEY_GIVEN]) window.addEventListener(name, () => live.retry());
connectTheme(byId("theme"));
connectKey();
live.run();
