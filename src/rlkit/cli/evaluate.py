"""`rlkit eval`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlkit.cli.arguments import resolve
from rlkit.cli.output import Output


def run(arguments: Sequence[str], output: Output, *, checkpoint: str | None, quiet: bool) -> int:
    """Measure the model, and print a table of rewards. Returns the exit code."""
    resolved = resolve(arguments)
    from rlkit import concurrency
    from rlkit.errors import UsageError
    from rlkit.evaluation import evaluate

    if checkpoint is not None and not checkpoint.startswith("tinker://"):
        raise UsageError(f"--checkpoint: {checkpoint!r} is not a path of the form tinker://…/sampler_weights/…")
    metrics = concurrency.run(evaluate(resolved, checkpoint=checkpoint, note=output.silent if quiet else output.note))
    names = list(resolved.config.eval.envs or resolved.config.envs)
    rows = {name: summary(metrics, f"eval/{name}") for name in names}
    if output.json:
        output.data({"checkpoint": checkpoint, "envs": rows, "metrics": metrics})
    else:
        output.line(table(rows))
    return 0


def summary(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The mean reward over the episodes that did not fail, its standard error, and how many episodes there were.

    The standard error is s/√n with the sample's standard deviation s; it takes the episodes for independent. It is left
    out where n < 2, and the mean where n = 0.
    """
    count = metrics.get(f"{prefix}/episodes", 0.0)
    failed = metrics.get(f"{prefix}/failed", 0.0)
    valid = count - failed
    row = {"episodes": count, "failed": failed}
    if (mean := metrics.get(f"{prefix}/reward/mean")) is not None:
        row["reward"] = mean
    if valid > 1:
        row["stderr"] = metrics.get(f"{prefix}/reward/std", math.nan) / math.sqrt(valid - 1)
    return row


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """`name  0.830 ± 0.021  100 episodes`, in columns."""
    width = max(len(name) for name in [*rows, "env"])
    lines = [f"{'env':{width}}  {'reward':^15}  episodes  failed"]
    for name, row in rows.items():
        mean = f"{row['reward']:.3f}" if "reward" in row else "-"
        error = f" ± {row['stderr']:.3f}" if "stderr" in row else ""
        lines.append(f"{name:{width}}  {mean + error:^15}  {row['episodes']:8.0f}  {row['failed']:6.0f}")
    return "\n".join(lines)
