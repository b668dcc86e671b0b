/** The standard curves of a run, from the names of its metrics. */
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5"];

/** Return the colour of the run at an index of a comparison. */
export function runColour(index) {
  return RUN_COLOURS[index % RUN_COLOURS.length];
}

/** Return the names of the environments that metrics are about, `all` first. */
export function metricEnvs(metrics) {
  const names = new Set(Object.keys(metrics).flatMap((name) => /^(?:env|eval)\/([^/]+)\//.exec(name)?.[1] ?? []));
  return [...names].sort((a, b) => (b === "all") - (a === "all"));
}

/** Return the panels that at least one of the runs has metrics for. */
export function makePanels(env, evaluationMetric, metrics) {
  const panels = listPanels(env, findScore(env, evaluationMetric, metrics));
  for (const panel of panels) panel.series = panel.series.filter(({ name }) => name in metrics);
  return panels.filter((panel) => panel.series.length);
}

function listPanels(env, score) {
  const at = (name) => `env/${env}/${name}`;
  const spread = (label, name) => ({ label, name: at(`${name}/mean`), low: at(`${name}/p10`), high: at(`${name}/p90`) });
  const lines = (...pairs) => pairs.map(([label, name]) => ({ label, name }));
  return [
    { id: "reward", title: "Reward", series: [spread("mean, p10–p90", "reward")], findings: null },
    { id: "evaluation", title: "Evaluation", series: [{ label: score.split("/").slice(2).join("/"), name: score, low: `${score}/low`, high: `${score}/high` }], findings: ["evaluation_diverges"] },
    { id: "kl", title: "KL sampler–trainer", series: lines(["v1", "optim/kl_sample_train_v1"], ["v2", "optim/kl_sample_train_v2"]), guides: [0.01], findings: ["sampler_trainer_kl", "no_kl"] },
    { id: "entropy", title: "Entropy, nats a token", series: lines(["", "optim/entropy"]), findings: ["entropy_collapse"] },
    { id: "lengths", title: "Tokens of an episode", series: [spread("mean, p10–p90", "tokens")], findings: ["truncation"] },
    { id: "groups", title: "Groups", isStacked: true, series: lines(["mixed", at("groups/mixed")], ["all good", at("groups/all_good")], ["all bad", at("groups/all_bad")]), findings: ["dead_groups"] },
    { id: "truncation", title: "Truncation", series: lines(["episodes", at("truncated")], ["turns", at("stop/length")]), findings: ["truncation"] },
    { id: "failures", title: "Failures", series: lines(["failed", at("failed")], ["retries", at("retries")]), findings: ["infrastructure_failures", "retry_bias"] },
    { id: "time", title: "Seconds of a step", isStacked: true, series: lines(["sample", "time/sample_s"], ["train", "time/train_s"]), findings: ["environment_cpu", "blocking"] },
    { id: "staleness", title: "Staleness, steps", series: lines(["mean", "batch/staleness/mean"], ["max", "batch/staleness/max"]), findings: [] },
  ];
}

/** Return the name of the score to draw: that of the run's header, or else one that exists. */
function findScore(env, evaluationMetric, metrics) {
  const score = evaluationMetric?.split("/").at(-1);
  const names = [score, `${score}/mean`, "pass_at_1", "reward/mean"].map((name) => `eval/${env}/${name}`);
  return names.find((name) => name in metrics) ?? Object.keys(metrics).find((name) => /^eval\/[^/]+\/reward\/mean$/.test(name)) ?? names[0];
}

/** Return values smoothed by an exponential moving average without bias; gaps stay gaps. */
export function smoothValues(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
