// Figures of the process: throughput, the engine, the two classes of traffic, dispatch reasons, webhook messages.

import { Chart } from "./chart.js";
import { byId, fill, fillBars, fromTemplate, part, reconcile, setText, show } from "./dom.js";
import { count, duration, exact, milliseconds, preciseShare, rate, share } from "./format.js";

const REASONS = {
  full: ["Full", "Nothing more would have fitted"],
  idle: ["Idle", "The model was free"],
  max_wait: ["Longest wait", "Its oldest request had waited as long as it may"],
  window: ["Window", "Its window had ended"],
  deadline: ["Deadline", "Waiting longer would have missed a deadline"],
  drain: ["Drain", "The service was closing"],
  retry: ["Retry", "Part of a batch that failed, computed again"],
};

export class Figures {
  #tokens = new Chart("token-chart", "token-legend", {
    title: "Tokens per second over the last two minutes, generated and prompt",
    series: [(point) => point.generated_tokens_per_second, (point) => point.prompt_tokens_per_second],
    format: rate,
  });
  #flight = new Chart("flight-chart", "flight-legend", {
    title: "Online requests and batch lines in flight over the last two minutes",
    series: [(point) => point.online, (point) => point.batch],
    format: count,
  });
  #reasons = new Map();
  #levels = new Map();
  #slos = new Map();

  update(state) {
    fill(document.querySelector(".brand"), { version: state.version });
    fill(byId("facts"), {
      models: state.models.join(", ") || "none",
      backend: state.backend === "engine" ? "this process" : state.backend,
      uptime: duration(state.uptime_seconds),
    });
    this.#tokens.update(state.history, state.at, [state.tokens.generated, state.tokens.prompt]);
    const last = state.history.at(-1);
    this.#flight.update(state.history, state.at, [last?.online ?? null, last?.batch ?? null]);
    engine(state);
    traffic(byId("online"), state.online);
    traffic(byId("batch"), state.batch);
    this.#dispatches(state.dispatch_reasons);
    this.#byLevel(state.levels);
    this.#byClass(state.slos);
    deliveries(state);
  }

  #byLevel(levels) {
    show(byId("levels"), levels.length > 1);
    const names = levels.map((level) => String(level.priority));
    reconcile(byId("level-rows"), names, this.#levels, () => fromTemplate("level-row"));
    for (const level of levels) {
      fill(this.#levels.get(String(level.priority)), {
        priority: String(level.priority), succeeded: count(level.succeeded), refused: count(level.refused),
        p50: milliseconds(level.p50), p99: milliseconds(level.p99), in_time: preciseShare(level.in_time_share),
      });
    }
  }

  #byClass(classes) {
    show(byId("slos"), classes.length > 0);
    reconcile(byId("slo-rows"), classes.map(({ name }) => name), this.#slos, () => fromTemplate("slo-row"));
    for (const each of classes) {
      const row = this.#slos.get(each.name);
      fill(row, {
        name: each.name, goal: preciseShare(each.goal), attained: preciseShare(each.attained),
        missed: count(each.missed), failed: count(each.failed), refused: count(each.refused),
      });
      row.querySelector("th").title = targets(each);
      part(row, "attained").classList.toggle("bad", each.attained !== null && each.attained < each.goal);
    }
  }

  #dispatches(reasons) {
    const sorted = Object.entries(reasons).filter(([, number]) => number > 0).sort((one, other) => other[1] - one[1]);
    const total = sorted.reduce((sum, [, number]) => sum + number, 0);
    show(byId("dispatches"), total > 0);
    reconcile(byId("reasons"), sorted.map(([name]) => name), this.#reasons, () => fromTemplate("reason"));
    for (const [name, number] of sorted) {
      const [label, details] = REASONS[name] ?? [name, ""];
      const row = this.#reasons.get(name);
      fill(row, { label, details, count: `${count(number)} · ${share(number / total)}` });
      fillBars(row, { share: number / total });
    }
  }
}

function engine({ engine: seen, backend }) {
  const card = byId("engine");
  show(part(card, "elsewhere"), seen === null);
  show(part(card, "gauges"), seen !== null);
  if (seen === null) {
    fill(card, { implementation: "elsewhere", address: backend });
    return;
  }
  const worked = seen.steps > 0;
  const filled = seen.occupancy === null ? null : seen.occupancy / seen.max_num_seqs;
  fill(card, {
    implementation: seen.implementation,
    occupancy: seen.occupancy === null ? "idle" : rate(seen.occupancy),
    seats: seen.occupancy === null ? "" : `of ${count(seen.max_num_seqs)} sequences`,
    kv: share(seen.kv_used),
    prefix: share(worked ? seen.prefix_hit_rate : null),
    padding: share(worked ? seen.padding_efficiency : null),
    steps: count(seen.steps),
    preemptions: count(seen.preemptions),
  });
  fillBars(card, {
    occupancy: filled, kv: seen.kv_used, prefix: seen.prefix_hit_rate, padding: worked ? seen.padding_efficiency : 0,
  });
}

function traffic(card, seen) {
  const texts = { tokens: rate(seen.tokens.generated) };
  for (const name of ["waiting", "running", "answered", "failed", "cancelled"]) {
    texts[name] = count(seen[name]);
    card.querySelector(`[data-field="${name}"]`).title = exact(seen[name]);
  }
  for (const name of ["ttft_ms", "tpot_ms", "latency_ms"]) {
    for (const each of ["p50", "p90", "p99"]) texts[`${name}.${each}`] = milliseconds(seen[name][each]);
  }
  fill(card, texts);
  part(card, "failed").classList.toggle("bad", seen.failed > 0);
}

function targets(each) {
  const named = [["first token", each.ttft_ms], ["each further token", each.tpot_ms], ["whole answer", each.latency_ms]];
  return named.filter(([, limit]) => limit !== null).map(([name, limit]) => `${name} within ${milliseconds(limit)}`)
    .join(", ");
}

function deliveries(state) {
  const box = byId("deliveries");
  show(byId("webhooks"), state.deliveries_pending + state.deliveries_failed > 0);
  fill(box, { pending: count(state.deliveries_pending), failed: count(state.deliveries_failed) });
  part(box, "failed").classList.toggle("bad", state.deliveries_failed > 0);
}

/** The line beside the title of the jobs: how many there are of each status. */
export function jobCounts(counts) {
  const shown = Object.entries(counts).filter(([, number]) => number > 0)
    .map(([status, number]) => `${count(number)} ${status === "failed" ? "failed validation" : status.replace("_", " ")}`);
  setText(byId("job-counts"), shown.join(" · "));
}
