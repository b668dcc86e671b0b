"""`rlkit eval`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.options import Configs, Quiet
from rlkit.cli.common.output import Output
from rlkit.cli.common.progress import report_periodically
from rlkit.cli.common.signals import run_terminable
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.config.schema import Config
    from rlkit.evaluation.openai_endpoint import Endpoint
    from rlkit.trackers import Progress
    from rlkit.types import Group


def evaluate(
    output: Output,
    config: Configs,
    *,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Weights: newest checkpoint of a run, or tinker:// path; the base model by default."
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Evaluate a model behind this OpenAI-compatible endpoint instead.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model at the endpoint.")] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Play Harbor tasks with this agent, such as codex.")
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Also print a line for each task.")] = False,
    quiet: Quiet = False,
) -> int:
    """Evaluate a model without training it.

    Tasks come from `eval.envs`, or from `envs` if there are no evaluation environments. Sampling is greedy by default.
    """
    from rlkit.config.loading.load import load_arguments

    resolved = load_arguments(config)
    if agent is not None:
        resolved = load_arguments([*config, *_choose_agent(agent, resolved.config)])
    from rlkit.evaluation.evaluate import evaluate
    from rlkit.evaluation.report import EvaluationReport

    target = _check_target(checkpoint, endpoint, model)
    checkpoint = None if checkpoint is None else _find_weights(checkpoint)
    note = output.silent if quiet else output.note
    groups: list[Group] = []
    snapshots: list[Callable[[], Progress]] = []

    def report_progress() -> None:
        for snapshot in snapshots:
            progress = snapshot()
            total = progress.finished + progress.running + progress.queued
            rollouts = f"{progress.finished} of {total} rollouts done, {progress.running} running"
            note(f"{rollouts}; {progress.tokens:,} tokens")

    evaluation = evaluate(
        resolved,
        checkpoint=checkpoint,
        endpoint=target,
        note=note,
        on_progress=snapshots.append,
        on_groups=groups.extend,
    )
    with resolved.locate_errors(), report_periodically(report_progress):
        metrics = run_terminable(evaluation)
    envs = list(resolved.config.eval.envs or resolved.config.reinforced_envs)
    report = EvaluationReport.from_metrics(metrics, groups, envs=envs)
    output.result({"checkpoint": checkpoint, "endpoint": endpoint, **report.to_json()}, report.render(tasks=tasks))
    return 0 if report.is_measured else FAILED


def _choose_agent(agent: str, config: Config) -> list[str]:
    """Return overrides that set the agent of all environments of Harbor that are evaluated."""
    section = "eval.envs" if config.eval.envs else "envs"
    names = [name for name, spec in (config.eval.envs or config.envs).items() if (spec.env or name) == "harbor"]
    if not names:
        raise UsageError(f"--agent has no effect: no environment of {section} has env: harbor; leave it out")
    return [f"{section}.{name}.args.agent={json.dumps(agent)}" for name in names]


def _find_weights(checkpoint: str) -> str:
    """Return the `tinker://` path of sampler weights, or that of the newest checkpoint of a run."""
    from rlkit.tools.checkpoints import choose_checkpoint

    if checkpoint.startswith("tinker://") and "/weights/" in checkpoint:
        raise UsageError(f"--checkpoint: {checkpoint!r} is not a path of the form tinker://…/sampler_weights/…")
    try:
        chosen = choose_checkpoint(checkpoint)
    except UsageError as error:
        raise UsageError(f"--checkpoint: {error}") from None
    return chosen.path if chosen.checkpoint is None else chosen.checkpoint.sampler


def _check_target(checkpoint: str | None, endpoint: str | None, model: str | None) -> Endpoint | None:
    """Return the endpoint to evaluate; None for a model of the service."""
    from rlkit.evaluation.openai_endpoint import Endpoint

    if (endpoint is None) != (model is None):
        raise UsageError("--endpoint and --model: give both, or neither")
    if endpoint is not None and checkpoint is not None:
        raise UsageError("--checkpoint has no effect with --endpoint: leave out one of them")
    return Endpoint(endpoint, model, os.environ.get("OPENAI_API_KEY")) if endpoint and model else None
