/** Evaluations of a run: scores with their intervals, by label and by task. */
import { load } from "rlkit/api";
import { drawChart } from "rlkit/chart";
import { intervalBar } from "rlkit/plots";
import {
  apiPath, choiceControl, emptyNote, formatReward, growRows, h, isKnown, makeHash, makeRow, makeRunView, makeTable, plural, replace,
  rewardClass, section, setQuery, textControl, textLine,
} from "rlkit/ui";

const ORDERS = [["", "as recorded"], ["better", "most improved"], ["worse", "most worsened"]];

/** Show the evaluations. */
export async function showEvaluations([, id], query) {
  const path = `${apiPath("run", id)}/evaluations`;
  const [run, data] = await Promise.all([load(apiPath("run", id)), load(path)]);
  let [evaluations, state, parts] = [data.evaluations, query, []];
  const [controls, body] = [h("div", { class: "toolbar" }), h("div", { class: "stack" })];
  const close = () => parts.forEach((part) => part.close());
  const draw = () => {
    close();
    const envs = [...new Set(evaluations.flatMap((evaluation) => evaluation.envs.map(({ env }) => env)))];
    parts = envs.map((env) => drawEnv(run, env, evaluations, state));
    replace(body, parts.length ? parts.map((part) => part.node) : emptyNote("No evaluation is recorded."));
    const steps = evaluations.map(({ step }) => [String(step), `step ${step}`]);
    const choice = { at: steps.at(-1)?.[0], ...state };
    replace(controls, choiceControl("Evaluation", "at", steps, choice), textControl("Task", "q", state), choiceControl("Sort tasks", "order", ORDERS, state));
  };
  const requery = (changed) => {
    const isNew = changed.at !== state.at;
    state = changed;
    if (isNew) draw();
    else parts.forEach((part) => part.filter(state));
  };
  const refresh = async () => {
    const latest = await load(path);
    if (latest.evaluations.length === evaluations.length) return;
    ({ evaluations } = latest);
    draw();
  };
  draw();
  const content = [h("div", { class: "page-head" }, h("h1", null, "Evaluations"), controls), body];
  return makeRunView(run, "evaluation", [["Evaluations", ["evaluations"]]], content, { watch: apiPath("run", id), refresh, requery, close });
}

function drawEnv(run, env, evaluations, query) {
  const rows = evaluations.flatMap(({ step, envs }) => envs.filter((row) => row.env === env).map((row) => ({ step, ...row })));
  const evaluation = rows.find(({ step }) => String(step) === query.at) ?? rows.at(-1);
  const column = (key) => rows.map((row) => row[key]);
  const hasInterval = column("low").some(isKnown);
  const series = [{ label: hasInterval ? "mean, 95 % interval" : "mean", colour: "c0", values: column("mean"), low: hasInterval ? column("low") : null, high: hasInterval ? column("high") : null }];
  const chart = drawChart({ title: evaluation.metric, x: column("step"), height: 200, onStep: (step) => setQuery({ at: step }), series });
  const tasks = drawTasks(run, env, rows, query);
  const score = h("p", { class: "lead" }, `Step ${evaluation.step}: `, h("b", null, formatReward(evaluation.mean)), isKnown(evaluation.low) && ` (${formatReward(evaluation.low)} to ${formatReward(evaluation.high)})`,
    ` over ${plural(evaluation.episodes, "episode")} · `, h("a", { href: makeHash(["run", run.id, "evaluation", String(evaluation.step)]) }, "all groups"));
  return { node: section(env, score, chart.node, drawLabels(evaluation), tasks.node), filter: tasks.filter, close: () => (chart.close(), tasks.close()) };
}

function drawLabels({ env, labels }) {
  if (!labels?.length) return null;
  const bounds = labels.flatMap(({ mean, low, high }) => [mean, low ?? mean, high ?? mean]);
  const [start, end] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const rows = labels.map((label) => h("tr", null, h("th", { scope: "row" }, textLine(label.label, 80)), h("td", { class: "wide-cell" }, intervalBar(label, start, end)),
    h("td", { class: "num" }, formatReward(label.mean)), h("td", { class: "num muted" }, isKnown(label.low) && `${formatReward(label.low)} to ${formatReward(label.high)}`), h("td", { class: "num" }, label.n)));
  return makeTable(`Scores of ${env} by label`, ["Label", "95 % interval", ["Mean", "num"], ["Interval", "num"], ["Tasks", "num"]], rows).node;
}

function drawTasks(run, env, rows, query) {
  const scores = new Map(rows.flatMap(({ tasks }) => tasks.map(([id]) => [id, rows.map(() => null)])));
  rows.forEach(({ tasks }, column) => tasks.forEach(([id, mean]) => (scores.get(id)[column] = mean)));
  const all = [...scores].map(([id, means]) => ({ id, means, change: (means.findLast(isKnown) ?? 0) - (means.find(isKnown) ?? 0) }));
  const range = [0, all.reduce((most, { means }) => Math.max(most, ...means), 1)];
  const table = makeTable(`Tasks of ${env}`, ["Task", ...rows.map(({ step }) => [String(step), "cell"])]);
  table.node.classList.add("matrix");
  const drawTask = ({ id, means }) => makeRow([h("a", { class: "row-link", href: makeHash(["run", run.id, "task", env, id]) }, textLine(id, 80)),
    ...means.map((mean) => [h("span", { class: `chip ${rewardClass(mean, range)}` }, isKnown(mean) && formatReward(mean)), "cell"])]);
  let stop = () => {};
  const filter = ({ q, order }) => {
    stop();
    const matches = all.filter(({ id }) => id.toLowerCase().includes((q ?? "").toLowerCase()));
    if (order) matches.sort((a, b) => (order === "worse" ? a.change - b.change : b.change - a.change));
    stop = growRows(table.body, matches, drawTask, "No task matches.");
  };
  filter(query);
  return { node: table.node, filter, close: () => stop() };
}
