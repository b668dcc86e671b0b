/** The groups of a step or of an evaluation: one row a task, with the rewards of its members. */

import { isExport, load } from "rlkit/api";
import { debounce, h, replace } from "rlkit/dom";
import { formatCount, formatReward, plural } from "rlkit/format";
import { runTabs } from "rlkit/pages/run";
import { emptyNote, field, rewardChip, rewardRange, runCrumbs, selectBox } from "rlkit/parts";
import { apiPath, makeHash, navigate, setQuery } from "rlkit/route";
import { growRows, makeRow, makeTable } from "rlkit/table";
import { textLine } from "rlkit/text";

const HEADS = [["#", "num"], "Task", "Rewards", ["Mean", "num"], ["Tokens", "num"], "Taught"];
const SORTS = [["", "as played"], ["failures", "failures first"], ["mean", "lowest mean"], ["-mean", "highest mean"], ["spread", "largest spread"], ["tokens", "most tokens"]];

/** Show a step. */
export async function showStep([, id, kind, step], query) {
  const path = apiPath("run", id, kind, step);
  const [run, data] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const state = { run, kind, step, groups: data.groups, query, matches: null, stop: () => {} };
  state.range = rewardRange(data.groups.flatMap((group) => group.members.map((member) => member.reward)));
  const table = makeTable(`Groups of ${kind} ${step}`, HEADS);
  const summary = h("p", { class: "lead", role: "status" });
  const draw = () => drawGroups(state, table.body, summary);
  const requery = async (changed) => {
    const isNewText = changed.text !== state.query.text;
    state.query = changed;
    if (isNewText) await searchReplies(state, path);
    draw();
  };
  if (query.text) await searchReplies(state, path);
  draw();
  const node = h("div", { class: "page" }, runTabs(run, kind === "step" ? "step" : "evaluations"),
    h("div", { class: "page-head" }, h("div", null, h("h1", null, kind === "step" ? `Step ${step}` : `Evaluation at step ${step}`), summary), stepPicker(run, kind, step)),
    drawFilters(state), table.node);
  const { previous, next } = neighbourSteps(run, kind, Number(step));
  const hash = makeHash(["run", id, kind, step]);
  return { title: `${kind} ${step}, ${run.name}`, node, crumbs: runCrumbs(run, [`${kind === "step" ? "Step" : "Evaluation"} ${step}`, hash]), up: makeHash(["run", id]), previous, next, requery, close: () => state.stop() };
}

function recordedSteps(run, kind) {
  return kind === "step" ? run.steps_recorded : run.evaluations;
}

function neighbourSteps(run, kind, step) {
  const steps = recordedSteps(run, kind);
  const at = (number) => (number === undefined ? null : makeHash(["run", run.id, kind, String(number)]));
  return { previous: at(steps.findLast((number) => number < step)), next: at(steps.find((number) => number > step)) };
}

function stepPicker(run, kind, step) {
  const go = (number) => navigate(makeHash(["run", run.id, kind, number]));
  return field("Go to", selectBox(recordedSteps(run, kind).map((number) => [String(number), `${kind} ${number}`]), step, go));
}

async function searchReplies(state, path) {
  if (!state.query.text || isExport) return void (state.matches = null);
  const { matches } = await load(`${path}/search?q=${encodeURIComponent(state.query.text)}`);
  state.matches = new Map();
  for (const [position, member, attempt, snippet] of matches) {
    if (!state.matches.has(position)) state.matches.set(position, []);
    state.matches.get(position).push({ member, attempt, snippet });
  }
}

function drawFilters({ groups, query }) {
  const envs = [...new Set(groups.map((group) => group.env))].sort();
  const typed = (key) => debounce((event) => setQuery({ [key]: event.target.value }), 150);
  const number = (key, label) => field(label, h("input", { type: "number", step: "any", value: query[key] ?? "", oninput: typed(key) }));
  const check = (key, label) => h("label", { class: "field check" }, h("input", { type: "checkbox", checked: Boolean(query[key]), onchange: (event) => setQuery({ [key]: event.target.checked }) }), h("span", null, label));
  const statuses = [["", "any"], ["completed", "completed"], ["truncated", "truncated"], ["failed", "failed"]];
  return h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault(), "aria-label": "Filters" },
    field("Task", h("input", { type: "search", value: query.task ?? "", oninput: typed("task") })),
    isExport ? h("span", { class: "muted" }, "Search in replies needs the server.") : field("Text in replies", h("input", { type: "search", value: query.text ?? "", oninput: typed("text") })),
    envs.length > 1 && field("Environment", selectBox([["", "all"], ...envs.map((env) => [env, env])], query.env ?? "", (env) => setQuery({ env }))),
    field("Status", selectBox(statuses, query.status ?? "", (status) => setQuery({ status }))),
    number("low", "Reward from"), number("high", "to"), check("mixed", "Mixed only"), check("cut", "Cut at the limit"), check("taught", "Taught only"),
    field("Sort", selectBox(SORTS, query.sort ?? "", (sort) => setQuery({ sort }))));
}

