"""`rlkit.train`, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from rlkit.advantages import AdvantageEstimator
from rlkit.config import Resolved, load_config
from rlkit.config.schema import Config
from rlkit.env import Env
from rlkit.run import RLTrainer, Tasks
from rlkit.trackers import RunResult, Tracker
from rlkit.trainer import StopSignal

type SectionLike = Mapping[str, object]
"""A section of the configuration, such as `{"group_size": 4}`."""


class Settings(TypedDict, total=False):
    """The fields of `Config`, as keywords."""

    model: str
    name: str | None
    seed: int
    steps: int
    load_checkpoint: str | None
    sampling: SectionLike
    batch: SectionLike
    rollouts: SectionLike
    loss: SectionLike
    lora: SectionLike
    optimizer: SectionLike
    checkpoint: SectionLike
    eval: SectionLike
    service: SectionLike
    chat: SectionLike


def train(
    config: Config | Path | str | None = None,
    *,
    envs: Tasks | Mapping[str, Tasks] | None = None,
    advantage: AdvantageEstimator | str | None = None,
    trackers: Sequence[Tracker] | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train a model and wait until it is done; works in scripts and, inside a running event loop, in notebooks.

    ::

        rlkit.train(model="HuggingFaceTB/SmolLM2-135M-Instruct", envs=[Reverse(w) for w in words], steps=20)
        rlkit.train("examples/arithmetic.yaml", steps=5, batch={"groups": 4})

    Args:
        config: a configuration, or the path of one; None starts from the defaults.
        envs: tasks, or tasks by name; None for those of the configuration.
        advantage: an estimator, or its name.
        trackers: None prints a line a step.
        settings: fields of the configuration; they win over `config`.

    Raises:
        ConfigError: a setting is unknown, ill-typed or contradictory.
        RlkitError: as `RLTrainer.train` says.
    """
    given = _named(envs)
    chosen: dict[str, object] = {**settings}
    if given:
        chosen["envs"] = {name: {} for name in given}
    if isinstance(advantage, str):
        chosen["advantage"] = advantage
    resolved = _resolved(config, chosen)
    estimators = dict.fromkeys(resolved.config.envs, advantage) if callable(advantage) else None
    if trackers is None:
        from rlkit.trackers.console import ConsoleTracker

        trackers = [ConsoleTracker()]
    stop = StopSignal()
    trainer = RLTrainer(resolved, envs=given, estimators=estimators, trackers=trackers, stop=stop)
    return _wait(trainer.train, stop)


def _named(envs: Tasks | Mapping[str, Tasks] | None) -> Mapping[str, Tasks]:
    if envs is None:
        return {}
    if isinstance(envs, Mapping):
        return cast("Mapping[str, Tasks]", envs)
    if hasattr(envs, "next"):
        return {type(envs).__name__: envs}
    tasks = list(cast("Iterable[Env]", envs))
    return {type(tasks[0]).__name__ if tasks else "env": tasks}


def _resolved(config: Config | Path | str | None, settings: Mapping[str, object]) -> Resolved:
    if isinstance(config, Path | str):
        return load_config([Path(config)], settings=settings)
    set_before: dict[str, object] = {} if config is None else {n: getattr(config, n) for n in config.model_fields_set}
    return load_config([], settings={**set_before, **settings})


def _wait[T](make: Callable[[], Coroutine[Any, Any, T]], stop: StopSignal) -> T:
    """Run to the end, from a thread of its own where an event loop is running already.

    The first interrupt asks the run to finish its step and save; a second one leaves it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    outcome = list[T | BaseException]()

    def target() -> None:
        try:
            outcome.append(asyncio.run(make()))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=target, name="rlkit-train", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        stop.request()
        thread.join()
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result
