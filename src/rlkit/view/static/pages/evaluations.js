/** Evaluations of a run: scores with their intervals, by label and by task. */

import { load } from "rlkit/api";
import { drawChart } from "rlkit/chart";
import { debounce, h, replace } from "rlkit/dom";
import { formatReward, plural } from "rlkit/format";
import { runTabs } from "rlkit/pages/run";
import { emptyNote, field, rewardClass, runCrumbs, section, selectBox } from "rlkit/parts";
import { intervalBar } from "rlkit/plots";
import { apiPath, makeHash, setQuery } from "rlkit/route";
import { growRows, makeRow, makeTable } from "rlkit/table";
import { textLine } from "rlkit/text";

/** Show the evaluations. */
export async function showEvaluations([, id], query) {
  const path = `${apiPath("run", id)}/evaluations`;
  let [run, { evaluations }] = await Promise.all([load(apiPath("run", id)), load(path)]);
  const body = h("div");
  let parts = [];
  const close = () => parts.forEach((part) => part.close());
  const draw = (state) => {
    close();
    const envs = [...new Set(evaluations.flatMap((evaluation) => evaluation.envs.map(({ env }) => env)))];
    parts = envs.map((env) => drawEnv(run, env, evaluations, state));
    replace(body, parts.length ? parts.map((part) => part.node) : emptyNote("No evaluation is recorded."));
  };
  let current = query;
  const requery = (state) => {
    const isNew = state.at !== current.at;
    const isFilter = state.q !== current.q || state.order !== current.order;
    current = state;
    if (isNew) draw(state);
    else if (isFilter) parts.forEach((part) => part.filter(state));
  };
  draw(query);
  const refresh = async (changed) => {
    run = changed;
    const latest = await load(path);
    if (latest.evaluations.length === evaluations.length) return;
    ({ evaluations } = latest);
    draw(current);
  };
  const node = h("div", { class: "page" }, runTabs(run, "evaluations"), h("h1", null, "Evaluations"), body);
  return { title: `Evaluations, ${run.name}`, node, crumbs: runCrumbs(run, ["Evaluations", makeHash(["run", id, "evaluations"])]), up: makeHash(["run", id]), watch: apiPath("run", id), refresh, requery, close };
}

function drawEnv(run, env, evaluations, query) {
  const present = evaluations.flatMap(({ step, envs }) => envs.filter((one) => one.env === env).map((one) => ({ step, ...one })));
  const shown = present.find(({ step }) => String(step) === query.at) ?? present.at(-1);
  const column = (key) => present.map((one) => one[key]);
  const hasInterval = column("low").some((low) => low !== null);
  const title = `${env}: ${shown.metric}`;
  const chart = drawChart({ title, x: column("step"), height: 200, onStep: (step) => setQuery({ at: step }),
    series: [{ label: hasInterval ? "mean, 95 % interval" : "mean", colour: "c0", values: column("mean"), low: hasInterval ? column("low") : null, high: hasInterval ? column("high") : null }] });
  const tasks = drawTasks(run, env, present, query);
  const pick = field("Evaluation", selectBox(present.map(({ step }) => [String(step), `step ${step}`]), String(shown.step), (at) => setQuery({ at })));
  const node = section(env, { aside: pick }, chart.node,
    h("p", { class: "lead" }, `Step ${shown.step}: `, h("b", null, formatReward(shown.mean)), shown.low !== null && ` (${formatReward(shown.low)} to ${formatReward(shown.high)})`, ` over ${plural(shown.episodes, "episode")} · `, h("a", { href: makeHash(["run", run.id, "evaluation", String(shown.step)]) }, "all groups")),
    drawLabels(shown), tasks.node);
  return { node, filter: tasks.filter, close: () => (chart.close(), tasks.close()) };
}

function drawLabels({ labels }) {
  if (!labels?.length) return null;
  const bounds = labels.flatMap(({ mean, low, high }) => [mean, low ?? mean, high ?? mean]);
  const [start, end] = [Math.min(0, ...bounds), Math.max(1, ...bounds)];
  const rows = labels.map((label) => h("tr", null, h("th", { scope: "row" }, textLine(label.label, 80)), h("td", { class: "wide-cell" }, intervalBar(label, start, end)),
    h("td", { class: "num" }, formatReward(label.mean)), h("td", { class: "num muted" }, label.low === null ? "" : `${formatReward(label.low)} to ${formatReward(label.high)}`), h("td", { class: "num" }, label.n)));
  return makeTable("Scores by label", ["Label", "95 % interval", ["Mean", "num"], ["Interval", "num"], ["Tasks", "num"]], rows).node;
}

function drawTasks(run, env, present, query) {
  const scores = new Map();
  present.forEach(({ tasks }, column) => tasks.forEach(([id, mean]) => {
    if (!scores.has(id)) scores.set(id, Array(present.length).fill(null));
    scores.get(id)[column] = mean;
  }));
  const all = [...scores].map(([id, means]) => ({ id, means, change: (means.at(-1) ?? 0) - (means.find((mean) => mean !== null) ?? 0) }));
  const range = [0, Math.max(1, ...all.flatMap(({ means }) => means.filter((mean) => mean !== null)))];
  const table = makeTable(`Tasks of ${env}`, ["Task", ...present.map(({ step }) => [String(step), "cell"])]);
  table.node.classList.add("matrix");
  let stop = () => {};
  const filter = ({ q, order }) => {
    stop();
    const matches = all.filter(({ id }) => id.toLowerCase().includes((q ?? "").toLowerCase()));
    if (order) matches.sort((a, b) => (order === "worse" ? a.change - b.change : b.change - a.change));
    stop = growRows(table.body, matches, ({ id, means }) => makeRow([h("a", { class: "row-link", href: makeHash(["run", run.id, "task", env, id]) }, textLine(id, 80)),
      ...means.map((mean) => [h("span", { class: `chip ${rewardClass(mean, range)}` }, mean === null ? "" : formatReward(mean)), "cell"])]));
  };
  filter(query);
  const search = h("input", { type: "search", value: query.q ?? "", oninput: debounce((event) => setQuery({ q: event.target.value }), 100) });
  const order = selectBox([["", "as recorded"], ["better", "most improved"], ["worse", "most worsened"]], query.order ?? "", (value) => setQuery({ order: value }));
  return { node: h("div", null, h("div", { class: "toolbar" }, field("Task", search), field("Sort", order)), table.node), filter, close: () => stop() };
}
