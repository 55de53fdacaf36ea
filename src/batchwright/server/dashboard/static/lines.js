// Lines of one job with their prompts and answers: in pages, searched, by state.

import { open } from "./api.js";
import { action, byId, fill, fromTemplate, part, setText, show } from "./dom.js";
import { exact, plural } from "./format.js";

const PAGE = 20;
const SHORT = 400; // characters shown of a text until the whole is asked for
const PAUSE = 3000; // milliseconds between two looks at a page of a running job
const STATES = { pending: "waiting", suspect: "waiting", claimed: "being computed", succeeded: "", failed: "failed" };

export class Lines {
  #root;
  #job = null;
  #starts = [0]; // `after` of this page and of those before it
  #next = null;
  #shown = "";
  #whole = new Set();
  #fetching = null; // of the request under way
  #fetchedAt = 0;
  #fetchedFor = "";

  constructor(root) {
    this.#root = root;
    part(root, "find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#restart();
    });
    byId("find-state").addEventListener("change", () => this.#restart());
    action(root, "next").addEventListener("click", () => this.#turn(() => this.#starts.push(this.#next)));
    action(root, "previous").addEventListener("click", () => this.#turn(() => this.#starts.pop()));
  }

  open(job) {
    this.#job = job;
    part(this.#root, "find").reset();
    this.#restart();
  }

  close() {
    this.#job = null;
    this.#fetching?.abort();
    this.#fetching = null;
  }

  /** Look again when lines have finished since, but not at each state. */
  update(job) {
    if (this.#job?.id !== job.id) return;
    this.#job = job;
    const counts = `${job.status} ${job.completed} ${job.failed}`;
    const busy = this.#fetching !== null || performance.now() - this.#fetchedAt < PAUSE;
    if (counts !== this.#fetchedFor && !busy && byId("find-text").value === "") this.#fetch();
  }

  #restart() {
    this.#starts = [0];
    this.#whole.clear();
    this.#shown = "";
    part(this.#root, "line-list").replaceChildren();
    this.#hideButtons();
    fill(this.#root, { "lines-details": "Loading…" });
    this.#fetch();
  }

  #turn(move) {
    move();
    this.#hideButtons();
    this.#whole.clear();
    this.#fetch().then(() => part(this.#root, "find").scrollIntoView({ block: "start" }));
  }

  async #fetch() {
    this.#fetching?.abort();
    const fetching = new AbortController();
    this.#fetching = fetching;
    const job = this.#job;
    const form = new FormData(part(this.#root, "find"));
    this.#fetchedFor = `${job.status} ${job.completed} ${job.failed}`;
    try {
      const found = await this.#page(job, form.get("search").trim(), form.get("state"), fetching.signal);
      if (this.#fetching === fetching) this.#show(found);
    } catch (error) {
      if (this.#fetching !== fetching || error.name === "AbortError") return;
      part(this.#root, "line-list").replaceChildren();
      [this.#shown, this.#fetchedFor] = ["", ""]; // so that they are drawn, and asked for, again
      fill(this.#root, { "lines-details": error.status === 404 ? "The lines were removed with the files." : `The lines could not be read: ${error.message}` });
      this.#buttons(null);
    } finally {
      if (this.#fetching === fetching) {
        this.#fetching = null;
        this.#fetchedAt = performance.now();
      }
    }
  }

  /** One page. A search may need several requests for it, each of which looks at some thousand lines. */
  async #page(job, search, state, signal) {
    const found = [];
    let after = this.#starts.at(-1);
    do {
      const query = new URLSearchParams({ after, limit: PAGE - found.length });
      if (search) query.set("search", search);
      if (state) query.set("state", state);
      const response = await open(`/v1/batches/${encodeURIComponent(job.id)}/lines?${query}`, { signal });
      const page = await response.json();
      found.push(...page.data);
      after = page.next_after;
      if (search && after !== null && found.length < PAGE) {
        fill(this.#root, { "lines-details": `Searched ${exact(after)} of ${plural(job.total, "line", "lines")}…` });
      }
    } while (after !== null && found.length < PAGE);
    return { lines: found, next: after, filtered: Boolean(search || state) };
  }

  #show({ lines, next, filtered }) {
    this.#buttons(next);
    const where = lines.length ? `Lines ${exact(lines[0].line)} to ${exact(lines.at(-1).line)}` : "";
    const none = filtered ? "No line is like that." : "There are no lines yet.";
    fill(this.#root, { "lines-details": lines.length ? `${where} of ${exact(this.#job.total)}` : none });
    const shown = JSON.stringify(lines);
    if (shown === this.#shown) return;
    this.#shown = shown;
    part(this.#root, "line-list").replaceChildren(...lines.map((line) => this.#row(line)));
  }

  #buttons(next) {
    this.#next = next;
    show(action(this.#root, "next"), next !== null);
    show(action(this.#root, "previous"), this.#starts.length > 1);
  }

  /** Hide both until the page whose neighbours they lead to is there. */
  #hideButtons() {
    for (const name of ["next", "previous"]) show(action(this.#root, name), false);
  }

  #row(line) {
    const row = fromTemplate("line");
    const answer = line.error ? line.error.message : line.answer;
    const tokens = line.completion_tokens === null ? "" : plural(line.completion_tokens, "token", "tokens");
    const cut = line.finish_reason === "length" ? "cut off at its limit" : "";
    fill(row, {
      number: exact(line.line),
      "custom-id": line.custom_id,
      details: [STATES[line.state] ?? line.state, tokens, cut].filter(Boolean).join(" · "),
      "answer-label": line.error ? `Error: ${line.error.code ?? "unknown"}` : "Answer",
    });
    row.classList.toggle("failed-line", line.error !== null);
    const prompt = line.prompt ?? "(the input file is gone)";
    const more = prompt.length > SHORT || (answer ?? "").length > SHORT;
    const button = action(row, "whole");
    const fit = (text) => (this.#whole.has(line.line) || text.length <= SHORT ? text : `${text.slice(0, SHORT)}…`);
    const fillTexts = () => {
      fill(row, { prompt: fit(prompt), answer: fit(answer ?? "–") });
      setText(button, this.#whole.has(line.line) ? "Show less" : "Show all of it");
    };
    show(button, more);
    button.setAttribute("aria-label", `Show all of line ${exact(line.line)}, or less`);
    button.addEventListener("click", () => {
      if (!this.#whole.delete(line.line)) this.#whole.add(line.line);
      fillTexts();
    });
    fillTexts();
    return row;
  }
}
