"""The names of the numbers that a run is measured by, as far as they are known before it.

Invariant: a name is called unknown only if no line of metrics of the run can have it. An environment may report numbers
of its own under any name, and so may a service and a task source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlkit.errors import did_you_mean

_LENGTHS = ["mean", "p10", "p50", "p90", "max"]

OF_EPISODES = (
    *("groups", "episodes", "failed", "masked", "retries", "solved", "truncated"),
    *("turns", "segments", "unique_bigrams", "budget_forced"),
    *[f"reward/{name}" for name in ("std", "min", *_LENGTHS)],
    *[f"tokens/{name}" for name in _LENGTHS],
    *[f"turn_tokens/{name}" for name in _LENGTHS],
    *("groups/mixed", "groups/all_good", "groups/all_bad", "stop/stop", "stop/length"),
    *("retried/groups", "retried/gap", "advantage/saturated"),
    *[f"tasks/{name}" for name in ("seen", "solve_rate", "too_hard", "too_easy", "effective")],
    *[f"tasks/{name}" for name in ("best", "median", "size", "generation", "expansions", "cpu_s", "scripted")],
)
"""Under `env/<name>/` and `eval/<name>/`, besides `pass_at_<k>` and what the environment reports."""

OF_A_STEP = {
    "batch": (
        *("groups", "replaced", "dropped", "excess", "sampled_tokens", "staleness/mean", "staleness/max"),
        *("length_penalty", "clipped"),
    ),
    "optim": (
        *("skipped", "kl_sample_train_v1", "kl_sample_train_v2", "entropy", "sequences", "tokens", "learning_rate"),
        *("ratio/max", "ratio/min", "ratio/effective", "ratio/clipped"),
    ),
    "kl_reference": ("v1", "v2"),
    "time": ("sample_s", "train_s", "step_s", "tokens_per_s", "episodes_per_s", "utilisation"),
    "usage": ("requests", "prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens", "usd"),
}
"""By the first part of their names: all that there are. Under `service/` is whatever the service reports."""

_FIRST = ("env", "eval", *OF_A_STEP, "service")


def never_measured(
    metric: str, *, envs: Collection[str], evals: Collection[str], needs: Mapping[str, str]
) -> str | None:
    """Return why no step of a run can have a metric of this name, as a phrase for people; None where one may.

    `needs` are metrics of a step that this run does not have, each with what must be set for it.
    """
    of, _, rest = metric.partition("/")
    if of == "service" and rest:
        return None
    if of in ("env", "eval"):
        env, _, own = rest.partition("/")
        if env not in ("all", *(evals if of == "eval" else envs)):
            return f"there is no environment {env!r} in {'eval.envs' if of == 'eval' else 'envs'}"
        return None if own else f"{metric!r} is none of an environment's numbers, such as {of}/{env}/reward/mean"
    if of in OF_A_STEP and rest in OF_A_STEP[of]:
        needed = needs.get(metric) or needs.get(of)
        return None if needed is None else f"no step has a {metric!r}: {needed}"
    near = did_you_mean(metric, _all_names(envs, evals))
    begins = "" if of in _FIRST else f"; names begin with {', '.join(f'{first}/' for first in _FIRST)}"
    return f"no step has a {metric!r}{begins}.{near}" if near else f"no step has a {metric!r}{begins}"


def _all_names(envs: Collection[str], evals: Collection[str]) -> list[str]:
    """Return all names that can be known before the run, for suggestions."""
    prefixes = [f"eval/{name}" for name in (("all", *evals) if evals else ())]
    prefixes += [f"env/{name}" for name in ("all", *envs)]
    of_episodes = [f"{prefix}/{name}" for prefix in prefixes for name in OF_EPISODES]
    return [*of_episodes, *(f"{of}/{name}" for of, names in OF_A_STEP.items() for name in names)]
