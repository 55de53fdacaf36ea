// Makes batches of files that are chosen or dropped: uploads them one after another, and follows their validation.

import { ApiError, NO_ANSWER, call, errorFrom, headers } from "./api.js";
import { problemText } from "./details.js";
import { action, byId, fill, fillBars, fromTemplate, make, part, setAttribute, setText, show } from "./dom.js";
import { inspect } from "./first-line.js";
import { bytes, exact, plural } from "./format.js";
import { askForKey } from "./key.js";
import { announce, showMessage } from "./messages.js";
import { focusOn, templateForm } from "./template-form.js";

const WINDOW = "24h";
const CHAT = "/v1/chat/completions";
const PROBLEMS_SHOWN = 50;

export class Uploads {
  #queue = Promise.resolve();
  #following = new Map(); // by the id of the batch

  constructor() {
    const input = byId("file-input");
    input.addEventListener("change", () => {
      this.add(input.files);
      input.value = "";
    });
    connectDrops((files) => this.add(files));
  }

  add(files) {
    for (const file of files) this.#add(new Item(file), file);
  }

  async #add(item, file) {
    try {
      const found = await inspect(file);
      // Of an array the service makes lines.
      if (found.kind === "requests") this.#enqueue(item, file, found.endpoint, found.array ? { endpoint: found.endpoint } : null);
      else item.ask(found, (options) => this.#enqueue(item, file, CHAT, options));
    } catch (error) {
      item.fail(error.message);
    }
  }

  #enqueue(item, file, endpoint, options) {
    item.say("Waiting for its turn…");
    this.#queue = this.#queue.then(() => this.#upload(item, file, endpoint, options));
  }

  /** Explain a refused batch where it was uploaded; an accepted one is in the list. */
  update(state) {
    for (const job of state.jobs) {
      const item = this.#following.get(job.id);
      if (!item || job.status === "validating") continue;
      this.#following.delete(job.id);
      if (job.status === "failed") this.#explain(item, job.id);
      else item.remove();
    }
  }

  async #upload(item, file, endpoint, options) {
    try {
      const made = await this.#input(item, file, options);
      item.say("Uploaded. Starting the batch…");
      const batch = await call("POST", "/v1/batches", {
        input_file_id: made.id, endpoint, completion_window: WINDOW, metadata: { name: file.name.slice(0, 512) },
      });
      item.say("Its lines are being checked…");
      this.#following.set(batch.id, item);
    } catch (error) {
      item.fail(error.message);
    }
  }

  /** The input of the batch: the file, or what the service makes of the table in it. */
  async #input(item, file, options) {
    const sent = await send(file, (share) => item.sending(share));
    if (options === null) return sent;
    item.say("Uploaded. Its rows become requests…");
    const path = `/v1/files/${encodeURIComponent(sent.id)}`;
    try {
      const { file: made, rows, skipped, first_skipped: first } = await call("POST", `${path}/requests`, options);
      if (skipped) {
        showMessage(`${file.name}: ${plural(skipped, "row has", "rows have")} nothing to put into the template, the first in line ${exact(first)}: left out, ${exact(rows)} are computed.`);
      }
      return made;
    } finally {
      call("DELETE", path).catch(() => {}); // it expires otherwise
    }
  }

  async #explain(item, id) {
    try {
      const batch = await call("GET", `/v1/batches/${encodeURIComponent(id)}`);
      item.fail("The service refused this file. Nothing of it is computed.", (batch.errors?.data ?? []).map(problemText));
    } catch (error) {
      item.fail(`The service refused this file; why could not be read: ${error.message}`);
    }
  }
}

class Item {
  #row = fromTemplate("upload");
  #form = null;
  #name;

