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

/**
 * Return the panels that at least one of the runs has metrics for, each with at most three series.
 * findings: names of the findings that the panel shows; all of them if there is no list.
 */
export function makePanels(env, evaluationMetric, metrics) {
  const score = findScore(env, evaluationMetric, metrics);
  const at = (name) => `env/${env}/${name}`;
  const spread = (name) => {
    const [mean, low, high] = ["mean", "p10", "p90"].map((part) => at(`${name}/${part}`));
    return [{ label: "mean, p10–p90", name: mean, low, high }];
  };
  const lines = (names) => Object.entries(names).map(([label, name]) => ({ label, name }));
  const panels = [
    { id: "reward", title: "Reward", series: spread("reward") },
    {
      id: "evaluation", title: "Evaluation", findings: ["evaluation_diverges"],
      series: [{ label: score.split("/").slice(2).join("/"), name: score, low: `${score}/low`, high: `${score}/high` }],
    },
    {
      id: "kl", title: "KL sampler–trainer", findings: ["sampler_trainer_kl", "no_kl"], guides: [0.01],
      series: lines({ v1: "optim/kl_sample_train_v1", v2: "optim/kl_sample_train_v2" }),
    },
    {
      id: "entropy", title: "Entropy, nats a token", findings: ["entropy_collapse"],
      series: lines({ "": "optim/entropy" }),
    },
    { id: "lengths", title: "Tokens of an episode", findings: ["truncation"], series: spread("tokens") },
    {
      id: "groups", title: "Groups", findings: ["dead_groups"], isStacked: true,
      series: lines({ mixed: at("groups/mixed"), "all good": at("groups/all_good"), "all bad": at("groups/all_bad") }),
    },
    {
      id: "truncation", title: "Truncation", findings: ["truncation"],
      series: lines({ episodes: at("truncated"), turns: at("stop/length") }),
    },
    {
      id: "failures", title: "Failures", findings: ["infrastructure_failures", "retry_bias"],
      series: lines({ failed: at("failed"), retries: at("retries") }),
    },
    {
      id: "time", title: "Seconds of a step", findings: ["environment_cpu", "blocking"], isStacked: true,
      series: lines({ sample: "time/sample_s", train: "time/train_s" }),
    },
    {
      id: "staleness", title: "Staleness, steps", findings: [],
      series: lines({ mean: "batch/staleness/mean", max: "batch/staleness/max" }),
    },
  ];
  for (const panel of panels) panel.series = panel.series.filter(({ name }) => name in metrics);
  return panels.filter((panel) => panel.series.length);
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
