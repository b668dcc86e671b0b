/** A group: the shared prompt once, the replies side by side in the order of their advantages. */
import { load } from "rlkit/api";
import { drawMessages, messagesText } from "rlkit/chat";
import { diffTexts } from "rlkit/diff";
import {
  apiPath, emptyNote, errorBlock, factList, field, fold, formatCount, formatDuration, formatReward, formatSigned, h, isKnown, makeHash,
  makeRunView, markInvisible, metricFacts, plural, replace, rewardClass, rewardRange, section, selectBox, setQuery, statusBadge, stepPlace,
  textLine,
} from "rlkit/ui";

const COLUMN_LIMIT_CHARS = 12_000;
const OPEN_PROMPT_CHARS = 4000;

/** Show a group. */
export async function showGroup([, id, kind, step, , position], query) {
  const base = apiPath("run", id, kind, step);
  const [run, group, { groups }] = await Promise.all([load(apiPath("run", id)), load(`${base}/group/${position}`), load(base)]);
  const context = { group, range: rewardRange(group.members.map(({ reward }) => reward)), at: (...parts) => makeHash(["run", id, kind, step, ...parts.map(String)]) };
  const replies = sortReplies(group);
  const columns = h("div", { class: "columns", tabIndex: 0, role: "region", "aria-label": "Replies" });
  const picker = h("div");
  const draw = ({ diff }) => {
    if (replies.length > 1) replace(picker, drawPicker(replies, diff));
    columns.classList.toggle("two", Boolean(diff));
    replace(columns, diff ? drawDifference(replies, diff) : replies.map((reply) => drawReply(context, reply)));
  };
  draw(query);
  const prompt = fold(`${plural(group.prompt.length, "message")}, shared by all replies`, drawMessages(group.prompt), { open: messagesText(group.prompt).length < OPEN_PROMPT_CHARS });
  const content = [drawHead(run, kind, group), group.prompt.length > 0 && section("Prompt", null, prompt), section("Replies", picker, replies.length ? columns : emptyNote("No reply is recorded."))];
  const index = groups.findIndex((other) => other.position === Number(position));
  const [previous, next] = [groups[index - 1], groups[index + 1]].map((other) => other && context.at("group", other.position));
  return makeRunView(run, "group", [stepPlace(kind, step), [`Group ${position}`, [kind, step, "group", position]]], content, { previous, next, requery: draw });
}

function sortReplies(group) {
  const members = [...group.members, ...group.failed_attempts];
  const factsOf = (reply) => members.find(({ member, attempt }) => member === reply.member && attempt === reply.attempt) ?? { status: "failed", reward: null };
  const replies = group.replies.map((reply) => ({ ...reply, key: `${reply.member}.${reply.attempt}`, facts: factsOf(reply) }));
  const order = ({ facts }) => facts.advantage ?? facts.reward ?? -Infinity;
  return replies.sort((a, b) => order(b) - order(a) || a.member - b.member || a.attempt - b.attempt);
}

function replyName({ member, attempt }) {
  return attempt ? `Member ${member}, attempt ${attempt + 1}` : `Member ${member}`;
}

function drawHead(run, kind, group) {
  const task = makeHash(["run", run.id, "task", group.env, group.task]);
  const taught = group.taught ? "yes" : `no${group.reason ? `: ${group.reason}` : ""}`;
  return h("div", { class: "page-head" },
    h("div", null, h("h1", null, textLine(group.task, 160)), h("p", { class: "lead" }, textLine(group.env), " · ", h("a", { href: task }, "this task across steps"))),
    factList([["Taught", kind === "step" ? taught : null], ["Estimator", group.estimator], ["Baseline", isKnown(group.baseline) ? formatReward(group.baseline) : null], ["Draw", group.draw]]));
}

function drawReply({ group, range, at }, reply) {
  const { messages, info, error, facts } = reply;
  const chip = h("span", { class: `chip ${facts.status === "failed" ? "failed" : rewardClass(facts.reward, range)}`, title: "reward" }, formatReward(facts.reward));
  const sizes = [`${formatCount(facts.tokens)} tokens`, facts.turns > 1 && plural(facts.turns, "turn"), isKnown(facts.seconds) && formatDuration(facts.seconds), facts.cut && "cut at the limit", facts.masked && "masked"];
  return h("article", { class: "column", dataset: { row: "" } },
    h("header", null, h("h3", null, h("a", { href: at("episode", group.position, reply.member, reply.attempt) }, replyName(reply))), facts.status !== "completed" && statusBadge(facts.status), chip,
      isKnown(facts.advantage) && h("span", { class: "advantage", title: "mean advantage" }, formatSigned(facts.advantage))),
    h("p", { class: "sub" }, sizes.filter(Boolean).join(" · ")), metricFacts(facts.metrics), errorBlock(error), drawMessages(messages, { limit: COLUMN_LIMIT_CHARS }),
    Object.keys(info ?? {}).length > 0 && fold("Info", metricFacts(info)));
}

function drawPicker(replies, diff) {
  const options = [["", "–"], ...replies.map((reply) => [reply.key, `${replyName(reply)} (${formatReward(reply.facts.reward)})`])];
  const pair = (diff ?? ",").split(",");
  const choose = (index) => (key) => {
    pair[index] = key;
    if (pair[0] && pair[1]) setQuery({ diff: pair.join(",") });
  };
  const ends = `${replies[0].key},${replies.at(-1).key}`;
  return h("div", { class: "toolbar" }, h("button", { type: "button", class: "button", onclick: () => setQuery({ diff: diff ? null : ends }) }, diff ? "Show all replies" : "Best against worst"),
    field("Differences between", selectBox(options, pair[0], choose(0))), field("and", selectBox(options, pair[1], choose(1))));
}

function drawDifference(replies, diff) {
  const pair = diff.split(",").map((key) => replies.find((reply) => reply.key === key));
  if (pair.length !== 2 || pair.some((reply) => !reply)) return emptyNote("These replies are not in the group.");
  const sides = diffTexts(messagesText(pair[0].messages), messagesText(pair[1].messages));
  if (!sides) return emptyNote("The two replies are too long to compare.");
  return pair.map((reply, index) => h("article", { class: "column" }, h("header", null, h("h3", null, replyName(reply)), h("span", { class: "chip" }, formatReward(reply.facts.reward))),
    h("div", { class: "text prose", dir: "auto" }, sides[index].map(([text, isDifferent]) => (isDifferent ? h(index ? "ins" : "del", null, markInvisible(text)) : markInvisible(text))))));
}
