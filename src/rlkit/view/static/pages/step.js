/** The groups of a step or of an evaluation: one row a task, with the rewards of its members. */
import { isExport, load } from "rlkit/api";
import {
  apiPath, checkControl, choiceControl, field, formatCount, formatReward, growRows, h, isKnown, makeHash, makeRow, makeRunView, makeTable,
  meanOf, navigate, plural, replace, rewardChip, rewardRange, selectBox, stepPlace, textControl, textLine,
} from "rlkit/ui";

const HEADS = [["#", "num"], "Task", "Rewards", ["Mean", "num"], ["Tokens", "num"], "Taught"];
const STATUSES = [["", "any"], ["completed", "completed"], ["truncated", "truncated"], ["failed", "failed"]];
const SORTS = [["", "as played"], ["failures", "failures first"], ["mean", "lowest mean"], ["-mean", "highest mean"], ["spread", "largest spread"], ["tokens", "most tokens"]];

/** Show a step. */
export async function showStep([, id, kind, step], query) {
  const path = apiPath("run", id, kind, step);
  const [run, { groups }] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const range = rewardRange(groups.flatMap(({ members }) => members.map(({ reward }) => reward)));
  const state = { run, kind, step, groups, query, range, matches: null, stop: () => {} };
  const table = makeTable(`Groups of ${kind} ${step}`, HEADS);
  const summary = h("p", { class: "lead", role: "status" });
  const requery = async (changed) => {
    const isNewText = changed.text !== state.query.text;
    state.query = changed;
    if (isNewText) await searchReplies(state, path);
    drawGroups(state, table.body, summary);
  };
  if (query.text) await searchReplies(state, path);
  drawGroups(state, table.body, summary);
  const steps = kind === "step" ? run.steps_recorded : run.evaluations;
  const at = (number) => (isKnown(number) ? makeHash(["run", id, kind, String(number)]) : null);
  const picker = field("Go to", selectBox(steps.map((number) => [String(number), `${kind} ${number}`]), step, (number) => navigate(at(number))));
  const place = stepPlace(kind, step);
  const content = [h("div", { class: "page-head" }, h("div", null, h("h1", null, place[0]), summary), picker), drawFilters(groups, query), table.node, drawLegend()];
  const [previous, next] = [at(steps.findLast((number) => number < Number(step))), at(steps.find((number) => number > Number(step)))];
  return makeRunView(run, kind, [place], content, { previous, next, requery, close: () => state.stop() });
}

function drawLegend() {
  const entries = [["r4", "high"], ["r0", "low"], ["cut", "cut at a limit"], ["masked", "not trained on"], ["failed", "failed"]];
  return h("p", { class: "chips" }, entries.map(([kind, label]) => h("span", { class: `chip ${kind}` }, label)));
}

async function searchReplies(state, path) {
  if (!state.query.text || isExport) return void (state.matches = null);
  const { matches } = await load(`${path}/search?q=${encodeURIComponent(state.query.text)}`);
  state.matches = Map.groupBy(matches, ([position]) => position);
}

function drawFilters(groups, query) {
  const envs = [...new Set(groups.map((group) => group.env))].sort();
  return h("form", { class: "toolbar filters", onsubmit: (event) => event.preventDefault(), "aria-label": "Filters" },
    textControl("Task", "task", query), isExport ? h("p", { class: "sub" }, "Search in replies needs the server.") : textControl("Text in replies", "text", query),
    envs.length > 1 && choiceControl("Environment", "env", [["", "all"], ...envs.map((env) => [env, env])], query), choiceControl("Status", "status", STATUSES, query),
    textControl("Reward from", "low", query, { type: "number", step: "any" }), textControl("to", "high", query, { type: "number", step: "any" }),
    choiceControl("Sort", "sort", SORTS, query), checkControl("Mixed", "mixed", query), checkControl("Cut at a limit", "cut", query), checkControl("Taught", "taught", query));
}

