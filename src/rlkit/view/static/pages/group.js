/** A group: the shared prompt once, the replies side by side in the order of their advantages. */
import { drawMessages, messagesText } from "rlkit/chat";
import { diffTexts } from "rlkit/diff";
import { apiPath, emptyNote, errorBlock, factList, field, fold, formatDuration, formatReward, formatSigned,
  formatTokens, h, isKnown, joinFacts, load, loadPage, makeRunView, memberName, metricFacts, pageHead, plural, replace,
  rewardChip, rewardRange, runHash, section, selectBox, setQuery, statusBadge, stepPlace, taskLead, textLine,
  trainingFacts } from "rlkit/ui";

const COLUMN_LIMIT_CHARS = 12_000;
const OPEN_PROMPT_CHARS = 4000;

export default async function showGroup([, id, kind, step, , position], query) {
  const [stepPath, path] = [[], ["group", position]].map((parts) => apiPath("run", id, kind, step, ...parts));
  const [page, { groups }] = await Promise.all([loadPage(id, query, path), load(stepPath)]);
  const at = (...parts) => runHash(id, kind, step, ...parts);
  const { members, prompt, replies } = page.data[0];
  const [failed, graded] = splitReplies(page.data[0]);
  const range = rewardRange(members);
  const articles = new Map(); // key of a reply → its article, which stays as it was opened
  const differences = new Map(); // two keys and the number of replies → what is shown, which keeps the selected text
  const drawColumn = (reply) => {
    if (!articles.has(reply.key)) articles.set(reply.key, drawReply(reply));
    const href = at("episode", position, reply.member, reply.attempt);
    replace(articles.get(reply.key).firstChild, drawReplyHead(reply, range, href));
    return articles.get(reply.key);
  };
  const findDifference = (replies, diff) => {
    const key = `${diff} ${replies.length}`;
    if (!differences.has(key)) differences.set(key, drawDifference(replies, diff));
    return differences.get(key);
  };
  const [head, picker] = [h("div"), makePicker([...graded, ...failed], graded)];
  const columns = h("div.columns", { tabIndex: 0, role: "region", "aria-label": "Replies" });
  const note = emptyNote("No reply is complete.");
  const draw = () => {
    const { data: [group], query: { diff } } = page;
    const [, current] = splitReplies(group);
    replace(head, drawHead(id, kind, group));
    picker.show(diff);
    columns.classList.toggle("two", Boolean(diff));
    const drawReplies = () => (current.length ? current.map(drawColumn) : [note]);
    const shown = diff ? findDifference([...current, ...failed], diff) : drawReplies();
    if (shown.some((column, index) => column !== columns.children[index])) replace(columns, shown);
  };
  const content = [
    head, prompt.length > 0 && section("Prompt", null, drawPrompt(prompt)),
    failed.length > 0 && section(plural(failed.length, "failed attempt"), null, failed.map((reply) =>
      fold([h("b", memberName(reply)), " ", h("span.bad", textLine(reply.error, 200))], drawColumn(reply)))),
    section("Replies", replies.length > 1 && picker.node, columns),
  ];
  const index = groups.findIndex((other) => other.position === Number(position));
  const [previous, next] = [groups[index - 1], groups[index + 1]].map((other) => other && at("group", other.position));
  const places = [stepPlace(kind, step), [`Group ${position}`, kind, step, "group", position]];
  return makeRunView(page, kind, places, content, draw, { previous, next });
}

/** Return the replies that failed, and the others, those with the largest advantage first. */
function splitReplies({ members, failed_attempts: failures, replies }) {
  const keyOf = ({ member, attempt }) => `${member}.${attempt}`;
  const facts = new Map([...members, ...failures].map((row) => [keyOf(row), row]));
  const order = ({ facts: { advantage, reward } }) => advantage ?? reward ?? -Infinity;
  const rows = replies.map((reply) => ({ ...reply, key: keyOf(reply), facts: facts.get(keyOf(reply)) }));
  rows.sort((a, b) => order(b) - order(a) || a.member - b.member || a.attempt - b.attempt);
  const isFailed = ({ facts: { status } }) => status === "failed";
  return [rows.filter(isFailed), rows.filter((reply) => !isFailed(reply))];
}

