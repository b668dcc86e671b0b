/** A group: the shared prompt once, the replies side by side in the order of their advantages. */

import { load } from "rlkit/api";
import { drawMessages, messagesText } from "rlkit/chat";
import { diffWords } from "rlkit/diff";
import { h, replace } from "rlkit/dom";
import { formatCount, formatDuration, formatReward, formatSigned, plural } from "rlkit/format";
import { runTabs } from "rlkit/pages/run";
import { emptyNote, errorBlock, factList, field, fold, metricFacts, rewardClass, rewardRange, runCrumbs, section, selectBox, statusBadge } from "rlkit/parts";
import { apiPath, makeHash, setQuery } from "rlkit/route";
import { markInvisible, textLine } from "rlkit/text";

const COLUMN_LIMIT_CHARS = 12_000;

/** Show a group. */
export async function showGroup([, id, kind, step, , position], query) {
  const base = apiPath("run", id, kind, step);
  const [run, group, { groups }] = await Promise.all([load(apiPath("run", id)), load(`${base}/group/${position}`), load(base)]);
  const context = { run, kind, step, group, range: rewardRange(group.members.map(({ reward }) => reward)) };
  const replies = sortReplies(group);
  const columns = h("div", { class: "columns", tabIndex: 0, role: "region", "aria-label": "Replies" });
  const picker = h("div");
  const draw = ({ diff }) => {
    if (replies.length > 1) replace(picker, differencePicker(replies, diff));
    columns.classList.toggle("two", Boolean(diff));
    replace(columns, diff ? drawDifference(replies, diff) : replies.map((reply) => drawReply(context, reply)));
  };
  draw(query);
  const node = h("div", { class: "page wide" }, runTabs(run, kind === "step" ? "step" : "evaluations"), drawHead(context),
    group.prompt.length > 0 && section("Prompt", null, fold(`${plural(group.prompt.length, "message")}, shared by all replies`, drawMessages(group.prompt), { open: promptLength(group) < 4000 })),
    section("Replies", { aside: picker }, replies.length ? columns : emptyNote("No reply is recorded.")));
  const at = (index) => (groups[index] ? makeHash(["run", id, kind, step, "group", String(groups[index].position)]) : null);
  const index = groups.findIndex((other) => other.position === Number(position));
  const up = makeHash(["run", id, kind, step]);
  const crumbs = runCrumbs(run, [`${kind === "step" ? "Step" : "Evaluation"} ${step}`, up], [`Group ${position}`, makeHash(["run", id, kind, step, "group", position])]);
  return { title: `Group ${position}, ${kind} ${step}, ${run.name}`, node, crumbs, up, previous: at(index - 1), next: at(index + 1), requery: draw };
}

function promptLength(group) {
  return messagesText(group.prompt).length;
}

function sortReplies(group) {
  const info = new Map([...group.members, ...group.failed_attempts].map((member) => [`${member.member}/${member.attempt}`, member]));
  const replies = group.replies.map((reply) => ({ ...reply, facts: info.get(`${reply.member}/${reply.attempt}`) ?? { status: "failed", reward: null } }));
  const key = ({ facts }) => facts.advantage ?? facts.reward ?? -Infinity;
  return replies.sort((a, b) => key(b) - key(a) || a.member - b.member || a.attempt - b.attempt);
}

function drawHead({ run, kind, group }) {
  const task = makeHash(["run", run.id, "task", group.env, group.task]);
  return h("div", { class: "page-head" }, h("div", null, h("h1", null, textLine(group.task, 160)),
    h("p", { class: "lead" }, textLine(group.env), " · ", h("a", { href: task }, "this task across steps"))),
  factList([["Taught", kind === "step" ? (group.taught ? "yes" : `no${group.reason ? `: ${group.reason}` : ""}`) : null], ["Estimator", group.estimator],
    ["Baseline", group.baseline === null ? null : formatReward(group.baseline)], ["Draw", group.draw === null ? null : String(group.draw)]]));
}

function drawReply({ run, kind, step, group, range }, { member, attempt, messages, info, error, facts }) {
  const href = makeHash(["run", run.id, kind, step, "episode", String(group.position), String(member), String(attempt)]);
  const name = attempt ? `Member ${member}, attempt ${attempt + 1}` : `Member ${member}`;
  return h("article", { class: "column", dataset: { row: "" } },
    h("header", null, h("h3", null, h("a", { href }, name)), facts.status !== "completed" && statusBadge(facts.status),
      h("span", { class: `chip ${facts.status === "failed" ? "failed" : rewardClass(facts.reward, range)}`, title: "reward" }, formatReward(facts.reward)),
      facts.advantage !== null && facts.advantage !== undefined && h("span", { class: "advantage", title: "mean advantage" }, formatSigned(facts.advantage))),
    h("p", { class: "sub" }, [`${formatCount(facts.tokens)} tokens`, facts.turns > 1 && plural(facts.turns, "turn"), facts.seconds && formatDuration(facts.seconds), facts.cut && "cut at the limit", facts.masked && "masked"].filter(Boolean).join(" · ")),
    metricFacts(facts.metrics), errorBlock(error), drawMessages(messages, { limit: COLUMN_LIMIT_CHARS }),
    info && Object.keys(info).length > 0 && fold("Info", metricFacts(Object.fromEntries(Object.entries(info).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)])))));
}

function replyKey({ member, attempt }) {
  return `${member}.${attempt}`;
}

function differencePicker(replies, diff) {
  const options = replies.map((reply) => [replyKey(reply), `member ${reply.member}${reply.attempt ? `, attempt ${reply.attempt + 1}` : ""} (${formatReward(reply.facts.reward)})`]);
  let [first, second] = (diff ?? "").split(",");
  const change = () => setQuery({ diff: first && second && first !== second ? `${first},${second}` : null });
  const box = (label, value, onchange) => field(label, selectBox([["", "–"], ...options], value ?? "", onchange));
  const ends = `${options[0][0]},${options.at(-1)[0]}`;
  const toggle = h("button", { type: "button", class: "button", onclick: () => setQuery({ diff: diff ? null : ends }) }, diff ? "Show all replies" : "Best against worst");
  return h("div", { class: "toolbar" }, toggle, box("Differences between", first, (value) => ((first = value), change())), box("and", second, (value) => ((second = value), change())));
}

function drawDifference(replies, diff) {
  const pair = diff.split(",").map((key) => replies.find((reply) => replyKey(reply) === key));
  if (pair.some((reply) => !reply)) return emptyNote("These replies are not in the group.");
  const sides = diffWords(messagesText(pair[0].messages), messagesText(pair[1].messages));
  if (!sides) return emptyNote("The two replies differ too much to compare by words.");
  return pair.map((reply, index) => h("article", { class: "column half" },
    h("header", null, h("h3", null, `Member ${reply.member}`), h("span", { class: "chip" }, formatReward(reply.facts.reward))),
    h("div", { class: "text prose", dir: "auto" }, sides[index].map(([text, isDifferent]) => (isDifferent ? h(index ? "ins" : "del", null, markInvisible(text)) : markInvisible(text))))));
}
