"""Decontamination: tasks that are evaluated are left out of training.

Invariant: of tasks that say what they ask, none is trained on that asks what a task of the evaluation asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlkit.env import Env
from rlkit.errors import UsageError


def task_contents(tasks: Mapping[str, Sequence[Env]]) -> Mapping[str, str]:
    """Map what each task asks to its environment, without tasks that do not say so."""
    return {asked: name for name, envs in tasks.items() for env in envs if (asked := _content(env)) is not None}


def remove_evaluated[E: Env](envs: Sequence[E], tested: Mapping[str, str], *, field: str) -> Sequence[E]:
    """Return the tasks of an environment that ask something else than those that are evaluated.

    Args:
        envs: the tasks.
        tested: the result of `task_contents` for the evaluation.
        field: the field of the environment, for messages.

    Raises:
        UsageError: none is left.
    """
    kept = [env for env in envs if (asked := _content(env)) is None or asked not in tested]
    if envs and not kept:
        names = sorted({tested[asked] for env in envs if (asked := _content(env)) is not None})
        raise UsageError(
            f"{field}: all of its {len(envs)} tasks are evaluated too, as eval.envs.{', eval.envs.'.join(names)}; "
            "choose another split, or another dataset"
        )
    return envs if len(kept) == len(envs) else kept


def _content(env: Env) -> str | None:
    asked: object = getattr(env, "content", None)
    return asked if isinstance(asked, str) else None
