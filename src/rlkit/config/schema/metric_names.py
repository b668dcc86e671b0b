"""Names of a run's metrics that are known before the run.

Invariant: a name is rejected only if no step of the run can have it. Environments, services and task sources may report
metrics of their own under any name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlkit.errors import did_you_mean

_LENGTHS = ["mean", "p10", "p50", "p90", "max"]

EPISODE_METRICS = (
    *("groups", "episodes", "failed", "masked", "retries", "solved", "solved_at_limit", "truncated"),
    *("turns", "segments", "forks", "unique_bigrams", "budget_forced"),
    *[f"reward/{name}" for name in ("std", "min", *_LENGTHS)],
    *[f"tokens/{name}" for name in _LENGTHS],
    *[f"turn_tokens/{name}" for name in _LENGTHS],
    *("groups/mixed", "groups/all_good", "groups/all_bad", "stop/stop", "stop/length"),
    *("retried/groups", "retried/gap", "advantage/saturated", "teacher/kl"),
    *[f"tasks/{name}" for name in ("seen", "solve_rate", "too_hard", "too_easy", "effective")],
    *[f"tasks/{name}" for name in ("best", "median", "size", "generation", "expansions", "cpu_s", "scripted")],
)
"""Metrics under `env/<name>/` and `eval/<name>/`, except `pass_at_<k>` and the environment's own."""

REWARD_METRICS = ("reward/", "solved", "groups/", "pass_at_", "retried/", "advantage/", "teacher/", "stop/")
"""Beginnings of the metrics that environments of conversations do not have."""

STEP_METRICS = {
    "batch": (
        *("groups", "replaced", "dropped", "excess", "sampled_tokens", "staleness/mean", "staleness/max"),
        *("length_penalty", "clipped"),
    ),
    "optim": (
        *("skipped", "kl_sample_train_v1", "kl_sample_train_v2", "entropy", "nll", "sequences", "tokens"),
        *("learning_rate", "ratio/max", "ratio/min", "ratio/effective", "ratio/clipped"),
    ),
    "kl_reference": ("v1", "v2"),
    "teacher": ("v1", "v2", *[f"quarter/{number}" for number in (1, 2, 3, 4)]),
    "time": ("sample_s", "train_s", "step_s", "tokens_per_s", "episodes_per_s", "utilisation", "env_busy"),
    "workers": ("live", "restarts", "queue"),
    "usage": ("requests", "prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens", "usd"),
}
"""All other metrics of a step by the first part of their names, except the service's own under `service/`."""

_PREFIXES = ("env", "eval", *STEP_METRICS, "service")


def metric_problem(
    metric: str, *, envs: Collection[str], evals: Collection[str], remedies: Mapping[str, str]
) -> str | None:
    """Return the reason why no step of a run can have a metric of this name; None if a step may have it.

    Args:
        remedies: beginnings of metrics that no step of this run has, each with a fix.
    """
    if remedy := next((fix for beginning, fix in remedies.items() if metric.startswith(beginning)), None):
        return f"no step has a {metric!r}: {remedy}"
    group, _, rest = metric.partition("/")
    if group == "service" and rest:
        return None
    if group in ("env", "eval"):
        env, _, name = rest.partition("/")
        if env not in ("all", *(evals if group == "eval" else envs)):
            return f"there is no environment {env!r} in {'eval.envs' if group == 'eval' else 'envs'}"
        return None if name else f"{metric!r} is not a metric of an environment, such as {group}/{env}/reward/mean"
    if group in STEP_METRICS and rest in STEP_METRICS[group]:
        return None
    near = did_you_mean(metric, _all_names(envs, evals))
    hint = "" if group in _PREFIXES else f"; names begin with {', '.join(f'{first}/' for first in _PREFIXES)}"
    return f"no step has a {metric!r}{hint}.{near}" if near else f"no step has a {metric!r}{hint}"


def _all_names(envs: Collection[str], evals: Collection[str]) -> list[str]:
    """Return all known names, for suggestions."""
    prefixes = [f"eval/{name}" for name in (("all", *evals) if evals else ())]
    prefixes += [f"env/{name}" for name in ("all", *envs)]
    episode_metrics = [f"{prefix}/{name}" for prefix in prefixes for name in EPISODE_METRICS]
    return [*episode_metrics, *(f"{group}/{name}" for group, names in STEP_METRICS.items() for name in names)]
