/** Curves of one or several runs: standard panels, any metric by search, smoothing, logarithmic scale. */
import { makePanels, metricEnvs, runColour, smoothValues } from "rlkit/panels";
import { checkControl, choiceControl, drawChart, emptyNote, field, h, memberBox, replace, runHash, splitIds,
  textControl, textLine, wordMatcher } from "rlkit/ui";

const MATCHES = 40;
const STACK_COLOURS = ["--c0", "--c2", "--c1"];
const DASHES = [[], [7, 4], [2, 3]]; // of the series of a panel, if the colours tell runs apart

/** Return {node, show(sources, query)}; sources: [{run, metrics}] as the API returns them, several are overlaid. */
export function makeCurves() {
  const grid = h("div.chart-grid");
  const controls = h("div.toolbar");
  let count = null; // of the metrics that the controls offer
  const show = (sources, query) => {
    const metrics = allMetrics(sources);
    if (Object.keys(metrics).length !== count) replace(controls, listControls(metrics, query));
    count = Object.keys(metrics).length;
    replace(grid, choosePanels(sources, query).map((panel) => drawPanel(panel, sources, query)));
  };
  return { node: h("div", controls, grid), show };
}

const allMetrics = (sources) => Object.assign({}, ...sources.map(({ metrics }) => metrics.metrics));

function choosePanels(sources, query) {
  const metrics = allMetrics(sources);
  const env = query.env ?? metricEnvs(metrics)[0] ?? "all";
  const makePanel = (name) => ({ title: name, series: [{ label: "", name }], findings: [] });
  const chosenPanels = chosenMetrics(query).filter((name) => name in metrics).map(makePanel);
  return [...chosenPanels, ...makePanels(env, sources[0].run.evaluation?.metric, metrics)];
}

const chosenMetrics = (query) => splitIds(query.m ?? "");

function listControls(metrics, query) {
  const envs = metricEnvs(metrics).map((name) => [name, name]);
  return [
    metricSearch(Object.keys(metrics).sort(), query),
    envs.length > 2 && choiceControl("Environment", "env", envs, { env: envs[0][0], ...query }),
    textControl("Smoothing", "smooth", query, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 }),
    checkControl("Log scale", "log", query),
  ];
}

function metricSearch(names, query) {
  const list = h("div.matches", { tabIndex: -1 }); // a click on a label leaves the focus inside
  const chosen = new Set(chosenMetrics(query));
  const drawMatch = (name) => h("label", memberBox(chosen, name, "m"), textLine(name));
  const oninput = ({ target }) => {
    const matches = names.filter(wordMatcher(target.value));
    const left = matches.length - MATCHES;
    const note = matches.length ? left > 0 && `${left} more` : "No metric has this name.";
    replace(list, target.value.trim() && [matches.slice(0, MATCHES).map(drawMatch), note && emptyNote(note)]);
  };
  const props = { type: "search", placeholder: `${names.length} metrics`, "aria-describedby": "metric-help", oninput };
  const onkeydown = ({ key }) => key === "Escape" && replace(list);
  const help = h("span", { id: "metric-help", class: "hidden" }, "Chosen metrics are drawn first.");
  const search = field("Metric", h("input", props));
  return h("div.metric-search", { onkeydown }, search, list, help);
}

function drawPanel(panel, sources, query) {
  const { title, least } = panel;
  const isLog = Boolean(query.log);
  const x = [...new Set(sources.flatMap(({ metrics }) => metrics.step))].sort((a, b) => a - b);
  const curves = makeSeries(panel, sources, x, Number(query.smooth ?? 0));
  if (sources.length > 1) return drawChart({ title, x, series: curves, isLog, least });
  const [{ run }] = sources;
  const largest = Math.max(...curves.flatMap(({ values }) => values.filter(Number.isFinite)));
  const guides = isLog ? [] : (panel.guides ?? []).filter((guide) => guide < 3 * largest);
  const markers = (run.findings ?? []).filter(({ name }) => panel.findings?.includes(name) ?? true);
  const series = panel.isStacked ? stackSeries(curves) : curves;
  return drawChart({ title, x, series, isLog, least, guides, markers, onStep: (step) => openStep(run, panel, step) });
}

function openStep(run, panel, step) {
  const [kind, steps] = panel.isEvaluation ? ["evaluation", run.evaluations] : ["step", run.steps_recorded];
  if (steps.includes(step)) location.hash = runHash(run.id, kind, step);
}

/** Return a series for each run and each series of a panel; only those of a single run have bands. */
function makeSeries(panel, sources, x, weight) {
  const smooth = (values) => (weight && values ? smoothValues(values, weight) : values);
  return sources.flatMap(({ run, metrics: { step: steps, metrics } }, place) => {
    const rows = new Map(steps.map((step, row) => [step, row]));
    const column = (name) => metrics[name] && x.map((step) => metrics[name][rows.get(step)] ?? null);
    return panel.series.flatMap(({ label, name, low, high }, style) => {
      const raw = column(name);
      if (!raw) return [];
      const curve = { values: smooth(raw), raw: weight ? raw : null };
      return sources.length > 1
        ? { ...curve, label: run.id, kind: label, colour: runColour(place), dash: DASHES[style] }
        : { ...curve, label, colour: runColour(style), low: smooth(column(low)), high: smooth(column(high)) };
    });
  });
}

function stackSeries(series) {
  const total = [];
  const add = (value, step) => (value === null ? null : (total[step] = (total[step] ?? 0) + value));
  const stack = ({ label, values }, index) => {
    const [colour, area] = ["", "-area"].map((end) => `var(${STACK_COLOURS[index]}${end})`);
    return { label, values: values.map(add), parts: values, colour, area };
  };
  return series.map(stack).reverse(); // the tallest area is drawn first, the others in front of it
}
