/** Small parts that several pages share: badges, chips, facts, sections. */
import { h } from "rlkit/dom";
import { formatReward, formatSigned, formatTokens, isKnown, meanOf } from "rlkit/format";
import { runHash } from "rlkit/route";
import { textBlock, textLine } from "rlkit/text";

const TONES = { running: "live", completed: "good", failed: "bad", killed: "bad" };

export const statusBadge = (status) => h("span", { class: `badge ${TONES[status] ?? (status ? "warn" : "")}` }, status);

/** Return a mark in a colour of CSS, or in that of a class. */
export const swatch = (colour, kind = "") => h("i", { class: `swatch ${kind}`, style: { background: colour } });

/** Return the mean of the known rewards of episodes, or null. */
export const meanReward = (episodes) => meanOf(episodes.map(({ reward }) => reward));

export function rewardRange(episodes) {
  const rewards = episodes.map(({ reward }) => reward).filter(isKnown).sort((a, b) => a - b);
  return rewards.length ? [rewards[0], rewards.at(-1)] : [0, 1];
}

/** Return the class that colours a reward within a range. */
export function rewardClass(reward, [low, high]) {
  if (!isKnown(reward)) return "";
  const [start, end] = [Math.min(low, 0), Math.max(high, 1e-9)];
  const level = Math.floor(((reward - start) / (end - start)) * 4.999);
  return ["n2", "n1", "", "p1", "p2"][Math.max(0, Math.min(4, level))];
}

/** Return the name of an episode within its group. */
export const memberName = ({ member, attempt }) => `Member ${member}${attempt > 0 ? `, attempt ${attempt + 1}` : ""}`;

/** Return the environment of an episode or a group, and a link to its task. */
export const taskLead = (runId, { env, task }) =>
  [textLine(env), " · ", h("a", { href: runHash(runId, "task", env, task) }, "this task across steps")];

/** Return a chip with the reward of a member of a group. It is a link if `href` is given. */
export function rewardChip({ member, attempt, reward, advantage, tokens, status, cut, masked }, range, href = null) {
  const [isFailed, isTruncated] = [status === "failed", status === "truncated"];
  const text = isFailed ? "failed" : formatReward(reward);
  const label = joinFacts([
    `member ${member}`, attempt > 0 && `attempt ${attempt + 1}`, isFailed ? text : `reward ${text}`,
    isKnown(advantage) && `advantage ${formatSigned(advantage)}`, isKnown(tokens) && formatTokens(tokens),
    isTruncated && "truncated", cut && "a turn ended at the token limit", masked && "masked",
  ], ", ");
  const colour = isFailed ? "failed" : rewardClass(reward, range);
  const kind = joinFacts(["chip", colour, (isTruncated || cut) && "cut", masked && "masked"], " ");
  return h(href ? "a" : "span", { class: kind, href, title: label, "aria-label": href ? label : null }, text);
}

/** Return the facts that are known as one text. */
export const joinFacts = (facts, separator = " · ") => facts.filter(Boolean).join(separator);

/** Return a definition list of [term, value] pairs; unknown values are left out. */
export function factList(pairs) {
  const facts = pairs.filter(([, value]) => isKnown(value) && value !== "");
  return h("dl.facts", facts.map(([term, value]) =>
    h("div", h("dt", term), h("dd", typeof value === "string" ? textLine(value) : value))));
}

/** Return metrics, or other values of an environment, as facts. */
export function metricFacts(metrics) {
  const show = { number: formatReward, string: String };
  const entries = Object.entries(metrics ?? {}).map(([name, value]) =>
    [textLine(name, 60), (show[typeof value] ?? JSON.stringify)(value)]);
  return entries.length > 0 && factList(entries);
}

/** Return the facts about the training on a group, or on the group of an episode. */
export function trainingFacts({ taught, reason, estimator, baseline, draw }, isStep) {
  const verdict = isStep ? tellTaught({ taught, reason }) : null;
  const level = isKnown(baseline) ? formatReward(baseline) : null;
  return [["Taught", verdict], ["Estimator", estimator], ["Baseline", level], ["Draw", draw]];
}

/** Return whether a group taught, and the reason if it did not; `taught` is null as long as that is not known. */
export const tellTaught = ({ taught, reason }) => taught ? "yes" : joinFacts([taught === false && "no", reason], ": ");

/** Return the head of a page: its title, the line below, and what is beside them. */
export const pageHead = (title, lead, ...aside) => h("div.page-head", h("div", h("h1", title), lead), aside);

/** Return a large value below its label; `tone` is its class. */
export const headline = (label, value, tone = "") =>
  h("div", { class: `headline ${tone}` }, h("div.label", label), h("div.big", value));

/** Return how a value went from its start to now; a single value has no start. */
export const drawChange = ([start, now]) =>
  [isKnown(start) && h("span.from", `${formatReward(start)} → `), formatReward(now)];

/** Return a section with a heading, and `aside` beside it. */
export const section = (title, aside, ...children) =>
  h("section", h("div.section-head", h("h2", title), aside), ...children);

export const fold = (summary, content, { open = false, kind = "" } = {}) =>
  h("details", { class: `fold ${kind}`, open }, h("summary", summary), content);

export const errorBlock = (error) =>
  error && h("div.error-block", h("strong", "Error"), textBlock(error, "code"));

/** Return a quiet sentence in the place of content that does not exist. */
export const emptyNote = (text) => h("p.empty", text);
