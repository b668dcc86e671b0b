/** Format numbers, times and names for people. An unknown value is a dash. */

const DASH = "–";

/** Return a number with about `digits` significant digits. */
export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1).replace("e", "×10^").replace(/\^(-?)\+?(\d+)/, (_, sign, power) => superscript(sign + power));
  return Number(value.toPrecision(digits)).toString();
}

function superscript(text) {
  return [...text].map((char) => (char === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(char)])).join("");
}

/** Return a reward or score with two decimals, more only where they matter. */
export function formatReward(value) {
  if (value === null || value === undefined) return DASH;
  if (Math.abs(value) >= 0.01 || value === 0) return value.toFixed(2);
  return formatNumber(value, 2);
}

/** Return a number with its sign. */
export function formatSigned(value, digits = 2) {
  if (value === null || value === undefined) return DASH;
  return (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);
}

/** Return a count such as 12.3k or 4.5M. */
export function formatCount(value) {
  if (value === null || value === undefined) return DASH;
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return String(Math.round(value));
}

/** Return a share as a percentage. */
export function formatPercent(value) {
  if (value === null || value === undefined) return DASH;
  return `${Number((100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0))} %`;
}

/** Return a duration. */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** Return the time since a moment, such as "3 min ago". */
export function formatAge(seconds, now_s = Date.now() / 1000) {
  if (seconds === null || seconds === undefined) return DASH;
  const age = now_s - seconds;
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  if (age < 30 * 86400) return `${Math.floor(age / 86400)} d ago`;
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}

/** Return a price in dollars. */
export function formatUsd(value) {
  if (value === null || value === undefined) return DASH;
  return value < 0.005 && value > 0 ? "< $0.01" : `$${value.toFixed(2)}`;
}

/** Return a number of bytes. */
export function formatBytes(value) {
  if (value === null || value === undefined) return DASH;
  return value < 1000 ? `${value} B` : `${formatCount(value)}B`;
}

/** Return "1 group" or "3 groups". */
export function plural(count, noun) {
  return `${Number(count).toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
