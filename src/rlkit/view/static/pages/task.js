/** One task across the steps of a run, and of a second run beside it. */
import { load } from "rlkit/api";
import { drawChart } from "rlkit/chart";
import { summariseTasks } from "rlkit/pages/tasks";
import { runColour } from "rlkit/panels";
import {
  apiPath, choiceControl, emptyNote, factList, formatReward, formatSigned, h, isKnown, makeHash, makeRow, makeRunView, makeTable, meanOf,
  plural, rewardChip, rewardRange, textLine,
} from "rlkit/ui";

/** Show a task; `against` in the query names a run to compare with. */
export async function showTask([, id, , env, taskId], query) {
  const ids = [id, query.against].filter(Boolean);
  const [{ runs }, ...sides] = await Promise.all([load("runs"), ...ids.map((runId) => loadSide(runId, env, taskId))]);
  const [{ run, task, tasks }] = sides;
  const others = runs.filter((other) => other.id !== id && other.envs.includes(env)).map((other) => [other.id, other.name]);
  const playedSides = sides.filter((side) => side.task);
  const chart = playedSides.length > 0 && drawRewards(playedSides);
  const content = [
    h("div", { class: "page-head" }, h("div", null, h("h1", null, textLine(taskId, 160)), h("p", { class: "lead" }, textLine(env))), others.length > 0 && choiceControl("Compare with", "against", [["", "no other run"], ...others], query)),
    !task && emptyNote("This run has not played the task."), sides.length > 1 && drawVerdict(sides), chart && chart.node,
    h("div", { class: sides.length > 1 ? "sides" : null }, sides.map((side, index) => side.task && drawSide(side, index, sides.length > 1))),
  ];
  const order = tasks.filter((other) => other.env === env);
  const index = order.findIndex((other) => other.id === taskId);
  const [previous, next] = [order[index - 1], order[index + 1]].map((other) => other && makeHash(["run", id, "task", env, other.id], query));
  return makeRunView(run, "tasks", [["Tasks", ["tasks"]], [taskId, ["task", env, taskId]]], content, { previous, next, close: () => chart && chart.close() });
}

async function loadSide(runId, env, taskId) {
  const [run, data] = await Promise.all([load(apiPath("run", runId)), load(`${apiPath("run", runId)}/tasks`)]);
  const tasks = summariseTasks(data);
  return { run, tasks, task: tasks.find((task) => task.env === env && task.id === taskId) ?? null };
}

function drawRewards(sides) {
  const x = [...new Set(sides.flatMap(({ task }) => task.steps.map(({ step }) => step)))].sort((a, b) => a - b);
  const series = sides.map(({ run, task }, index) => {
    const byStep = new Map(task.steps.map(({ step, mean }) => [step, mean]));
    return { label: sides.length > 1 ? run.name : "mean", colour: runColour(index), values: x.map((step) => byStep.get(step) ?? null) };
  });
  return drawChart({ title: "Mean reward of the task", x, series, height: 180 });
}

function drawVerdict(sides) {
  if (sides.some(({ task }) => !task)) return emptyNote("Only one of the runs has played this task.");
  const [first, second] = sides.map(({ task }) => meanOf(task.steps.flatMap(({ members }) => members.map(({ reward }) => reward))));
  return factList([["Mean reward, all episodes", `${formatReward(first)} against ${formatReward(second)}`], ["Difference", isKnown(first) && isKnown(second) ? formatSigned(first - second) : null],
    ["First solved", sides.map(({ task }) => (task.solvedStep === null ? "never" : `step ${task.solvedStep}`)).join(" against ")]]);
}

function drawSide({ run, task }, index, isPair) {
  const range = rewardRange(task.steps.flatMap(({ members }) => members.map(({ reward }) => reward)));
  const firstSolved = task.steps.find(({ step, members }) => step === task.solvedStep && members.some(({ reward }) => reward >= 1));
  const rows = task.steps.map((entry) => {
    const kind = entry.isEvaluation ? "evaluation" : "step";
    const at = (...parts) => makeHash(["run", run.id, kind, String(entry.step), ...parts.map(String)]);
    const chips = entry.members.map((member) => rewardChip(member, range, at("episode", member.position, member.member, member.attempt)));
    return makeRow([h("a", { class: "row-link", href: at("group", entry.members[0].position) }, `${kind} ${entry.step}`), h("div", { class: "chips" }, chips), [formatReward(entry.mean), "num"], entry === firstSolved ? h("b", { class: "good" }, "first solved") : ""]);
  });
  const solvers = firstSolved?.members.filter(({ reward }) => reward >= 1).map(({ member }) => member);
  return h("section", { "aria-label": `Episodes of ${run.name}` },
    isPair && h("h2", null, h("i", { class: "swatch", style: { background: `var(--${runColour(index)})` } }), " ", h("a", { href: makeHash(["run", run.id]) }, textLine(run.name)), " ", h("span", { class: "muted" }, textLine(run.model ?? ""))),
    h("p", { class: "lead" }, plural(task.episodes, "episode"), firstSolved ? ` · first solved at ${firstSolved.isEvaluation ? "the evaluation of step" : "step"} ${firstSolved.step}, by ${solvers.length === 1 ? "member" : "members"} ${solvers.join(", ")}` : " · never solved"),
    makeTable(`Episodes of ${run.name} by step`, ["When", "Rewards", ["Mean", "num"], ""], rows).node);
}
