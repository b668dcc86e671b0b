/** Small parts that several pages share: badges, chips, facts, sections, navigation of a run. */
import { h } from "rlkit/dom";
import { formatCount, formatReward, formatSigned, isKnown } from "rlkit/format";
import { textBlock, textLine } from "rlkit/text";

const STATUS_TONE = { running: "live", completed: "good", interrupted: "warn", budget: "warn", failed: "bad", dead: "bad", truncated: "warn" };

/** Return a badge with the status of a run or an episode. */
export function statusBadge(status) {
  return h("span", { class: `badge ${STATUS_TONE[status] ?? ""}` }, status);
}

/** Return the smallest and largest of the known rewards. */
export function rewardRange(rewards) {
  const range = rewards.filter(isKnown).reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [Infinity, -Infinity]);
  return range[0] <= range[1] ? range : [0, 1];
}

/** Return the class that colours a reward within a range. */
export function rewardClass(reward, [low, high]) {
  if (!isKnown(reward)) return "r-none";
  const [start, end] = [Math.min(low, 0), Math.max(high, 1e-9)];
  return `r${Math.max(0, Math.min(4, Math.floor(((reward - start) / (end - start)) * 4.999)))}`;
}

/** Return a chip with the reward of a member of a group. It is a link if `href` is given. */
export function rewardChip(member, range, href = null) {
  const { reward, attempt, advantage, tokens, status, cut, masked } = member;
  const isFailed = status === "failed";
  const label = [
    `member ${member.member}`, attempt > 0 && `attempt ${attempt + 1}`, isFailed ? "failed" : `reward ${formatReward(reward)}`, isKnown(advantage) && `advantage ${formatSigned(advantage)}`,
    isKnown(tokens) && `${formatCount(tokens)} tokens`, status === "truncated" && "truncated", cut && "a turn ended at the token limit", masked && "masked",
  ].filter(Boolean).join(", ");
  const kind = `chip ${isFailed ? "failed" : rewardClass(reward, range)}${status === "truncated" || cut ? " cut" : ""}${masked ? " masked" : ""}`;
  return h(href ? "a" : "span", { class: kind, href, title: label, "aria-label": href ? label : null }, isFailed ? "failed" : formatReward(reward));
}

/** Return a definition list of [term, value] pairs; unknown values are left out. */
export function factList(pairs) {
  const facts = pairs.filter(([, value]) => isKnown(value) && value !== "");
  return h("dl", { class: "facts" }, facts.map(([term, value]) =>
    h("div", null, h("dt", null, term), h("dd", null, typeof value === "string" ? textLine(value) : value))));
}

/** Return metrics, or other values of an environment, as facts. */
export function metricFacts(metrics) {
  const show = (value) => (typeof value === "number" ? formatReward(value) : typeof value === "string" ? value : JSON.stringify(value));
  const entries = Object.entries(metrics ?? {});
  return entries.length > 0 && factList(entries.map(([name, value]) => [textLine(name, 60), show(value)]));
}

/** Return a section with a heading, and `aside` beside it. */
export function section(title, aside, ...children) {
  return h("section", null, h("div", { class: "section-head" }, h("h2", null, title), aside), ...children);
}

/** Return a folded part of the page. */
export function fold(summary, content, { open = false, kind = "" } = {}) {
  return h("details", { class: `fold ${kind}`, open }, h("summary", null, summary), content);
}

/** Return the full text of an error, with its traceback folded open. */
export function errorBlock(error) {
  return error && h("div", { class: "error-block" }, h("strong", null, "Error"), textBlock(error, "code"));
}

/** Return a quiet sentence in the place of content that does not exist. */
export function emptyNote(text) {
  return h("p", { class: "empty" }, text);
}
