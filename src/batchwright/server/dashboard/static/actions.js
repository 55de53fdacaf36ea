// The actions on a job, and when each is offered.

import { call, open } from "./api.js";
import { byId, fill } from "./dom.js";
import { count, plural } from "./format.js";
import { currentKey } from "./key.js";
import { showMessage } from "./messages.js";
import { hasEnded, isPaused, nameOf } from "./statuses.js";

const running = (job) => job.status === "validating" || job.status === "in_progress";
const batch = (job) => `/v1/batches/${encodeURIComponent(job.id)}`;

/** Actions by name: `when` each is offered, and what it does. */
export const ACTIONS = {
  pause: {
    when: (job) => job.kind === "batch" && running(job) && !job.paused,
    run: (job) => call("POST", `${batch(job)}/pause`),
  },
  resume: {
    when: (job) => job.kind === "batch" && isPaused(job),
    run: (job) => call("POST", `${batch(job)}/resume`),
  },
  cancel: { when: running, run: cancel },
  retry: {
    when: (job) => job.kind === "batch" && hasEnded(job) && job.status !== "failed" && job.failed > 0,
    run: retry,
  },
  output: { when: (job) => job.output_file_id !== null, run: (job) => download(job, "output") },
  errors: { when: (job) => job.error_file_id !== null, run: (job) => download(job, "error") },
};

/** Do an action; a failure is shown, not raised. */
export async function perform(name, job, button) {
  button.setAttribute("aria-disabled", "true");
  try {
    await ACTIONS[name].run(job);
  } catch (error) {
    showMessage(`${nameOf(job)}: ${error.message}`, { failed: true });
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

async function cancel(job) {
  if (!(await confirmCancel(job))) return;
  await (job.kind === "simple"
    ? open(`/v1/batch/${encodeURIComponent(job.id)}`, { method: "DELETE" })
    : call("POST", `${batch(job)}/cancel`));
}

function confirmCancel(job) {
  const dialog = byId("cancel-dialog");
  const finished = job.completed + job.failed;
  fill(dialog, {
    name: nameOf(job),
    text: finished > 0
      ? `${plural(finished, "line is", "lines are")} finished and kept in its files. The other `
        + `${count(job.total - finished)} are not computed. This cannot be undone.`
      : "No line is finished yet. This cannot be undone.",
  });
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "cancel"), { once: true });
  });
}

async function retry(job) {
  const made = await call("POST", `${batch(job)}/retry`);
  showMessage(`${plural(job.failed, "line", "lines")} of ${nameOf(job)} tried again as ${made.id}.`);
}

async function download(job, which) {
  const path = `/v1/files/${encodeURIComponent(job[`${which}_file_id`])}/content`;
  const name = `${nameOf(job).replace(/\.jsonl$/i, "")}_${which}.jsonl`;
  if (currentKey() === null) {
    save(path, name);
    return;
  }
  // A link cannot carry the key, so the file is fetched here first.
  const address = URL.createObjectURL(await (await open(path)).blob());
  save(address, name);
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function save(address, name) {
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
}
