/** Evaluations of a run: scores with their intervals, by label and by task. */
import { summariseTasks } from "rlkit/pages/tasks";
import { intervalBar } from "rlkit/plots";
import { apiPath, choiceControl, drawChart, emptyNote, field, formatReward, h, isKnown, loadPage, makeHeadedRow,
  makeList, makeRow, makeRunView, makeTable, pageHead, plural, replace, replaceOptions, rewardClass, runHash, section,
  selectBox, setQuery, sortRows, textControl, textLine, wordMatcher } from "rlkit/ui";

const ORDERS = [
  ["", "as recorded"], ["better", "most improved", ({ change }) => -change],
  ["worse", "most worsened", ({ change }) => change],
];
const LOW = /^eval\/([^/]+)\/(?:(.+\/.+)\/)?(.+)\/low$/; // environment, label and its value, name of the score

export default async function showEvaluations([, id], query) {
  const paths = ["metrics", "evaluations"].map((part) => apiPath("run", id, part));
  const page = await loadPage(id, query, ...paths);
  let shown = null; // the query, and the number of evaluations
  const picker = selectBox([], "", (at) => setQuery({ at }));
  const controls = h("div.toolbar", field("Evaluation", picker), textControl("Task", "q", query),
    choiceControl("Sort tasks", "order", ORDERS, query));
  const body = h("div.stack");
  const draw = () => {
    const { run, data, query } = page;
    const envs = summariseEnvs(...data);
    const steps = [...new Set(envs.flatMap(({ rows }) => rows.map(({ step }) => step)))].sort((a, b) => a - b);
    if (query === shown?.query && steps.length === shown.count) return;
    shown = { query, count: steps.length };
    const sections = envs.map((each) => drawEnv(run, each, query));
    replace(body, sections.length ? sections : emptyNote("No evaluation is recorded."));
    replaceOptions(picker, steps.map((step) => [String(step), `step ${step}`]), query.at ?? steps.at(-1));
  };
  const content = [pageHead("Evaluations", null, controls), body];
  return makeRunView(page, "evaluation", [["Evaluations", "evaluations"]], content, draw);
}

/** Return {env, tasks, rows} of each environment; a row is the score of an evaluation, with those of its labels. */
function summariseEnvs({ step: metricSteps, metrics }, data) {
  const scoreNames = Object.keys(metrics).map((name) => LOW.exec(name)).filter(Boolean);
  return [...Map.groupBy(summariseTasks(data), ({ env }) => env)].map(([env, tasks]) => {
    const members = Map.groupBy(tasks.flatMap(({ steps }) => steps), ({ step }) => step);
    const rows = [...members.keys()].sort((a, b) => a - b).map((step) => {
      const place = metricSteps.indexOf(step);
      const read = (name) => metrics[name]?.[place] ?? null;
      const scores = scoreNames.filter(([name, owner]) => owner === env && isKnown(read(name)))
        .map(([name, , label, metric]) => {
          const [mean, low, high] = ["", "/low", "/high"].map((end) => read(name.replace(/\/low$/, end)));
          return { label, metric, mean, low, high, n: read(`eval/${env}/${label}/tasks`) };
        });
      const reward = { metric: "reward/mean", mean: read(`eval/${env}/reward/mean`), low: null, high: null };
      const main = scores.find(({ label }) => !label) ?? reward;
      const labels = scores.filter(({ label, metric }) => label && metric === main.metric);
      const episodes = members.get(step).reduce((sum, each) => sum + each.members.length, 0);
      return { ...main, step, episodes, labels, reward: reward.mean };
    });
    return { env, tasks, rows };
  });
}

function drawEnv(run, { env, tasks, rows }, query) {
  const evaluation = rows.find(({ step }) => String(step) === query.at) ?? rows.at(-1);
  const { step, metric, mean, low, high, episodes, labels, reward } = evaluation;
  const column = (key) => rows.map((row) => row[key]);
  const interval = { label: "mean, 95 % interval", low: column("low"), high: column("high") };
  const hasInterval = interval.low.some(isKnown);
  const series = [{ label: "mean", colour: "var(--c0)", values: column("mean"), ...(hasInterval && interval) }];
  const chart = drawChart({ title: metric, x: column("step"), height: 200, onStep: (at) => setQuery({ at }), series });
  const table = drawTasks(run, env, tasks, column("step"), query);
  const link = h("a", { href: runHash(run.id, "evaluation", step) }, "all groups");
  const range = isKnown(low) && ` (${formatReward(low)} to ${formatReward(high)})`;
  const isReward = metric === "reward/mean";
  const rewardText = !isReward && `, mean reward ${formatReward(reward)}`;
  const score = h("p.lead", `Step ${step}: ${isReward ? "mean reward" : metric} `, h("b", formatReward(mean)), range,
    rewardText, `, ${plural(episodes, "episode")} · `, link);
  return section(textLine(env), score, rows.length > 1 && chart, drawLabels(env, labels), table);
}

function drawLabels(env, labels) {
  if (!labels.length) return null;
  const bounds = labels.flatMap(({ mean, low, high }) => [mean, low ?? mean, high ?? mean]);
  const [start, end] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const rows = labels.map((row) => makeHeadedRow([textLine(row.label, 80)], [intervalBar(row, start, end), "wide-cell"],
    [formatReward(row.mean), "num"],
    [isKnown(row.low) && `${formatReward(row.low)} to ${formatReward(row.high)}`, "num muted"], [row.n, "num"]));
  const heads = ["Label", "95 % interval", ["Mean", "num"], ["Interval", "num"], ["Tasks", "num"]];
  return makeTable(`Scores of ${env} by label`, heads, rows);
}

function drawTasks(run, env, tasks, steps, { q, order }) {
  const all = tasks.map((task) => {
    const means = new Map(task.steps.map(({ step, mean }) => [step, mean]));
    return { id: task.id, change: task.last - task.first, means: steps.map((step) => means.get(step) ?? null) };
  });
  const range = [0, all.reduce((most, { means }) => Math.max(most, ...means), 1)];
  const drawTask = ({ id, means }) => makeRow([
    h("a.row-link", { href: runHash(run.id, "task", env, id) }, textLine(id, 80)),
    ...means.map((mean) => [h("span", { class: `chip ${rewardClass(mean, range)}` }, formatReward(mean)), "cell"]),
  ]);
  const list = makeList(`Tasks of ${env}`, ["Task", ...steps.map((step) => [String(step), "cell"])], drawTask);
  list.node.classList.add("matrix");
  const isMatch = wordMatcher(q);
  list.show(sortRows(all.filter(({ id }) => isMatch(id)), ORDERS, order), "No task matches.");
  return list.node;
}
