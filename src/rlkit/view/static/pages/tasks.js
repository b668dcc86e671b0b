/** All tasks of a run: how often each was played, how its rewards changed, and when it was first solved. */
import { sparkline } from "rlkit/plots";
import { apiPath, checkControl, choiceControl, envControl, formatReward, formatSigned, h, isKnown, loadPage, makeList,
  makeRow, makeRunView, meanReward, pageHead, plural, replace, runHash, sortRows, textControl, textLine,
  wordMatcher } from "rlkit/ui";

const HEADS = ["Task", ["Episodes", "num"], "Mean reward by step",
  ...["First", "Last", "Change", "First solved"].map((head) => [head, "num"])];
const SORTS = [
  ["", "name", ({ env, id }) => `${env} ${id}`], ["change", "most improved", ({ first, last }) => first - last],
  ["-change", "most worsened", ({ first, last }) => last - first],
  ["solved", "first solved", ({ solvedStep }) => solvedStep ?? Infinity],
  ["episodes", "most episodes", ({ episodes }) => -episodes], ["last", "lowest now", ({ last }) => last ?? Infinity],
];

export default async function showTasks([, id], query) {
  const page = await loadPage(id, query, apiPath("run", id, "tasks"));
  const list = makeList("Tasks", HEADS, (task) => drawTask(id, task));
  const summary = h("p.lead", { role: "status" });
  const draw = () => {
    const { q, env, unsolved, sort } = page.query;
    const isMatch = wordMatcher(q);
    const chosen = summariseTasks(page.data[0]).filter((task) => (!env || task.env === env)
      && !(unsolved && isKnown(task.solvedStep)) && isMatch(`${task.env} ${task.id}`));
    const solved = chosen.filter(({ solvedStep }) => isKnown(solvedStep)).length;
    replace(summary, `${plural(chosen.length, "task")}, ${solved} solved at least once`);
    list.show(sortRows(chosen, SORTS, sort), "No task matches.");
  };
  const toolbar = h("div.toolbar",
    textControl("Search", "q", query), envControl(summariseTasks(page.data[0]), query),
    choiceControl("Sort", "sort", SORTS, query),
    checkControl("Never solved", "unsolved", query));
  return makeRunView(page, "tasks", [["Tasks", "tasks"]], [pageHead("Tasks", summary, toolbar), list.node], draw);
}

/** Return the tasks of records: {env, id, episodes, steps: [{step, isEvaluation, members, mean}], …}. */
export function summariseTasks({ episodes }) {
  const rows = episodes.map(([kind, step, env, id, status, position, member, attempt, reward]) =>
    ({ isEvaluation: kind === "evaluation", step, env, id, status, position, member, attempt, reward }));
  const tasks = Map.groupBy(rows, ({ env, id }) => JSON.stringify([env, id]));
  return [...tasks.values()].map((members) => summariseTask({ env: members[0].env, id: members[0].id }, members));
}

function summariseTask(task, episodes) {
  const groups = Map.groupBy(episodes, ({ step, isEvaluation }) => `${step} ${isEvaluation}`);
  const steps = [...groups.values()].map((members) => {
    const [{ step, isEvaluation }] = members;
    return { step, isEvaluation, members, mean: meanReward(members) };
  });
  steps.sort((a, b) => a.step - b.step || b.isEvaluation - a.isEvaluation);
  const means = steps.map(({ mean }) => mean).filter(isKnown);
  const solvedStep = steps.find(({ members }) => members.some(({ reward }) => reward >= 1))?.step ?? null;
  const [first, last] = [means[0] ?? null, means.at(-1) ?? null];
  return { ...task, episodes: episodes.length, steps, means, solvedStep, first, last };
}

function drawTask(runId, { env, id, episodes, means, first, last, solvedStep }) {
  const change = isKnown(first) ? last - first : null;
  const link = h("a.row-link", { href: runHash(runId, "task", env, id) }, textLine(id, 120));
  const solved = isKnown(solvedStep) ? [`step ${solvedStep}`, "num"] : ["never", "num muted"];
  return makeRow([
    h("div.task-cell", link, h("div.sub", textLine(env))), [String(episodes), "num"],
    sparkline(means, Math.min(0, ...means), Math.max(1, ...means)),
    [formatReward(first), "num muted"], [formatReward(last), "num"],
    [h("span", { class: change > 0 ? "good" : change < 0 ? "bad" : "muted" }, formatSigned(change)), "num"], solved,
  ]);
}