function isMixed({ members }) {
  const [low, high] = rewardRange(members.filter(({ status }) => status !== "failed").map(({ reward }) => reward));
  return members.some(({ reward }) => isKnown(reward)) && high - low > 1e-9 * Math.max(1, Math.abs(high));
}

function memberMatcher({ status, low, high, cut }) {
  const [least, most] = [low ? Number(low) : -Infinity, high ? Number(high) : Infinity];
  return (member) => (!status || member.status === status) && (!cut || member.cut || member.status === "truncated")
    && ((!low && !high) || (member.reward !== null && member.reward >= least && member.reward <= most));
}

function filterGroups({ groups, query, matches }) {
  const matchesMember = memberMatcher(query);
  const words = (query.task ?? "").toLowerCase();
  return groups.filter((group) => (!query.env || group.env === query.env) && (!query.mixed || isMixed(group)) && (!query.taught || group.taught)
    && (!words || `${group.env} ${group.task}`.toLowerCase().includes(words)) && (!matches || matches.has(group.position)) && group.members.some(matchesMember));
}

function sortGroups(groups, sort) {
  const rewards = ({ members }) => members.map(({ reward }) => reward);
  const key = {
    failures: (group) => -1000 * group.members.filter(({ status }) => status === "failed").length - group.failed_attempts.length,
    mean: (group) => meanOf(rewards(group)) ?? Infinity, "-mean": (group) => -(meanOf(rewards(group)) ?? -Infinity),
    spread: (group) => rewardRange(rewards(group)).reduce((low, high) => low - high), tokens: (group) => -countTokens(group),
  }[sort];
  return key ? groups.toSorted((a, b) => key(a) - key(b)) : groups;
}

function countTokens(group) {
  return group.members.reduce((sum, member) => sum + member.tokens, 0);
}

function drawGroups(state, body, summary) {
  state.stop();
  const groups = sortGroups(filterGroups(state), state.query.sort);
  const episodes = groups.reduce((sum, group) => sum + group.members.length, 0);
  const mixed = groups.filter(isMixed).length;
  const taught = groups.filter((group) => group.taught).length;
  const total = groups.length === state.groups.length ? "" : ` of ${state.groups.length}`;
  replace(summary, `${plural(groups.length, "group")}${total}, ${plural(episodes, "episode")} · ${mixed} mixed${state.kind === "step" ? `, ${taught} taught` : ""}`);
  state.stop = growRows(body, groups, (group) => drawGroup(state, group), "No group matches.");
}

function drawGroup({ run, kind, step, range, matches, query }, group) {
  const at = (...parts) => makeHash(["run", run.id, kind, step, ...parts.map(String)]);
  const matchesMember = memberMatcher(query);
  const chips = group.members.map((member) => {
    const chip = rewardChip(member, range, at("episode", group.position, member.member, member.attempt));
    if (!matchesMember(member)) chip.classList.add("dim");
    return chip;
  });
  const failures = [...group.members, ...group.failed_attempts].filter((member) => member.error);
  const snippets = matches?.get(group.position)?.slice(0, 2).map(([, member, , snippet]) => h("div", { class: "sub" }, `member ${member}: `, textLine(snippet, 160)));
  const retries = group.failed_attempts.length;
  return makeRow([
    [String(group.position), "num muted"],
    h("div", { class: "task-cell" }, h("a", { class: "row-link", href: at("group", group.position) }, textLine(group.task, 90)),
      h("div", { class: "sub" }, textLine(group.env), retries > 0 && ` · ${plural(retries, "failed attempt")}`),
      failures.length > 0 && h("div", { class: "sub bad" }, textLine(failures[0].error, 140)), snippets),
    h("div", { class: "chips" }, chips), [formatReward(meanOf(group.members.map(({ reward }) => reward))), "num"], [formatCount(countTokens(group)), "num"],
    kind !== "step" ? "–" : group.taught ? "yes" : h("span", { class: "muted" }, "no", group.reason && [": ", textLine(group.reason, 60)]),
  ]);
}
