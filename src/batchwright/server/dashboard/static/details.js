// The details of one job, in a sheet beside the page.

import { call, open } from "./api.js";
import { action, byId, fill, make, part, show } from "./dom.js";
import { exact, moment, plural, share } from "./format.js";
import { fillStatus } from "./jobs.js";
import { nameOf } from "./statuses.js";

const FAILURES_SHOWN = 20;
const TIMES = [
  ["Created", "created_at"],
  ["Started", "in_progress_at"],
  ["All lines finished", "finalizing_at"],
  ["Cancel asked for", "cancelling_at"],
  ["Completed", "completed_at"],
  ["Failed validation", "failed_at"],
  ["Expired", "expired_at"],
  ["Cancelled", "cancelled_at"],
  ["Expires", "expires_at"],
];

export class Details {
  #dialog = byId("details");
  #job = null;
  #seen = ""; // the status of which the details were fetched

  constructor() {
    action(this.#dialog, "close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // beside the sheet
    });
    this.#dialog.addEventListener("close", () => {
      this.#job = null;
    });
  }

  open(job) {
    this.#seen = "";
    fill(this.#dialog, { note: "Loading…" });
    this.#problems("problem", []);
    this.#failures([]);
    this.#show(job, null);
    this.#dialog.showModal();
    this.#dialog.scrollTop = 0;
  }

  /** Update the details while the job is shown. */
  update(state) {
    const job = this.#job && state.jobs.find((each) => each.id === this.#job.id);
    if (job) this.#show(job, null);
  }

  #show(job) {
    this.#job = job;
    fill(this.#dialog, { name: nameOf(job), id: job.id });
    fillStatus(this.#dialog, job);
    pairs(part(this.#dialog, "lines"), [
      ["In all", exact(job.total)],
      ["Succeeded", exact(job.completed)],
      ["Failed", exact(job.failed)],
      ["Finished", share(job.progress)],
    ]);
    const status = `${job.status} ${job.paused}`;
    if (this.#seen === status) return;
    this.#seen = status;
    this.#fetch(job);
  }

  async #fetch(job) {
    try {
      // For a simple job there is nothing to fetch beyond what the list knows.
      const batch = job.kind === "batch" ? await call("GET", `/v1/batches/${encodeURIComponent(job.id)}`) : null;
      const failures = job.error_file_id ? await firstFailures(job.error_file_id) : [];
      if (this.#job?.id !== job.id) return;
      this.#about(job, batch ?? job);
      this.#problems("problem", (batch?.errors?.data ?? []).map(problemText));
      this.#failures(failures);
      fill(this.#dialog, { note: "" });
    } catch (error) {
      if (this.#job?.id === job.id) fill(this.#dialog, { note: `The details could not be read: ${error.message}` });
    }
  }

  #about(job, batch) {
    const usage = batch.usage ?? {};
    pairs(part(this.#dialog, "tokens"), [
      ["Input", exact(usage.input_tokens ?? job.input_tokens)],
      ["of which cached", exact(usage.input_tokens_details?.cached_tokens)],
      ["Output", exact(usage.output_tokens ?? job.output_tokens)],
    ]);
    pairs(part(this.#dialog, "times"), TIMES.filter(([, name]) => batch[name]).map(
      ([label, name]) => [label, moment(batch[name])]));
    pairs(part(this.#dialog, "about"), [
      ["Retry of", job.parent_id],
      ["Endpoint", job.endpoint],
      ["Model", job.model],
      ["Window", batch.completion_window],
      ["Input file", job.input_file_id],
      ["Output file", job.output_file_id],
      ["Error file", job.error_file_id],
      ...Object.entries(batch.metadata ?? {}).map(([name, value]) => [`metadata: ${name}`, value]),
    ].filter(([, value]) => value));
  }

  #problems(name, texts) {
    show(part(this.#dialog, `${name}s`), texts.length > 0);
    part(this.#dialog, `${name}-list`).replaceChildren(...texts.map((text) => make("li", {}, text)));
  }

  #failures(texts) {
    const some = texts.length >= FAILURES_SHOWN && this.#job.failed > FAILURES_SHOWN;
    fill(this.#dialog, {
      "failures-title": some ? `The first ${FAILURES_SHOWN} of ${plural(this.#job.failed, "failed line", "failed lines")}` : "Failed lines",
    });
    this.#problems("failure", texts);
  }
}

function pairs(list, entries) {
  list.replaceChildren(...entries.map(([label, value]) => {
    return make("div", {}, make("dt", {}, label), make("dd", {}, String(value)));
  }));
}

/** An entry of a batch's `errors`. */
export function problemText({ line, message, code }) {
  const text = message || code || "unknown reason";
  return line ? `Line ${exact(line)}: ${text}` : text;
}

/** The beginning of an error file, which is not fetched further. */
async function firstFailures(fileId) {
  const response = await open(`/v1/files/${encodeURIComponent(fileId)}/content`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (let lines = 0; lines < FAILURES_SHOWN;) {
      const { done, value } = await reader.read();
      if (done) break;
      text += value;
      lines += value.split("\n").length - 1;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  return text.split("\n").filter(Boolean).slice(0, FAILURES_SHOWN).map(failureText);
}

function failureText(line) {
  const failed = JSON.parse(line);
  const error = failed.error ?? failed.response?.body?.error ?? {};
  const number = /_(\d+)$/.exec(failed.id ?? "")?.[1];
  const where = number ? `Line ${exact(Number(number))}, ${failed.custom_id}` : failed.custom_id;
  const status = failed.response?.status_code;
  return `${where}: ${error.message ?? error.code ?? "unknown reason"}${status ? ` (${status})` : ""}`;
}