function drawHead(id, kind, group) {
  const facts = factList(trainingFacts(group, kind === "step"));
  return pageHead(textLine(group.task, 160), h("p.lead", taskLead(id, group)), facts);
}

function drawPrompt(messages) {
  const open = messagesText(messages).length < OPEN_PROMPT_CHARS;
  return fold(`${plural(messages.length, "message")}, shared by all replies`, drawMessages(messages), { open });
}

/** Draw a reply. Its header is empty. */
function drawReply({ messages, info, error, facts: { tokens, turns, seconds, cut, masked, metrics } }) {
  const sizes = joinFacts([
    isKnown(tokens) && formatTokens(tokens), turns > 1 && plural(turns, "turn"),
    isKnown(seconds) && formatDuration(seconds), cut && "cut at the limit", masked && "masked",
  ]);
  return h("article.column", { dataset: { row: "" } }, h("header"), h("p.sub", sizes),
    metricFacts(metrics), errorBlock(error), drawMessages(messages, { limit: COLUMN_LIMIT_CHARS }),
    Object.keys(info ?? {}).length > 0 && fold("Info", metricFacts(info)));
}

function drawReplyHead(reply, range, href) {
  const { status, advantage } = reply.facts;
  const mean = h("span.advantage", { title: "mean advantage" }, formatSigned(advantage));
  return [h("h3", h("a", { href }, memberName(reply))), status === "truncated" && statusBadge(status),
    rewardChip(reply.facts, range), isKnown(advantage) && mean];
}

/** Return {node, show(diff)}: the controls that choose two replies to compare; `graded` has the best first. */
function makePicker(replies, graded) {
  let chosen;
  const ends = `${graded[0]?.key},${graded.at(-1)?.key}`;
  const choose = () => {
    const pair = selects.map(({ value }) => value);
    if (pair.every(Boolean)) setQuery({ diff: pair.join(",") });
  };
  const options = replies.map((reply) => [reply.key, `${memberName(reply)} (${formatReward(reply.facts.reward)})`]);
  const selects = [0, 1].map(() => selectBox([["", "–"], ...options], "", choose));
  const onclick = () => setQuery({ diff: chosen ? null : ends });
  const button = h("button", { type: "button", class: "button", onclick });
  const show = (diff) => {
    const pair = diff?.split(",") ?? [];
    if (diff !== chosen) selects.forEach((select, index) => (select.value = pair[index] ?? ""));
    replace(button, diff ? "Show all replies" : "Best against worst");
    button.hidden = !diff && graded.length < 2;
    chosen = diff;
  };
  return { node: h("div.toolbar", button, field("Differences between", selects[0]), field("and", selects[1])), show };
}

function drawDifference(replies, diff) {
  const pair = diff.split(",").map((key) => replies.find((reply) => reply.key === key));
  if (pair.length !== 2 || !pair.every(Boolean)) return [emptyNote("These replies are not in the group.")];
  const hasRoles = pair.some(({ messages }) => messages.length > 1);
  const sides = diffTexts(...pair.map(({ messages }) => messagesText(messages, hasRoles)));
  if (!sides) return [emptyNote("The two replies are too long to compare.")];
  return pair.map((reply, index) => {
    const chip = h("span.chip", formatReward(reply.facts.reward));
    const text = sides[index].map(([part, isDifferent]) => (isDifferent ? h(index ? "ins" : "del", null, part) : part));
    return h("article.column", h("header", h("h3", memberName(reply)), chip),
      h("div.text.prose", { dir: "auto" }, text));
  });
}
