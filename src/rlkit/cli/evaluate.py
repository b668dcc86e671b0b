"""`rlkit eval`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlkit.cli.arguments import resolve
from rlkit.cli.output import Output
from rlkit.cli.scores import scores_of, scores_table

if TYPE_CHECKING:
    from rlkit.trackers import Progress

_TOLD_S = 10.0
"""How often a person is told how far it is."""


def run(arguments: Sequence[str], output: Output, *, checkpoint: str | None, quiet: bool) -> int:
    """Measure the model, and print a table of rewards. Returns the exit code."""
    resolved = resolve(arguments)
    from rlkit import concurrency
    from rlkit.errors import UsageError
    from rlkit.evaluation import evaluate

    if checkpoint is not None and not checkpoint.startswith("tinker://"):
        raise UsageError(f"--checkpoint: {checkpoint!r} is not a path of the form tinker://…/sampler_weights/…")
    say = output.silent if quiet else output.note
    with _progress(say) as progress:
        metrics = concurrency.run(evaluate(resolved, checkpoint=checkpoint, note=say, progress=progress))
    names = list(resolved.config.eval.envs or resolved.config.envs)
    rows = {name: summary(metrics, f"eval/{name}") for name in names}
    scores = {name: scores_of(metrics, f"eval/{name}") for name in names}
    if output.json:
        output.data({"checkpoint": checkpoint, "envs": rows, "scores": scores, "metrics": metrics})
    else:
        output.line(table(rows))
        if (scored := scores_table(scores)) is not None:
            output.line(f"\n{scored}")
    return 0


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
        mean = f"{row['reward']:.3f}" if "reward" in row else "-"
        error = f" ± {row['stderr']:.3f}" if "stderr" in row else ""
        lines.append(f"{name:{width}}  {mean + error:^15}  {row['episodes']:8.0f}  {row['failed']:6.0f}")
    return "\n".join(lines)
