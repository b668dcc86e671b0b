"""`rlkit eval`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.options import Configs, Quiet
from rlkit.cli.common.output import Output
from rlkit.cli.common.progress import repeat
from rlkit.cli.common.signals import run_terminable
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.trackers import Progress
    from rlkit.types import Group

FAILED = 1


def evaluate(
    output: Output,
    config: Configs,
    *,
    checkpoint: Annotated[
        str | None, typer.Option(help="tinker:// path of the weights; without it, the model as it is.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure a model there, which speaks OpenAI's protocol, instead.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name at the endpoint.")] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Print a line for each task, too.")] = False,
    quiet: Quiet = False,
) -> int:
    """Measure a model without training it.

    It plays `eval.envs`, or else the environments of training, greedily.
    """
    from rlkit.config import load_arguments

    resolved = load_arguments(config)
    from rlkit.evaluation.evaluate import evaluate
    from rlkit.evaluation.openai_endpoint import Endpoint
    from rlkit.evaluation.report import EvaluationReport

    if checkpoint is not None and (not checkpoint.startswith("tinker://") or "/weights/" in checkpoint):
        raise UsageError(f"--checkpoint: {checkpoint!r} is not a path of the form tinker://…/sampler_weights/…")
    if (endpoint is None) != (model is None):
        raise UsageError("--endpoint and --model: give both, or neither")
    if endpoint is not None and checkpoint is not None:
        raise UsageError("--endpoint has no checkpoints: leave one of --endpoint and --checkpoint out")
    measured = Endpoint(endpoint, model, os.environ.get("OPENAI_API_KEY")) if endpoint and model else None
    say = output.silent if quiet else output.note
    played: list[Group] = []
    snapshots: list[Callable[[], Progress]] = []

    def tell() -> None:
        for snapshot in snapshots:
            now = snapshot()
            of = now.done + now.live + now.queued
            say(f"{now.done} of {of} rollouts are done, {now.live} are played; {now.tokens:,} tokens")

    measuring = evaluate(
        resolved, checkpoint=checkpoint, endpoint=measured, note=say, progress=snapshots.append, scored=played.extend
    )
    with repeat(tell):
        metrics = run_terminable(measuring)
    envs = list(resolved.config.eval.envs or resolved.config.envs)
    report = EvaluationReport.from_metrics(metrics, played, envs=envs)
    output.result({"checkpoint": checkpoint, "endpoint": endpoint, **report.to_json()}, report.render(tasks=tasks))
    return 0 if report.is_measured else FAILED
