// Numbers, times and texts as the console shows them. Pure: no DOM, no clock, no network.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export const UNKNOWN = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function bytes(value) {
  if (!isNumber(value)) return UNKNOWN;
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1023.95 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || size >= 100 ? 0 : 1;
  return `${value < 0 ? "-" : ""}${size.toFixed(digits)} ${UNITS[unit]}`;
}

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

export function seconds(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function rate(value) {
  if (!isNumber(value)) return UNKNOWN;
  const digits = value >= 100 || value === 0 ? 0 : value >= 1 ? 1 : 2;
  return `${value.toFixed(digits)} tokens/s`;
}

export function percent(value) {
  return isNumber(value) ? `${Math.floor(Math.min(100, Math.max(0, value)))} %` : UNKNOWN;
}

export function energy(joules) {
  if (!isNumber(joules)) return UNKNOWN;
  return joules < 3600 ? `${joules.toFixed(0)} J` : `${(joules / 3600).toFixed(1)} Wh`;
}

// A number on an axis: short, and never rounded to zero.
export function mark(value) {
  if (!isNumber(value)) return UNKNOWN;
  const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / size).toPrecision(3))}${unit}`;
}

export const dayOf = (at_s) => new Date(at_s * 1000).toISOString().slice(5, 10);

export function timeOfDay(at_s) {
  return new Date(at_s * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

// The local date and time of seconds of the epoch.
export function moment(at_s) {
  const at = new Date(at_s * 1000);
  if (!isNumber(at_s) || Number.isNaN(at.getTime())) return UNKNOWN;
  return at.toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
}

export function clock(time) {
  const at = new Date(time);
  return Number.isNaN(at.getTime()) ? UNKNOWN : at.toLocaleTimeString("en-GB");
}

// Removes terminal escapes and control characters; the rest is shown as text, never as HTML.
// No sequence continues in the next line: a truncated sequence would hide the rest of a log.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-~])/g;
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

export function plainText(text) {
  return text.replace(ESCAPES, "").replace(/\r\n/g, "\n").replace(CONTROLS, "\ufffd");
}

export function shortArguments(command) {
  return Array.isArray(command) ? command.join(" ") : String(command ?? "");
}
