"""`rlkit eval`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlkit.cli.common.arguments import resolve
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.scores import scores_of, scores_table
from rlkit.cli.common.signals import terminable
from rlkit.evaluation.endings import TaskScore, endings, task_scores

if TYPE_CHECKING:
    from rlkit.trackers import Progress
    from rlkit.types import Group

KEY = "OPENAI_API_KEY"
"""The variable with the key of an endpoint's account."""

FAILED = 1

_TOLD_S = 10.0
"""How often a person is told how far it is."""

_LONG = 1e6
"""From here on numbers are shown by their power of ten."""


def run(
    arguments: Sequence[str],
    output: Output,
    *,
    checkpoint: str | None,
    tasks: bool,
    quiet: bool,
    endpoint: str | None = None,
    model: str | None = None,
) -> int:
    """Measure the model, and print a table of rewards, with `tasks` one of the tasks too.

    Returns the exit code: that of a failure if every rollout of an environment failed.
    """
    resolved = resolve(arguments)
    from rlkit.errors import UsageError
    from rlkit.evaluation.evaluate import evaluate
    from rlkit.evaluation.openai_endpoint import Endpoint

    if checkpoint is not None and (not checkpoint.startswith("tinker://") or "/weights/" in checkpoint):
        raise UsageError(f"--checkpoint: {checkpoint!r} is not a path of the form tinker://…/sampler_weights/…")
    if (endpoint is None) != (model is None):
        raise UsageError("--endpoint and --model: give both, or neither")
    if endpoint is not None and checkpoint is not None:
        raise UsageError("--endpoint has no checkpoints: leave one of --endpoint and --checkpoint out")
    asked = Endpoint(endpoint, model, os.environ.get(KEY)) if endpoint and model else None
    say = output.silent if quiet else output.note
    played: list[Group] = []
    with _progress(say) as progress, terminable() as interruptible:
        metrics = interruptible.run(
            evaluate(resolved, checkpoint=checkpoint, endpoint=asked, note=say, progress=progress, scored=played.extend)
        )
    of_tasks = task_scores(played)
    names = list(resolved.config.eval.envs or resolved.config.envs)
    rows = {name: summary(metrics, f"eval/{name}") for name in names}
    scores = {name: scores_of(metrics, f"eval/{name}") for name in names}

    def of_env(name: str) -> list[TaskScore]:
        return [score for score in of_tasks if score.env == name]

    if output.json:
        envs: dict[str, Data] = {
            name: {**row, "ended": endings(of_env(name)), "scores": scores[name]} for name, row in rows.items()
        }
        listed: list[Data] = [asdict(score) for score in of_tasks]
        output.data({"checkpoint": checkpoint, "endpoint": endpoint, "envs": envs, "tasks": listed, "metrics": metrics})
    else:
        ended = [f"{name}: {told}" for name in names if (told := _told(of_env(name)))]
        parts = [[table(rows)], scores_table(scores), ended, task_table(of_tasks) if tasks else []]
        output.line("\n\n".join("\n".join(part) for part in parts if part))
    return 0 if all("reward" in row for row in rows.values()) else FAILED


def _told(scores: Sequence[TaskScore]) -> str:
    """`solved 25, completed 60, timeout 15`."""
    return ", ".join(f"{how} {count}" for how, count in endings(scores).items())


def task_table(scores: Sequence[TaskScore]) -> list[str]:
    """`task  1/4  0.250  solved 1, timeout 3`, a line a task."""
    width = max((len(score.task) for score in scores), default=0)
    lines = list[str]()
    for score in scores:
        reward = "-" if score.reward is None else f"{score.reward:.3f}"
        lines.append(f"{score.task:{width}}  {score.solved:3}/{score.attempts:<3}  {reward:>6}  {_told([score])}")
    return lines


@contextmanager
def _progress(say: Callable[[str], None]) -> Generator[Callable[[Callable[[], Progress]], None]]:
    """Takes what says how far the evaluation is, and tells it now and then until the end."""
    ended = threading.Event()
    snapshots: list[Callable[[], Progress]] = []

    def tell() -> None:
        while not ended.wait(_TOLD_S):
            for snapshot in snapshots:
                now = snapshot()
                of = now.done + now.live + now.queued
                say(f"{now.done} of {of} rollouts are done, {now.live} are played; {now.tokens:,} tokens")

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield snapshots.append
    finally:
        ended.set()
        telling.join()  # it may be in the middle of a line


def summary(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The mean reward over the episodes that did not fail, its standard error, and how many episodes there were.

    What is not known is left out: the mean where every episode failed, its error where fewer than two tasks have one.
    """
    row = {name: metrics.get(f"{prefix}/{name}", 0.0) for name in ("episodes", "failed")}
    known = {"reward": metrics.get(f"{prefix}/reward/mean"), "stderr": metrics.get(f"{prefix}/reward/stderr")}
    return row | {name: value for name, value in known.items() if value is not None}


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """`name  0.830 ± 0.021  100 episodes`, in columns."""
    width = max(len(name) for name in [*rows, "env"])
    lines = [f"{'env':{width}}  {'reward':^15}  episodes  failed"]
    for name, row in rows.items():
        mean = _number(row["reward"]) if "reward" in row else "-"
        error = f" ± {_number(row['stderr'])}" if "stderr" in row else ""
        lines.append(f"{name:{width}}  {mean + error:^15}  {row['episodes']:8.0f}  {row['failed']:6.0f}")
    return "\n".join(lines)


def _number(value: float) -> str:
    """`0.830`, or `1.2e+09` where so many digits would be no table."""
    return f"{value:.3f}" if abs(value) < _LONG else f"{value:.2g}"
