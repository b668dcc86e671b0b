/** One task across the steps of a run, and of a second run beside it. */
import { summariseTasks } from "rlkit/pages/tasks";
import { runColour } from "rlkit/panels";
import { apiPath, choiceControl, drawChart, emptyNote, errorBlock, factList, formatReward, formatSigned, h, isKnown,
  load, loadAll, loadPage, makeHash, makeRow, makeRunView, makeTable, meanReward, pageHead, plural, replace, rewardChip,
  rewardRange, runHash, swatch, textLine } from "rlkit/ui";

/** Show a task; `against` in the query names a run to compare with. */
export default async function showTask([, id, , env, taskId], query) {
  const pathsOf = (runId) => [apiPath("run", runId), apiPath("run", runId, "tasks")];
  const rival = query.against && (await loadAll(...pathsOf(query.against)).catch((error) => error));
  const ids = Array.isArray(rival) ? [id, query.against] : [id];
  const [{ runs }, page] = await Promise.all([load("runs"), loadPage(id, query, ...ids.flatMap(pathsOf))]);
  const others = runs.filter((run) => run.id !== id && run.envs.includes(env)).map(({ id: other }) => [other, other]);
  const choices = [["", "no other run"], ...others];
  const control = others.length > 0 && choiceControl("Compare with", "against", choices, { against: ids[1] });
  const head = pageHead(textLine(taskId, 160), h("p.lead", textLine(env)), control);
  const body = h("div.stack");
  const draw = (view) => {
    const sides = ids.map((_, place) => {
      const [run, data] = page.data.slice(2 * place);
      const tasks = summariseTasks(data).filter((task) => task.env === env);
      return { run, tasks, task: tasks.find((task) => task.id === taskId) ?? null };
    });
    replace(body, drawSides(sides));
    const [{ tasks, task }] = sides;
    const index = tasks.indexOf(task);
    const hashOf = (other) => other && makeHash(["run", id, "task", env, other.id], query);
    Object.assign(view, { previous: hashOf(tasks[index - 1]), next: hashOf(tasks[index + 1]) });
  };
  const places = [["Tasks", "tasks"], [taskId, "task", env, taskId]];
  return makeRunView(page, "tasks", places, [head, errorBlock(rival?.message), body], draw, { requery: null });
}

const membersOf = (task) => task.steps.flatMap(({ members }) => members);

function drawRewards(sides) {
  const steps = sides.flatMap(({ task }) => task?.steps ?? []);
  const x = [...new Set(steps.map(({ step }) => step))].sort((a, b) => a - b);
  const series = sides.map(({ run, task }, index) => {
    const byStep = new Map(task?.steps.map(({ step, mean }) => [step, mean]));
    const values = x.map((step) => byStep.get(step) ?? null);
    return { label: sides.length > 1 ? run.name : "mean", colour: runColour(index), values };
  });
  return drawChart({ title: "Mean reward of the task", x, series, height: 180 });
}

function drawSides(sides) {
  const isPair = sides.length > 1;
  const columns = sides.map((side, index) => side.task && drawSide(side, isPair && runColour(index)));
  return [
    !sides[0].task && emptyNote("This run has not played the task."), isPair && drawVerdict(sides),
    sides.some(({ task }) => task) && drawRewards(sides), h("div", { class: isPair ? "sides" : null }, columns),
  ];
}

function drawVerdict(sides) {
  if (!sides.every(({ task }) => task)) return emptyNote("Only one of the runs has played this task.");
  const [first, second] = sides.map(({ task }) => meanReward(membersOf(task)));
  const solved = sides.map(({ task }) => (task.solvedStep === null ? "never" : `step ${task.solvedStep}`));
  return factList([
    ["Mean reward, all episodes", `${formatReward(first)} against ${formatReward(second)}`],
    ["Difference", isKnown(first) && isKnown(second) ? formatSigned(first - second) : null],
    ["First solved", solved.join(" against ")],
  ]);
}

/** Draw the episodes of a run. colour: of the run, if it stands beside another. */
function drawSide({ run, task }, colour) {
  const solved = task.steps.find(({ step, members }) => step === task.solvedStep && members.some(isSolved));
  const range = rewardRange(membersOf(task));
  const rows = task.steps.map((entry) => drawEntry(run.id, entry, range, entry === solved));
  const name = h("a", { href: runHash(run.id) }, textLine(run.name));
  return h("section", { "aria-label": `Episodes of ${run.name}` },
    colour && h("h2", swatch(colour), " ", name, " ", h("span.muted", textLine(run.model ?? ""))),
    h("p.lead", plural(task.episodes, "episode"), " · ", describeSolution(solved)),
    makeTable(`Episodes of ${run.name} by step`, ["When", "Rewards", ["Mean", "num"], ""], rows));
}

const isSolved = ({ reward }) => reward >= 1;

function describeSolution({ isEvaluation, step, members } = {}) {
  if (!members) return "never solved";
  const isSingle = members.every(({ position }) => position === members[0].position);
  const solvers = members.filter(isSolved).map(({ position, member }) =>
    isSingle ? member : `${member} of group ${position}`);
  const place = `${isEvaluation ? "the evaluation of step" : "step"} ${step}`;
  return `first solved at ${place}, by ${solvers.length === 1 ? "member" : "members"} ${solvers.join(", ")}`;
}

function drawEntry(runId, { step, isEvaluation, members, mean }, range, isFirstSolved) {
  const kind = isEvaluation ? "evaluation" : "step";
  const at = (...parts) => runHash(runId, kind, step, ...parts);
  const hrefOf = ({ position, member, attempt }) => at("episode", position, member, attempt);
  return makeRow([
    h("a.row-link", { href: at("group", members[0].position) }, `${kind} ${step}`),
    h("div.chips", members.map((member) => rewardChip(member, range, hrefOf(member)))),
    [formatReward(mean), "num"], isFirstSolved ? h("b.good", "first solved") : "",
  ]);
}
