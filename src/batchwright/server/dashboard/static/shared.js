// What this process shares with others: the viewer's quotas, and the servers that work on the same store.

import { byId, fill, fillBars, fromTemplate, reconcile, setText, show } from "./dom.js";
import { bytes, count, rate } from "./format.js";

const QUOTAS = {
  storage_bytes: "Storage",
  enqueued_lines: "Lines waiting",
  enqueued_tokens: "Tokens waiting",
  requests_per_minute: "Requests a minute",
  tokens_per_minute: "Tokens a minute",
  concurrent_requests: "Requests at once",
};

export class Shared {
  #quotas = new Map();
  #servers = new Map();

  update({ quotas, servers }) {
    show(byId("shared"), quotas.length + servers.length > 0);
    show(byId("quotas"), quotas.length > 0);
    show(byId("servers"), servers.length > 0);
    const ids = quotas.map((quota) => `${quota.of} ${quota.name}`);
    reconcile(byId("quota-list"), ids, this.#quotas, () => fromTemplate("quota"));
    for (const { of, name, limit, used } of quotas) {
      const shown = name === "storage_bytes" ? bytes : count;
      const row = this.#quotas.get(`${of} ${name}`);
      fill(row, { label: `${QUOTAS[name] ?? name}, ${of}`, use: `${shown(used)} of ${shown(limit)}` });
      fillBars(row, { share: Math.min(1, used / limit) });
    }
    reconcile(byId("server-list"), servers.map((server) => server.name), this.#servers, () => fromTemplate("server"));
    for (const { name, here, online, lines, tokens } of servers) {
      fill(this.#servers.get(name), {
        name: here ? `${name} (this one)` : name,
        tokens: tokens ? `${rate(tokens.generated)} tokens/s` : "",
        details: tokens ? `${count(online)} online, ${count(lines)} lines` : "reports nothing of itself yet",
      });
    }
    const reporting = servers.filter((server) => server.tokens);
    const sum = (value) => reporting.reduce((total, server) => total + value(server), 0);
    setText(byId("servers-sum"), `${rate(sum((each) => each.tokens.generated))} tokens/s, ` +
      `${count(sum((each) => each.online))} online, ${count(sum((each) => each.lines))} lines in all`);
  }
}
