// The list of jobs.

import { ACTIONS, perform } from "./actions.js";
import { action, byId, fill, fillBars, fromTemplate, part, reconcile, setAttribute, setText, show } from "./dom.js";
import { clock, count, duration, exact, plural, rate } from "./format.js";
import { jobCounts } from "./figures.js";
import { announce } from "./messages.js";
import { describe, hasEnded, nameOf } from "./statuses.js";

export class Jobs {
  #rows = new Map();
  #jobs = new Map();
  #onDetails;

  constructor({ onDetails }) {
    this.#onDetails = onDetails;
  }

  job(id) {
    return this.#jobs.get(id);
  }

  update(state) {
    this.#announceChanges(state.jobs);
    this.#jobs = new Map(state.jobs.map((job) => [job.id, job]));
    show(byId("jobs-loading"), false);
    show(byId("no-jobs"), state.jobs.length === 0);
    jobCounts(state.job_counts);
    reconcile(byId("job-list"), [...this.#jobs.keys()], this.#rows, (id) => this.#create(id));
    for (const job of state.jobs) fillRow(this.#rows.get(job.id), job, state.at);
    const all = Object.values(state.job_counts).reduce((sum, number) => sum + number, 0);
    show(byId("more-jobs"), all > state.jobs.length);
    setText(byId("more-jobs"), `${exact(all - state.jobs.length)} older ones are listed by GET /v1/batches.`);
  }

  #create(id) {
    const row = fromTemplate("job");
    action(row, "details").addEventListener("click", () => this.#onDetails(id));
    for (const name of Object.keys(ACTIONS)) {
      const button = action(row, name);
      button.addEventListener("click", () => {
        if (button.ariaDisabled !== "true") perform(name, this.#jobs.get(id), button);
      });
    }
    return row;
  }

  #announceChanges(jobs) {
    for (const job of jobs) {
      const before = this.#jobs.get(job.id);
      if (!before) continue;
      const now = describe(job).label;
      if (describe(before).label !== now) announce(`${nameOf(job)}: ${now}`);
    }
  }
}

function fillRow(row, job, now) {
  const name = nameOf(job);
  fillStatus(row, job);
  fill(row, {
    name,
    id: name === job.id ? "" : job.id,
    about: [job.parent_id && "retry", job.endpoint.replace("/v1/", ""), job.model].filter(Boolean).join(" · "),
    ...lines(job),
    ...pace(job, now),
    problem: job.problem ?? "",
  });
  action(row, "details").title = `Details of ${name}`;
  row.classList.toggle("cut-short", cutShort(job));
  fillProgress(row, job, name);
  for (const [each, { when }] of Object.entries(ACTIONS)) {
    const button = action(row, each);
    keepFocus(button, when(job), row);
    setAttribute(button, "aria-label", `${button.textContent}: ${name}`);
  }
}

/** Whether a job ended early: its lines that were never computed count as failed, and are shown as not completed. */
const cutShort = (job) => job.status === "expired" || job.status === "cancelled";

function lines(job) {
  const finished = `${count(job.completed + job.failed)} of ${plural(job.total, "line", "lines")}`;
  const failed = job.failed ? `${count(job.failed)} ${cutShort(job) ? "not completed" : "failed"}` : "";
  if (job.status === "failed") return { counts: "nothing was computed", failed: "" };
  if (job.status !== "validating") return { counts: finished, failed };
  return { counts: job.total ? `${count(job.total)} lines read` : "reading lines", failed: "" };
}

/** The badge of a status, in the list and in the details. */
export function fillStatus(root, job) {
  const { label, glyph, tone } = describe(job);
  fill(root, { status: label, glyph });
  setAttribute(part(root, "badge"), "data-tone", tone);
}

function fillProgress(row, job, name) {
  const bar = part(row, "progress");
  const whole = job.total ? job.progress : 0;
  const bad = job.total ? Math.min(whole, job.failed / job.total) : 0;
  fillBars(row, { done: whole - bad, bad });
  bar.classList.toggle("unknown", job.status === "validating");
  bar.classList.toggle("still", hasEnded(job) || job.paused);
  setAttribute(bar, "aria-label", `Progress of ${name}`);
  setAttribute(bar, "aria-valuenow", job.status === "validating" ? null : Math.floor(job.progress * 100));
}

/** When a job ends, or how long it took, and how fast it runs. */
function pace(job, now) {
  if (hasEnded(job)) {
    const ended = job.ended_at === null ? "" : `at ${clock(job.ended_at)}`;
    return { time: job.ended_at === null ? "" : `took ${duration(job.ended_at - job.created_at)}`, pace: ended };
  }
  const left = job.expires_at - now;
  const speed = job.lines_per_second ? `${rate(job.lines_per_second)} lines/s` : "";
  const known = job.eta_seconds !== null && !job.paused;
  return {
    time: known ? `${duration(job.eta_seconds)} left` : `${duration(now - job.created_at)} so far`,
    pace: (known && job.eta_seconds > left) || left < 600 ? `expires in ${duration(left)}` : speed,
  };
}

/** Show or hide a button. A button with the focus hands it on, so that the keyboard does not start at the top. */
function keepFocus(button, shown, row) {
  const loses = !shown && document.activeElement === button;
  show(button, shown);
  if (loses) action(row, "details").focus();
}
