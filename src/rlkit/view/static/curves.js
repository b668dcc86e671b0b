/** Curves of one or several runs: standard panels, any metric by search, smoothing, logarithmic scale. */
import { drawChart } from "rlkit/chart";
import { makePanels, metricEnvs, runColour, smoothValues } from "rlkit/panels";
import { checkControl, choiceControl, field, h, makeHash, navigate, replace, setQuery, textControl, textLine } from "rlkit/ui";

const MATCHES = 40;

/**
 * Return {node, requery, refresh, close} of the curves.
 * sources: [{run, metrics}] with `metrics` as the API returns them; several are overlaid.
 */
export function drawCurves(sources, query) {
  const state = { sources, query, charts: [] };
  const grid = h("div", { class: "chart-grid" });
  const controls = h("div", { class: "toolbar" });
  const draw = () => {
    state.charts.forEach((chart) => chart.close());
    state.charts = choosePanels(state).map((panel) => drawPanel(panel, state));
    replace(grid, state.charts.map((chart) => chart.node));
  };
  drawControls(controls, state);
  draw();
  return {
    node: h("div", null, controls, grid),
    requery(changed) {
      const isNew = ["env", "smooth", "log", "m"].some((key) => changed[key] !== state.query[key]);
      state.query = changed;
      if (isNew) draw();
    },
    refresh: (changed) => {
      if (Object.keys(allMetrics(changed)).length !== Object.keys(allMetrics(state.sources)).length) drawControls(controls, { ...state, sources: changed });
      state.sources = changed;
      draw();
    },
    close: () => state.charts.forEach((chart) => chart.close()),
  };
}

function allMetrics(sources) {
  return Object.assign({}, ...sources.map(({ metrics }) => metrics.metrics));
}

function choosePanels({ sources, query }) {
  const metrics = allMetrics(sources);
  const env = query.env ?? metricEnvs(metrics)[0] ?? "all";
  const chosen = chosenMetrics(query).filter((name) => name in metrics).map((name) => ({ id: name, title: name, series: [{ label: "", name }], findings: [] }));
  return [...chosen, ...makePanels(env, sources[0].run.evaluation?.metric, metrics)];
}

function chosenMetrics(query) {
  return (query.m ?? "").split(",").filter(Boolean);
}

function drawControls(node, { sources, query }) {
  const metrics = allMetrics(sources);
  const envs = metricEnvs(metrics).map((name) => [name, name]);
  replace(node, metricSearch(Object.keys(metrics).sort(), query), envs.length > 2 && choiceControl("Environment", "env", envs, { env: envs[0][0], ...query }),
    textControl("Smoothing", "smooth", query, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 }), checkControl("Log scale", "log", query));
}

function metricSearch(names, query) {
  const list = h("div", { class: "matches", hidden: true, tabIndex: -1 }); // a click on a label leaves the focus inside
  const chosen = new Set(chosenMetrics(query));
  const input = h("input", { type: "search", placeholder: `${names.length} metrics`, "aria-describedby": "metric-help" });
  const toggle = (name, isChosen) => {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    setQuery({ m: [...chosen].join(",") });
  };
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    list.hidden = !words.length;
    replace(list, matches.slice(0, MATCHES).map((name) => h("label", null,
      h("input", { type: "checkbox", checked: chosen.has(name), onchange: (event) => toggle(name, event.target.checked) }), textLine(name))),
    !matches.length && h("p", { class: "empty" }, "No metric has this name."),
    matches.length > MATCHES && h("p", { class: "empty" }, `${matches.length - MATCHES} more`));
  };
  input.addEventListener("input", show);
  const hide = (event) => event.key === "Escape" && (list.hidden = true);
  const leave = (event) => !box.contains(event.relatedTarget) && (list.hidden = true);
  const box = h("div", { class: "metric-search", onkeydown: hide, onfocusout: leave }, field("Metric", input), list,
    h("span", { id: "metric-help", class: "hidden" }, "Chosen metrics are drawn first."));
  return box;
}

function drawPanel(panel, { sources, query }) {
  const isSingle = sources.length === 1;
  const weight = Number(query.smooth ?? 0);
  const x = [...new Set(sources.flatMap(({ metrics }) => metrics.step))].sort((a, b) => a - b);
  const series = isSingle ? singleSeries(panel, sources[0].metrics, weight) : overlaidSeries(panel, sources, x, weight);
  const { run } = sources[0];
  const findings = isSingle ? (run.findings ?? []).filter(({ name }) => panel.findings === null || panel.findings.includes(name)) : [];
  return drawChart({
    title: panel.title, x, series, isLog: Boolean(query.log), guides: isSingle && !query.log ? visibleGuides(panel, series) : [], markers: findings,
    onStep: isSingle ? (step) => openStep(run, panel, step) : null,
  });
}

function openStep(run, panel, step) {
  const [kind, steps] = panel.id === "evaluation" ? ["evaluation", run.evaluations] : ["step", run.steps_recorded];
  if (steps.includes(step)) navigate(makeHash(["run", run.id, kind, String(step)]));
}

function visibleGuides({ guides = [] }, series) {
  const largest = Math.max(...series.flatMap(({ values }) => values.filter(Number.isFinite)));
  return guides.filter((guide) => guide < 3 * largest);
}

function singleSeries(panel, { metrics }, weight) {
  const smooth = (name) => name in metrics && (weight ? smoothValues(metrics[name], weight) : metrics[name]);
  const series = panel.series.map(({ label, name, low, high }, index) => ({
    label, colour: panel.isStacked ? ["c0", "c2", "c1"][index] : runColour(index), values: smooth(name), raw: weight && !panel.isStacked ? metrics[name] : null,
    low: (low && smooth(low)) || null, high: (high && smooth(high)) || null,
  }));
  return panel.isStacked ? stackSeries(series) : series;
}

function stackSeries(series) {
  const total = [];
  const add = (value, step) => (value === null ? null : (total[step] = (total[step] ?? 0) + value));
  // The tallest area is drawn first, the others in front of it.
  return series.map((curve) => ({ ...curve, values: curve.values.map(add), parts: curve.values, isArea: true })).reverse();
}

function overlaidSeries(panel, sources, x, weight) {
  const { name } = panel.series[0];
  return sources.flatMap(({ run, metrics }, index) => {
    const values = metrics.metrics[name];
    if (!values) return [];
    const byStep = new Map(metrics.step.map((step, position) => [step, values[position]]));
    const aligned = x.map((step) => byStep.get(step) ?? null);
    return [{ label: run.name, colour: runColour(index), values: weight ? smoothValues(aligned, weight) : aligned, raw: weight ? aligned : null }];
  });
}