function isMixed(group) {
  const [low, high] = rewardRange(group.members.filter(({ status }) => status !== "failed").map(({ reward }) => reward));
  return group.members.length > 1 && high - low > 1e-9 * Math.max(1, Math.abs(high)) && group.members.some(({ reward }) => reward !== null);
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

/** Return the mean reward of a group, or null. */
export function meanReward(members) {
  const rewards = members.map(({ reward }) => reward).filter((reward) => reward !== null && reward !== undefined);
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
}

function sortGroups(groups, sort) {
  const failures = (group) => group.members.filter(({ status }) => status === "failed").length * 1000 + group.failed_attempts.length;
  const spread = (group) => rewardRange(group.members.map(({ reward }) => reward)).reduce((low, high) => high - low);
  const tokens = (group) => group.members.reduce((sum, member) => sum + member.tokens, 0);
  const keys = { failures: (group) => -failures(group), mean: (group) => meanReward(group.members) ?? Infinity, "-mean": (group) => -(meanReward(group.members) ?? -Infinity), spread: (group) => -spread(group), tokens: (group) => -tokens(group) };
  const key = keys[sort];
  return key ? groups.toSorted((a, b) => key(a) - key(b)) : groups;
}

function drawGroups(state, body, summary) {
  state.stop();
  const groups = sortGroups(filterGroups(state), state.query.sort);
  const episodes = groups.reduce((sum, group) => sum + group.members.length, 0);
  const mixed = groups.filter(isMixed).length;
  const taught = groups.filter((group) => group.taught).length;
  const shown = groups.length === state.groups.length ? "" : ` of ${state.groups.length}`;
  replace(summary, `${plural(groups.length, "group")}${shown}, ${plural(episodes, "episode")} · ${mixed} mixed${state.kind === "step" ? `, ${taught} taught` : ""}`);
  state.stop = growRows(body, groups, (group) => drawGroup(state, group));
  if (!groups.length) body.append(h("tr", null, h("td", { colSpan: HEADS.length }, emptyNote("No group matches."))));
}

function drawGroup({ run, kind, step, range, matches, query }, group) {
  const at = (...parts) => makeHash(["run", run.id, kind, step, ...parts.map(String)]);
  const matchesMember = memberMatcher(query);
  const chips = group.members.map((member) => {
    const chip = rewardChip(member, range, at("episode", group.position, member.member, member.attempt));
    if (!matchesMember(member)) chip.classList.add("dim");
    return chip;
  });
  const errors = group.members.find((member) => member.error)?.error ?? group.failed_attempts.find((member) => member.error)?.error;
  const snippets = matches?.get(group.position)?.slice(0, 2).map(({ member, snippet }) => h("div", { class: "sub" }, `member ${member}: `, textLine(snippet, 160)));
  const retries = group.failed_attempts.length;
  return makeRow([
    [String(group.position), "num muted"],
    h("div", { class: "task-cell" }, h("a", { class: "row-link", href: at("group", group.position) }, textLine(group.task, 90)), h("div", { class: "sub" }, textLine(group.env), retries > 0 && ` · ${plural(retries, "failed attempt")}`),
      errors && h("div", { class: "sub bad" }, textLine(errors, 140)), snippets),
    h("div", { class: "chips" }, chips), [formatReward(meanReward(group.members)), "num"], [formatCount(group.members.reduce((sum, member) => sum + member.tokens, 0)), "num"], taughtCell(kind, group),
  ]);
}

function taughtCell(kind, group) {
  if (kind !== "step") return "–";
  return group.taught ? h("span", { class: "taught" }, "yes") : h("span", { class: "muted" }, "no", group.reason && [": ", textLine(group.reason, 60)]);
}
