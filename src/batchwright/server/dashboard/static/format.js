// Formats figures for people. An unknown value is a dash.

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const STEPS = [
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
];

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** All digits: 1,234,567. */
export const exact = (value) => (known(value) ? WHOLE.format(value) : UNKNOWN);

/** At most seven characters: all digits up to a million, then 1.23 M, 45.6 B. */
export function count(value) {
  if (!known(value)) return UNKNOWN;
  for (const [size, letter] of STEPS) {
    // Truncated, not rounded: 999,999 of a million is never shown as the whole million.
    if (value >= size) return `${cut(value / size)} ${letter}`;
  }
  return WHOLE.format(value);
}

function cut(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  const factor = 10 ** digits;
  return (Math.floor(value * factor) / factor).toFixed(digits);
}

/** A rate per second, with one decimal while it is small. */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  return value > 0 && value < 9.95 ? value.toFixed(1) : count(Math.round(value));
}

/** 0..1 as per cent; never 0% or 100% unless it is exactly that. */
export function share(value) {
  if (!known(value)) return UNKNOWN;
  if (value <= 0) return "0%";
  if (value < 0.01) return "<1%";
  return `${value >= 1 ? 100 : Math.min(99, Math.round(value * 100))}%`;
}

/** A share to a tenth of a percent, for objectives such as 99.5%; never rounded up to 100%. */
export function preciseShare(value) {
  return known(value) ? `${(Math.floor(value * 1000) / 10).toFixed(1)}%` : UNKNOWN;
}

export function milliseconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 9.95) return `${value.toFixed(1)} ms`;
  if (value < 999.5) return `${Math.round(value)} ms`;
  if (value < 99_950) return `${(value / 1000).toFixed(value < 9995 ? 2 : 1)} s`;
  return duration(value / 1000);
}

/** The two largest units: 45 s, 2 min 05 s, 3 h 12 min, 4 d 3 h. */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${exact(Math.floor(minutes / 1440))} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  if (value < 1e6) return `${cut(value / 1e3)} kB`;
  if (value < 1e9) return `${cut(value / 1e6)} MB`;
  return `${cut(value / 1e9)} GB`;
}

const MOMENT = new Intl.DateTimeFormat("en", {
  day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const CLOCK = new Intl.DateTimeFormat("en", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

/** Unix seconds, in the reader's own time zone. */
export const moment = (at) => (known(at) ? MOMENT.format(new Date(at * 1000)) : UNKNOWN);
export const clock = (at) => (known(at) ? CLOCK.format(new Date(at * 1000)) : UNKNOWN);

export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
