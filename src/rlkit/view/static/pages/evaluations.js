/** Evaluations of a run: scores with their intervals, by label and by task. */
import { load } from "rlkit/api";
import { drawChart } from "rlkit/chart";
import { intervalBar } from "rlkit/plots";
import { apiPath, choiceControl, emptyNote, field, formatReward, growRows, h, isKnown, keepFocus, makeHash, makeRow,
  makeRunView, makeTable, plural, replace, replaceOptions, rewardClass, section, selectBox, setQuery, textControl,
  textLine } from "rlkit/ui";

const ORDERS = [["", "as recorded"], ["better", "most improved"], ["worse", "most worsened"]];

/** Show the evaluations. */
export async function showEvaluations([, id], query) {
  const path = apiPath("run", id, "evaluations");
  const [run, data] = await Promise.all([load(apiPath("run", id)), load(path)]);
  let { evaluations } = data;
  let parts = [];
  const picker = selectBox([], "", (at) => setQuery({ at }));
  const controls = h("div", { class: "toolbar" }, field("Evaluation", picker), textControl("Task", "q", query),
    choiceControl("Sort tasks", "order", ORDERS, query));
  const body = h("div", { class: "stack" });
  const close = () => parts.forEach((part) => part.close());
  const draw = () => {
    close();
    const envs = [...new Set(evaluations.flatMap((evaluation) => evaluation.envs.map(({ env }) => env)))];
    parts = envs.map((env) => drawEnv(run, env, evaluations, query));
    replace(body, parts.length ? parts.map(({ node }) => node) : emptyNote("No evaluation is recorded."));
    const steps = evaluations.map(({ step }) => [String(step), `step ${step}`]);
    replaceOptions(picker, steps, query.at ?? steps.at(-1)?.[0]);
  };
  const requery = (changed) => {
    const isNew = changed.at !== query.at;
    query = changed;
    if (isNew) draw();
    else parts.forEach((part) => part.filter(query));
  };
  const refresh = async () => {
    const count = evaluations.length;
    ({ evaluations } = await load(path));
    if (evaluations.length !== count) keepFocus(body, draw);
  };
  draw();
  const content = [h("div", { class: "page-head" }, h("h1", null, "Evaluations"), controls), body];
  const others = { refresh, requery, close };
  return makeRunView(run, "evaluation", [["Evaluations", ["evaluations"]]], content, others);
}

function drawEnv(run, env, evaluations, query) {
  const find = ({ step, envs }) => envs.filter((row) => row.env === env).map((row) => ({ step, ...row }));
  const rows = evaluations.flatMap(find);
  const evaluation = rows.find(({ step }) => String(step) === query.at) ?? rows.at(-1);
  const { step, metric, mean, low, high, episodes } = evaluation;
  const column = (key) => rows.map((row) => row[key]);
  const interval = { label: "mean, 95 % interval", low: column("low"), high: column("high") };
  const hasInterval = interval.low.some(isKnown);
  const series = [{ label: "mean", colour: "c0", values: column("mean"), ...(hasInterval && interval) }];
  const onStep = (at) => setQuery({ at });
  const chart = drawChart({ title: metric, x: column("step"), height: 200, onStep, series });
  const tasks = drawTasks(run, env, rows, query);
  const link = h("a", { href: makeHash(["run", run.id, "evaluation", String(step)]) }, "all groups");
  const range = isKnown(low) && ` (${formatReward(low)} to ${formatReward(high)})`;
  const score = h("p", { class: "lead" },
    `Step ${step}: `, h("b", null, formatReward(mean)), range, ` over ${plural(episodes, "episode")} · `, link);
  const node = section(textLine(env), score, chart.node, drawLabels(evaluation), tasks.node);
  return { node, filter: tasks.filter, close: () => (chart.close(), tasks.close()) };
}

function drawLabels({ env, labels }) {
  if (!labels?.length) return null;
  const bounds = labels.flatMap(({ mean, low, high }) => [mean, low ?? mean, high ?? mean]);
  const [start, end] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const rows = labels.map((row) => h("tr", null,
    h("th", { scope: "row" }, textLine(row.label, 80)), h("td", { class: "wide-cell" }, intervalBar(row, start, end)),
    h("td", { class: "num" }, formatReward(row.mean)),
    h("td", { class: "num muted" }, isKnown(row.low) && `${formatReward(row.low)} to ${formatReward(row.high)}`),
    h("td", { class: "num" }, row.n)));
  const heads = ["Label", "95 % interval", ["Mean", "num"], ["Interval", "num"], ["Tasks", "num"]];
  return makeTable(`Scores of ${env} by label`, heads, rows).node;
}

function drawTasks(run, env, rows, query) {
  const scores = new Map(rows.flatMap(({ tasks }) => tasks.map(([id]) => [id, rows.map(() => null)])));
  rows.forEach(({ tasks }, column) => tasks.forEach(([id, mean]) => (scores.get(id)[column] = mean)));
  const change = (means) => (means.findLast(isKnown) ?? 0) - (means.find(isKnown) ?? 0);
  const all = [...scores].map(([id, means]) => ({ id, means, change: change(means) }));
  const range = [0, all.reduce((most, { means }) => Math.max(most, ...means), 1)];
  const heads = ["Task", ...rows.map(({ step }) => [String(step), "cell"])];
  const table = makeTable(`Tasks of ${env}`, heads);
  table.node.classList.add("matrix");
  const drawTask = ({ id, means }) => makeRow([
    h("a", { class: "row-link", href: makeHash(["run", run.id, "task", env, id]) }, textLine(id, 80)),
    ...means.map((mean) =>
      [h("span", { class: `chip ${rewardClass(mean, range)}` }, isKnown(mean) && formatReward(mean)), "cell"]),
  ]);
  let stop = () => {};
  const filter = ({ q = "", order }) => {
    stop();
    const matches = all.filter(({ id }) => id.toLowerCase().includes(q.toLowerCase()));
    if (order) matches.sort((a, b) => (order === "worse" ? a.change - b.change : b.change - a.change));
    stop = growRows(table.body, matches, drawTask, "No task matches.");
  };
  filter(query);
  return { node: table.node, filter, close: () => stop() };
}
