/** Format numbers, times and names for people. An unknown value is a dash. */
const DASH = "–";

export const isKnown = (value) => value !== null && value !== undefined;

/** Return the result of an action, or `fallback` if it fails. */
export function attempt(action, fallback) {
  try {
    return action();
  } catch {
    return fallback;
  }
}

/** Return a number with about `digits` significant digits. */
export function formatNumber(value, digits = 3) {
  if (!isKnown(value) || Number.isNaN(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

/** Return a reward or score with two decimals, or two digits if it is smaller. */
export function formatReward(value) {
  if (!isKnown(value)) return DASH;
  return Math.abs(value) >= 0.01 || value === 0 ? value.toFixed(2) : formatNumber(value, 2);
}

export const formatSigned = (value, digits = 2) =>
  isKnown(value) ? (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits) : DASH;

/** Return a count such as 12.3k or 4.5M. */
export function formatCount(value) {
  if (!isKnown(value)) return DASH;
  const [size, unit] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${Number((value / size).toPrecision(3))}${unit}`;
}

export function formatDuration(seconds) {
  if (!isKnown(seconds)) return DASH;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** Return the time since a moment, such as "3 min ago". */
export function formatAge(seconds, now_s = Date.now() / 1000) {
  if (!isKnown(seconds)) return DASH;
  const age = now_s - seconds;
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  return age < 30 * 86400 ? `${Math.floor(age / 86400)} d ago` : new Date(seconds * 1000).toISOString().slice(0, 10);
}

export function formatUsd(value) {
  if (!isKnown(value)) return DASH;
  return value < 0.005 && value > 0 ? "< $0.01" : `$${value.toFixed(2)}`;
}

/** Return "1 group" or "3 groups". */
export const plural = (count, noun) => `${Number(count).toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Return the mean of the known values, or null. */
export function meanOf(values) {
  const numbers = values.filter(isKnown);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}
