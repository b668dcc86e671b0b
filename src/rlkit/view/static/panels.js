/** The standard curves of a run, from the names of its metrics. */
const PALETTE = 6;

/** Return the colour of the run at an index of a comparison; 18 others follow the palette, far from it. */
export function runColour(index) {
  if (index < PALETTE) return `var(--c${index})`;
  const [light, dark] = index % 2 ? [62, 50] : [25, 82];
  return `light-dark(hsl(${100 * index} 75% ${light}%), hsl(${100 * index} 75% ${dark}%))`;
}

/** Return the names of the environments that metrics are about, `all` first. */
export function metricEnvs(metrics) {
  const names = new Set(Object.keys(metrics).flatMap((name) => /^(?:env|eval)\/([^/]+)\//.exec(name)?.[1] ?? []));
  return [...names].sort((a, b) => (b === "all") - (a === "all"));
}

/** Return the panels that at least one of the runs has metrics for, with at most three series each. */
export function makePanels(env, evaluationMetric, metrics) {
  const panels = listPanels(`env/${env}`, findScore(env, evaluationMetric, metrics));
  return panels.filter(({ series }) => series.some(({ name }) => name in metrics));
}

// A panel shows the findings of these names, or all findings if it has no list.
function listPanels(env, score) {
  const band = (label, name, low, high) => [{ label, name, low, high }];
  const spread = (name) => band("mean, p10–p90", ...["mean", "p10", "p90"].map((part) => `${env}/${name}/${part}`));
  const scores = band(score.split("/").slice(2).join("/"), score, `${score}/low`, `${score}/high`);
  const lines = (names, prefix = env) =>
    Object.entries(names).map(([label, name]) => ({ label, name: `${prefix}/${name}` }));
  const kl = lines({ v1: "kl_sample_train_v1", v2: "kl_sample_train_v2" }, "optim");
  const groups = lines({ mixed: "groups/mixed", "all good": "groups/all_good", "all bad": "groups/all_bad" });
  const seconds = lines({ sample: "sample_s", train: "train_s" }, "time");
  return [
    { title: "Reward", series: spread("reward") },
    { title: "Evaluation", series: scores, findings: ["evaluation_diverges"], isEvaluation: true },
    { title: "KL sampler–trainer", series: kl, findings: ["sampler_trainer_kl", "no_kl"], guides: [0.01],
      least: 0.001 },
    { title: "KL to the teacher, nats a token", series: lines({ "": "v1" }, "teacher"), findings: [] },
    { title: "Nats/token", series: lines({ entropy: "entropy", nll: "nll" }, "optim"), findings: ["entropy_collapse"] },
    { title: "Tokens of an episode", series: spread("tokens"), findings: ["truncation"] },
    { title: "Groups", series: groups, findings: ["dead_groups"], isStacked: true },
    { title: "Truncation", series: lines({ episodes: "truncated", turns: "stop/length" }), findings: ["truncation"] },
    { title: "Failures", series: lines({ failed: "failed", retries: "retries" }),
      findings: ["infrastructure_failures", "retry_bias"] },
    { title: "Seconds of a step", series: seconds, findings: ["environment_cpu", "blocking"], isStacked: true },
    { title: "Staleness, steps", series: lines({ mean: "mean", max: "max" }, "batch/staleness"), findings: [] },
  ];
}

/** Return the name of the score to draw: that of the run's header, or else one that exists. */
function findScore(env, evaluationMetric, metrics) {
  const score = evaluationMetric?.split("/").at(-1);
  const names = [score, `${score}/mean`, "pass_at_1", "reward/mean"].map((name) => `eval/${env}/${name}`);
  const isReward = (name) => /^eval\/[^/]+\/reward\/mean$/.test(name);
  return names.find((name) => name in metrics) ?? Object.keys(metrics).find(isReward) ?? names[0];
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
