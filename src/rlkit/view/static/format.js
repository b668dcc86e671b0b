/** Format numbers, times and names for people. An unknown value is a dash. */
const [DASH, HUGE] = ["–", 1e9];
const COUNTS = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const isKnown = (value) => value !== null && value !== undefined;

/** Return the result of an action, or `fallback` if it fails. */
export function attempt(action, fallback) {
  try {
    return action();
  } catch {
    return fallback;
  }
}

const orDash = (format) => (value, ...options) => (isKnown(value) ? format(value, ...options) : DASH);
const formatFixed = (value, digits) => (Math.abs(value) < HUGE ? value.toFixed(digits) : formatNumber(value));

/** Return a number with about `digits` significant digits, as a short text even if it is huge. */
export const formatNumber = orDash((value, digits = 3) => {
  const size = Math.abs(value);
  if (Number.isNaN(value)) return DASH;
  if (size >= HUGE || (size !== 0 && size < 10 ** -digits)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
});

/** Return a reward or score with two decimals, or two digits if it is smaller. */
export const formatReward = orDash((value) =>
  Math.abs(value) >= 0.01 || value === 0 ? formatFixed(value, 2) : formatNumber(value, 2));

export const formatSigned = orDash((value, digits = 2) =>
  (value > 0 ? "+" : value < 0 ? "−" : "") + formatFixed(Math.abs(value), digits));

/** Return a count such as 12.3k or 4.5M. */
export const formatCount = orDash((value) => COUNTS.format(value).replace("K", "k"));

export const formatDuration = orDash((seconds) => {
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
});

/** Return the time since a moment, such as "3 min ago", or the day if it was long ago. */
export const formatAge = orDash((seconds) => {
  const age_s = Date.now() / 1000 - seconds;
  if (age_s > 30 * 86400) return new Date(seconds * 1000).toISOString().slice(0, 10);
  const [unit_s, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([least]) => age_s >= least) ?? [];
  return unit ? `${Math.floor(age_s / unit_s)} ${unit} ago` : "just now";
});

export const formatUsd = orDash((value) => (value < 0.005 && value > 0 ? "< $0.01" : `$${formatFixed(value, 2)}`));

/** Return "1 group" or "3 groups". */
export const plural = (count, noun, text = count.toLocaleString("en")) => `${text} ${noun}${count === 1 ? "" : "s"}`;

export const formatTokens = (count) => plural(count, "token", formatCount(count));

/** Return the mean of the known values, or null. */
export function meanOf(values) {
  const numbers = values.filter(isKnown);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}
