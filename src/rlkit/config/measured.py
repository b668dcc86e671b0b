"""The names of the numbers that a run is measured by, as far as they are known before it.

Invariant: a name is called unknown only if no line of metrics of the run can have it. An environment may report numbers
of its own under any name, and so may a service and a task source.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlkit.config.advantage import SEARCHING
from rlkit.errors import did_you_mean

if TYPE_CHECKING:
    from rlkit.config.schema import Config

_LENGTHS = tuple(f"{of}/{name}" for of in ("tokens", "turn_tokens") for name in ("mean", "p10", "p50", "p90", "max"))

OF_EPISODES = (
    *("groups", "episodes", "failed", "masked", "retries", "solved", "truncated"),
    *("turns", "segments", "unique_bigrams", "budget_forced"),
    *(f"reward/{name}" for name in ("mean", "std", "min", "p10", "p50", "p90", "max")),
    *("groups/mixed", "groups/all_good", "groups/all_bad", *_LENGTHS, "stop/stop", "stop/length"),
    *("retried/groups", "retried/gap", "advantage/saturated"),
    *(f"tasks/{name}" for name in ("seen", "solve_rate", "too_hard", "too_easy", "effective")),
    *(f"tasks/{name}" for name in ("best", "median", "size", "generation", "expansions", "cpu_s", "scripted")),
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
_PASS_AT = re.compile(r"pass_at_(\d{1,9})")


def has_by_chance(metric: str, config: Config) -> bool:
    """Whether a step may have this number of its episodes though a run in small has none.

    Args:
        metric: as it would stand in `metrics.jsonl`.
        config: of the run.
    """
    of, _, rest = metric.partition("/")
    env, _, name = rest.partition("/")
    if name == "retried/gap":
        return True
    specs = [spec for key, spec in config.envs.items() if env in (key, "all")] if of == "env" else []
    if name == "advantage/saturated":
        return any((spec.advantage or config.advantage).name in SEARCHING for spec in specs)
    largest = max((spec.group_size or config.batch.group_size for spec in specs), default=0)
    k = int(found[1]) if (found := _PASS_AT.fullmatch(name)) else 0
    return 2 <= k <= largest and k.bit_count() == 1


def never_measured(metric: str, config: Config) -> str | None:
    """Why no step of a run can have a number of this name, as a phrase for people; None where one may.

    Args:
        metric: as it would stand in `metrics.jsonl`.
        config: of the run.
    """
    of, _, rest = metric.partition("/")
    if of == "service" and rest:
        return None
    if of in ("env", "eval"):
        env, _, own = rest.partition("/")
        known = config.eval.envs if of == "eval" else config.envs
        if env not in ("all", *known):
            return f"there is no environment {env!r} in {'eval.envs' if of == 'eval' else 'envs'}"
        return None if own else f"{metric!r} is none of an environment's numbers, such as {of}/{env}/reward/mean"
    if of in OF_A_STEP and rest in OF_A_STEP[of]:
        needed = _needs(of, rest, config)
        return None if needed is None else f"no step has a {metric!r}: {needed}"
    near = did_you_mean(metric, _known(config))
    begins = "" if of in _FIRST else f"; names begin with {', '.join(f'{first}/' for first in _FIRST)}"
    return f"no step has a {metric!r}{begins}.{near}" if near else f"no step has a {metric!r}{begins}"


def _needs(of: str, rest: str, config: Config) -> str | None:
    """What must be set for a number to be there; None where it is."""
    if of == "kl_reference" and not config.kl_penalty.coefficient:
        return "set kl_penalty.coefficient"
    match f"{of}/{rest}":
        case "batch/length_penalty" if not config.length_penalty.coefficient:
            return "set length_penalty.coefficient"
        case "batch/clipped" if config.batch.clip_advantages is None:
            return "set batch.clip_advantages"
        case "optim/ratio/clipped" if config.loss.name not in ("ppo", "cispo", "gspo"):
            return f"the loss {config.loss.name} clips nothing"
        case _:
            return None


def _known(config: Config) -> list[str]:
    """All names that can be thought of, for suggestions."""
    envs = [f"env/{name}" for name in ("all", *config.envs)]
    evals = [f"eval/{name}" for name in ("all", *config.eval.envs)] if config.eval.envs else []
    of_episodes = [f"{prefix}/{name}" for prefix in (*evals, *envs) for name in OF_EPISODES]
    return [*of_episodes, *(f"{of}/{name}" for of, names in OF_A_STEP.items() for name in names)]