  constructor(file) {
    this.#name = file.name;
    fill(this.#row, { name: file.name, size: bytes(file.size), said: "Waiting for its turn…" });
    setAttribute(part(this.#row, "progress"), "aria-label", `Upload of ${file.name}`);
    action(this.#row, "dismiss").addEventListener("click", () => {
      this.remove();
      byId("file-input").focus();
    });
    show(action(this.#row, "dismiss"), false);
    byId("uploads").append(this.#row);
  }

  say(text) {
    this.#row.classList.remove("bad");
    show(action(this.#row, "dismiss"), false);
    show(part(this.#row, "problems"), false);
    show(part(this.#row, "progress"), true);
    if (this.#form) show(this.#form, false);
    fill(this.#row, { said: text });
  }

  /** Ask how rows become prompts. After a failure the form comes back as it was filled in. */
  ask(found, onSubmit) {
    this.#form = templateForm(found, onSubmit);
    this.#row.append(this.#form);
    this.say(found.kind === "prompts" ? "It has prompts. How should they be answered?" : "It is a table. What should be asked about each row?");
    show(part(this.#row, "progress"), false);
    show(this.#form, true);
    show(action(this.#row, "dismiss"), true);
    focusOn(this.#form);
    announce(`${this.#name} is a table or has prompts: fill in the form to start the batch.`);
  }

  sending(share) {
    this.say(share < 1 ? `Uploading, ${Math.floor(share * 100)}%` : "Uploaded. The service is storing it…");
    fillBars(this.#row, { done: share });
    setAttribute(part(this.#row, "progress"), "aria-valuenow", Math.floor(share * 100));
  }

  fail(text, problems = []) {
    this.say(text);
    this.#row.classList.add("bad");
    if (this.#form) show(this.#form, true);
    show(part(this.#row, "progress"), false);
    show(action(this.#row, "dismiss"), true);
    const list = part(this.#row, "problems");
    list.replaceChildren(...problems.slice(0, PROBLEMS_SHOWN).map((problem) => make("li", {}, problem)));
    if (problems.length > PROBLEMS_SHOWN) list.append(make("li", {}, `and ${problems.length - PROBLEMS_SHOWN} more`));
    show(list, problems.length > 0);
    announce(`${this.#name}: ${text} ${problems[0] ?? ""}`);
  }

  remove() {
    this.#row.remove();
  }
}

/** POST /v1/files. With XMLHttpRequest, since fetch does not show how much has been sent. */
async function send(file, onProgress) {
  for (;;) {
    try {
      return await sendOnce(file, onProgress);
    } catch (error) {
      if (error.status !== 401 || !(await askForKey())) throw error;
    }
  }
}

function sendOnce(file, onProgress) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const request = new XMLHttpRequest();
  request.open("POST", "/v1/files");
  request.responseType = "json";
  for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
  return new Promise((resolve, reject) => {
    request.upload.addEventListener("progress", ({ loaded, total }) => onProgress(total ? loaded / total : 0));
    request.addEventListener("error", () => reject(new ApiError(0, `The upload broke off: ${NO_ANSWER}.`)));
    request.addEventListener("load", () => {
      if (request.status < 300) resolve(request.response);
      else reject(errorFrom(request.status, request.response));
    });
    request.send(form);
  });
}

/** Files may be dropped anywhere on the page. */
function connectDrops(onFiles) {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const hint = (shown) => show(byId("drop-hint"), shown);
  for (const name of ["dragenter", "dragover"]) {
    window.addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      hint(true);
    });
  }
  window.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) hint(false);
  });
  window.addEventListener("drop", (event) => {
    hint(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    onFiles(event.dataTransfer.files);
  });
}

/** The example in the empty list: an input file of a few lines for one of the models. */
export function connectExample(uploads, model) {
  const line = (id, prompt) => JSON.stringify({
    custom_id: id,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model: model(), messages: [{ role: "user", content: prompt }], max_tokens: 32 },
  });
  const prompts = ["What is a batch?", "Name three rivers.", "Write a line about rain."];
  byId("try-example").addEventListener("click", () => {
    const text = prompts.map((prompt, index) => `${line(`example-${index + 1}`, prompt)}\n`).join("");
    uploads.add([new File([text], "example.jsonl")]);
  });
  return () => setText(byId("example-line"), line("example-1", prompts[0]));
}
