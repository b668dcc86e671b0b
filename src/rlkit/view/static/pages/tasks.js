/** All tasks of a run: how often each was played, how its rewards changed, and when it was first solved. */
import { load } from "rlkit/api";
import { sparkline } from "rlkit/plots";
import {
  apiPath, checkControl, choiceControl, formatReward, formatSigned, growRows, h, isKnown, makeHash, makeRow, makeRunView, makeTable,
  meanOf, plural, replace, textControl, textLine,
} from "rlkit/ui";

const HEADS = ["Task", ["Episodes", "num"], "Mean reward by step", ["First", "num"], ["Last", "num"], ["Change", "num"], ["First solved", "num"]];
const SORTS = [["", "name"], ["change", "most improved"], ["-change", "most worsened"], ["solved", "first solved"], ["episodes", "most episodes"], ["last", "lowest now"]];
const STATUSES = ["completed", "truncated", "failed"];

/** Show the tasks. */
export async function showTasks([, id], query) {
  const [run, data] = await Promise.all([load(apiPath("run", id)), load(`${apiPath("run", id)}/tasks`)]);
  const tasks = summariseTasks(data);
  const table = makeTable("Tasks", HEADS);
  const summary = h("p", { class: "lead", role: "status" });
  let stop = () => {};
  const requery = (state) => {
    stop();
    const words = (state.q ?? "").toLowerCase();
    const chosen = tasks.filter((task) => (!state.env || task.env === state.env) && `${task.env} ${task.id}`.toLowerCase().includes(words) && (!state.unsolved || task.solvedStep === null));
    const solved = chosen.filter((task) => task.solvedStep !== null).length;
    replace(summary, `${plural(chosen.length, "task")}, ${solved} solved at least once`);
    stop = growRows(table.body, sortTasks(chosen, state.sort), (task) => drawTask(id, task), "No task matches.");
  };
  requery(query);
  const envs = [["", "all"], ...data.env.map((env) => [env, env])];
  const controls = [textControl("Search", "q", query), data.env.length > 1 && choiceControl("Environment", "env", envs, query), choiceControl("Sort", "sort", SORTS, query), checkControl("Never solved", "unsolved", query)];
  const content = [h("div", { class: "page-head" }, h("div", null, h("h1", null, "Tasks"), summary), h("div", { class: "toolbar" }, controls)), table.node];
  return makeRunView(run, "tasks", [["Tasks", ["tasks"]]], content, { requery, close: () => stop() });
}

/** Return the tasks of columnar records: {env, id, episodes, steps: [{step, isEvaluation, members, mean}], solvedStep, …}. */
export function summariseTasks(data) {
  const tasks = data.task.map(([env, id]) => ({ env: data.env[env], id, episodes: 0, bySteps: new Map(), solvedStep: null }));
  const columns = data.episodes;
  columns.step.forEach((step, row) => {
    const task = tasks[columns.task[row]];
    const isEvaluation = Boolean(columns.evaluation[row]);
    const key = `${isEvaluation ? "e" : "s"}${step}`;
    if (!task.bySteps.has(key)) task.bySteps.set(key, { step, isEvaluation, members: [] });
    const [reward, position] = [columns.reward[row], columns.position[row]];
    task.bySteps.get(key).members.push({ member: columns.member[row], attempt: columns.attempt[row], position, reward, status: STATUSES[columns.status[row]], tokens: null });
    task.episodes++;
    if (reward !== null && reward >= 1 && (task.solvedStep === null || step < task.solvedStep)) task.solvedStep = step;
  });
  return tasks.map(finishTask).filter((task) => task.episodes);
}

function finishTask(task) {
  const steps = [...task.bySteps.values()].sort((a, b) => a.step - b.step || b.isEvaluation - a.isEvaluation);
  for (const entry of steps) entry.mean = meanOf(entry.members.map(({ reward }) => reward));
  const means = steps.map(({ mean }) => mean).filter(isKnown);
  return { ...task, steps, means, first: means[0] ?? null, last: means.at(-1) ?? null };
}

function sortTasks(tasks, sort) {
  const change = (task) => (task.last ?? 0) - (task.first ?? 0);
  const key = { change: (task) => -change(task), "-change": change, solved: (task) => task.solvedStep ?? Infinity, episodes: (task) => -task.episodes, last: (task) => task.last ?? Infinity }[sort];
  return key ? tasks.toSorted((a, b) => key(a) - key(b)) : tasks.toSorted((a, b) => a.env.localeCompare(b.env) || a.id.localeCompare(b.id, "en", { numeric: true }));
}

function drawTask(runId, task) {
  const change = task.first === null ? null : task.last - task.first;
  return makeRow([
    h("div", { class: "task-cell" }, h("a", { class: "row-link", href: makeHash(["run", runId, "task", task.env, task.id]) }, textLine(task.id, 120)), h("div", { class: "sub" }, textLine(task.env))),
    [String(task.episodes), "num"], sparkline(task.means, Math.min(0, ...task.means), Math.max(1, ...task.means)), [formatReward(task.first), "num muted"], [formatReward(task.last), "num"],
    [h("span", { class: change > 0 ? "good" : change < 0 ? "bad" : "muted" }, formatSigned(change)), "num"], [task.solvedStep === null ? "never" : `step ${task.solvedStep}`, task.solvedStep === null ? "num muted" : "num"],
  ]);
}
