// Names and looks of a job's statuses. Each has a glyph, so that colour is never the only sign.

const STATUSES = {
  validating: ["Validating", "…", "busy"],
  in_progress: ["In progress", "●", "busy"],
  finalizing: ["Finalizing", "●", "busy"],
  completed: ["Completed", "✓", "good"],
  failed: ["Failed validation", "✕", "bad"],
  expired: ["Expired", "!", "warn"],
  cancelling: ["Cancelling", "…", "warn"],
  cancelled: ["Cancelled", "–", "off"],
};
const PAUSED = ["Paused", "Ⅱ", "warn"];
const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);

export const hasEnded = (job) => ENDED.has(job.status);

/** Whether a job may be paused, or is. */
export const isPaused = (job) => job.paused && (job.status === "in_progress" || job.status === "validating");

export function describe(job) {
  const [label, glyph, tone] = isPaused(job) ? PAUSED : STATUSES[job.status] ?? [job.status, "", "off"];
  const some = job.status === "completed" && job.failed > 0;
  return { label: some ? "Completed with errors" : label, glyph: some ? "!" : glyph, tone: some ? "warn" : tone };
}

/** A job's name in the list: the one it was given, or its id. */
export const nameOf = (job) => job.name || job.id;
