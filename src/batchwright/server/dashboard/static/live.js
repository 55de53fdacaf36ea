// The stream of states, reopened when it breaks. It is read with fetch, since EventSource cannot send a key.

import { ApiError, NO_ANSWER, errorFrom, open } from "./api.js";

const SILENCE = 6000; // ms without an event, of which there is one a second, until the stream counts as broken
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 8000;

/** The data of each event of a text/event-stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be broken already
  }
}

export class Live {
  #onState;
  #onLink;
  #wake = () => {};
  #pause = FIRST_PAUSE;

  /** `onState(state)` for each event; `onLink(link, reason)` with live, lost or locked (no key) when that changes. */
  constructor({ onState, onLink }) {
    this.#onState = onState;
    this.#onLink = onLink;
  }

  /** Try again at once. */
  retry() {
    this.#pause = FIRST_PAUSE;
    this.#wake();
  }

  async run() {
    for (;;) {
      const error = await this.#read().then(() => null, (raised) => raised);
      const locked = error?.status === 401;
      this.#onLink(locked ? "locked" : "lost", error instanceof ApiError ? error.message : NO_ANSWER);
      await this.#wait(locked ? null : this.#pause);
      this.#pause = Math.min(LONGEST_PAUSE, this.#pause * 2);
    }
  }

  async #read() {
    const control = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE);
    };
    try {
      const response = await open("/dashboard/events", { signal: control.signal });
      heard();
      for await (const data of events(response.body)) {
        heard();
        if (data === "[DONE]") return;
        const state = JSON.parse(data);
        if (state.error) throw errorFrom(500, state);
        this.#pause = FIRST_PAUSE;
        this.#onState(state);
        this.#onLink("live", "");
      }
    } finally {
      clearTimeout(timer);
      control.abort();
    }
  }

  #wait(pause) {
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (pause !== null) setTimeout(resolve, pause);
    });
  }
}
