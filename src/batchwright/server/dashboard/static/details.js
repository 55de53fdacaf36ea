// The details of one job, in a sheet beside the page.

import { call } from "./api.js";
import { action, byId, fill, fromTemplate, make, part, show } from "./dom.js";
import { duration, exact, moment, plural, share } from "./format.js";
import { fillStatus } from "./jobs.js";
import { Lines } from "./lines.js";
import { nameOf } from "./statuses.js";

const GROUPED_EVERY = 5000; // milliseconds, while more lines fail
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
  #seen = ""; // the status for which the details were fetched
  #lines = new Lines(this.#dialog);
  #grouped = 0; // failed lines when the errors were fetched, and when that was
  #groupedAt = -Infinity;

  constructor() {
    action(this.#dialog, "close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // beside the sheet
    });
    this.#dialog.addEventListener("close", () => {
      this.#job = null;
      this.#lines.close();
    });
  }

  open(job) {
    this.#seen = "";
    fill(this.#dialog, { note: "Loading…" });
    this.#problems([]);
    this.#groups({ data: [] });
    this.#grouped = 0;
    this.#groupedAt = -Infinity;
    this.#show(job);
    show(part(this.#dialog, "preview"), job.status !== "failed");
    if (job.status !== "failed") this.#lines.open(job);
    this.#dialog.showModal();
    this.#dialog.scrollTop = 0;
  }

  /** Update the details while the job is shown. */
  update(state) {
    const job = this.#job && state.jobs.find((each) => each.id === this.#job.id);
    if (!job) return;
    this.#show(job);
    this.#lines.update(job);
  }

  #show(job) {
    this.#job = job;
    this.#countErrors(job);
    fill(this.#dialog, { name: nameOf(job), id: job.id });
    fillStatus(this.#dialog, job);
    pairs(part(this.#dialog, "lines"), [
      ["In all", exact(job.total)],
      ["Succeeded", exact(job.completed)],
      ["Failed", exact(job.failed)],
      ["Share of the work", share(job.progress)],
    ]);
    pairs(part(this.#dialog, "plan"), [
      ["Shared with earlier prompts", share(job.shared)],
      ["Found in the cache", share(job.cached)],
      ["Least time on this machine", duration(job.least_seconds)],
      ["Share of the time so far", share(job.share_of_time)],
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
      if (this.#job?.id !== job.id) return;
      this.#about(job, batch ?? job);
      this.#problems((batch?.errors?.data ?? []).map(problemText));
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

  #problems(texts) {
    show(part(this.#dialog, "problems"), texts.length > 0);
    part(this.#dialog, "problem-list").replaceChildren(...texts.map((text) => make("li", {}, text)));
  }

  /** Fetch the errors by code when more lines have failed, but not at each state. */
  async #countErrors(job) {
    if (job.failed === this.#grouped || performance.now() - this.#groupedAt < GROUPED_EVERY) return;
    [this.#grouped, this.#groupedAt] = [job.failed, performance.now()];
    try {
      const errors = await call("GET", `/v1/batches/${encodeURIComponent(job.id)}/errors`);
      if (this.#job?.id === job.id) this.#groups(errors);
    } catch {
      this.#grouped = 0; // next time; the note says why nothing can be read
    }
  }

  #groups({ data, counted, has_more: more }) {
    show(part(this.#dialog, "failures"), data.length > 0);
    const title = more ? `Errors of the first ${exact(counted)} failed lines, by code` : "Failed lines, by code";
    fill(this.#dialog, { "failures-title": title });
    part(this.#dialog, "failure-list").replaceChildren(...data.map(({ code, count, example }) => {
      const row = fromTemplate("group");
      const message = example.error?.message ?? "unknown reason";
      fill(row, { code, count: plural(count, "line", "lines"), example: `Such as line ${exact(example.line)}, ${example.custom_id}: ${message}` });
      return row;
    }));
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
