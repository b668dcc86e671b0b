/** Small parts that several pages share: badges, chips, facts, sections, navigation of a run. */

import { h } from "rlkit/dom";
import { formatCount, formatReward } from "rlkit/format";
import { makeHash } from "rlkit/route";
import { textBlock, textLine } from "rlkit/text";

const STATUS_TONE = {
  running: "live", completed: "good", interrupted: "warn", budget: "warn", failed: "bad", dead: "bad", truncated: "warn",
};

/** Return a badge with the status of a run or an episode. */
export function statusBadge(status) {
  return h("span", { class: `badge ${STATUS_TONE[status] ?? ""}` }, status);
}

/** Return the smallest and largest of the rewards, ignoring unknown ones. */
export function rewardRange(rewards) {
  let low = Infinity;
  let high = -Infinity;
  for (const reward of rewards) {
    if (reward === null || reward === undefined) continue;
    low = Math.min(low, reward);
    high = Math.max(high, reward);
  }
  return low <= high ? [low, high] : [0, 1];
}

/** Return the class that colours a reward within a range. */
export function rewardClass(reward, [low, high]) {
  if (reward === null || reward === undefined) return "r-none";
  const [start, end] = [Math.min(low, 0), Math.max(high, 1e-9)];
  return `r${Math.max(0, Math.min(4, Math.floor(((reward - start) / (end - start)) * 4.999)))}`;
}

/** Return a chip with the reward of a member of a group. It is a link if `href` is given. */
export function rewardChip(member, range, href = null) {
  const failed = member.status === "failed";
  const words = [`member ${member.member}`, failed ? "failed" : `reward ${formatReward(member.reward)}`];
  if (member.attempt) words.push(`attempt ${member.attempt + 1}`);
  if (member.advantage !== null && member.advantage !== undefined) words.push(`advantage ${member.advantage.toFixed(2)}`);
  words.push(`${formatCount(member.tokens)} tokens`);
  if (member.status === "truncated") words.push("truncated");
  if (member.cut) words.push("a turn ended at the token limit");
  if (member.masked) words.push("masked");
  const label = words.join(", ");
  const marks = `${member.status === "truncated" || member.cut ? " cut" : ""}${member.masked ? " masked" : ""}`;
  const look = `chip ${failed ? "failed" : rewardClass(member.reward, range)}${marks}`;
  const text = failed ? "fail" : formatReward(member.reward);
  return h(href ? "a" : "span", { class: look, href, title: label, "aria-label": href ? label : null }, text);
}

/** Return a definition list of [term, value] pairs; unknown values are left out. */
export function factList(pairs) {
  const present = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, present.map(([term, value]) =>
    h("div", null, h("dt", null, term), h("dd", null, typeof value === "string" ? textLine(value) : value))));
}

/** Return metrics of a grader or an environment as facts. */
export function metricFacts(metrics) {
  const entries = Object.entries(metrics ?? {});
  if (!entries.length) return null;
  return factList(entries.map(([name, value]) => [textLine(name, 60), typeof value === "number" ? formatReward(value) : String(value)]));
}

/** Return a section with a heading. */
export function section(title, props, ...children) {
  const { id = title.toLowerCase().replace(/\W+/g, "-"), aside = null, ...others } = props ?? {};
  return h("section", { ...others, "aria-labelledby": `h-${id}` },
    h("div", { class: "section-head" }, h("h2", { id: `h-${id}` }, title), aside), ...children);
}

/** Return a folded part of the page. */
export function fold(summary, content, { open = false, kind = "" } = {}) {
  return h("details", { class: `fold ${kind}`, open }, h("summary", null, summary), content);
}

/** Return the full text of an error, with its traceback folded open. */
export function errorBlock(error) {
  if (!error) return null;
  return h("div", { class: "error-block" }, h("strong", null, "Error"), textBlock(error, "code"));
}

/** Return a quiet sentence in the place of content that does not exist. */
export function emptyNote(text) {
  return h("p", { class: "empty" }, text);
}

/** Return links that act as tabs; `tabs` are [key, label, href]. */
export function tabLinks(label, tabs, current) {
  return h("nav", { class: "tabs", "aria-label": label }, tabs.map(([key, text, href]) =>
    h("a", { href, "aria-current": key === current ? "page" : null }, text)));
}

/** Return a labelled control of a form. */
export function field(label, control) {
  return h("label", { class: "field" }, h("span", null, label), control);
}

/** Return a select element; `options` are [value, label]. */
export function selectBox(options, value, onchange) {
  const change = (event) => onchange(event.target.value);
  return h("select", { onchange: change }, options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
}

/** Return the breadcrumbs of a page inside a run: [label, hash] pairs. */
export function runCrumbs(run, ...more) {
  return [["Runs", "#/"], [run.name ?? run.id, makeHash(["run", run.id])], ...more];
}
