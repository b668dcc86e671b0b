"""`rlkit.train`, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from rlkit._util.threads import run
from rlkit.algorithms.advantages import AnyEstimator
from rlkit.algorithms.estimator import Estimator
from rlkit.config import Resolved, load_config
from rlkit.config.schema import Config
from rlkit.errors import UsageError
from rlkit.store import is_run_directory
from rlkit.tasks.sources import Tasks, is_env
from rlkit.trackers import RunResult, Tracker
from rlkit.training import StopSignal
from rlkit.training.from_config import named_directory
from rlkit.training.trainer import RLTrainer

CLEAN_UP_S = 10.0
"""How long a run that was interrupted twice may take to clean up."""

type SectionLike = Mapping[str, object]
"""A section of the configuration, such as `{"group_size": 4}`."""


class Settings(TypedDict, total=False):
    """The fields of `Config`, as keywords."""

    model: str
    name: str | None
    seed: int
    epochs: int | None
    steps: int | None
    load_checkpoint: str | None
    sampling: SectionLike
    batch: SectionLike
    rollouts: SectionLike
    schedule: SectionLike
    loss: SectionLike
    kl_penalty: SectionLike
    length_penalty: SectionLike
    lora: SectionLike
    optimizer: SectionLike
    checkpoint: SectionLike
    eval: SectionLike
    service: SectionLike
    chat: SectionLike
    track: SectionLike


def train(
    config: Config | Path | str | None = None,
    *,
    envs: Tasks | Mapping[str, Tasks] | None = None,
    advantage: AnyEstimator | SectionLike | str | None = None,
    trackers: Sequence[Tracker] | None = None,
    resume: bool = False,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train a model and wait until it is done; works in scripts and, inside a running event loop, in notebooks.

    ::

        rlkit.train(model="HuggingFaceTB/SmolLM2-135M-Instruct", envs=[Reverse(w) for w in words], steps=20)
        rlkit.train("examples/arithmetic.yaml", steps=5, batch={"groups": 4})

    Args:
        config: a configuration, or the path of one; None starts from the defaults.
        envs: tasks, instead of those of the configuration; or tasks by name, beside those that it has.
        advantage: an estimator, or its name, or a mapping of its name and settings.
        trackers: None prints a line a step.
        resume: go on with the run of that `name`, if there is one.
        settings: fields of the configuration; they win over `config`.

    Raises:
        ConfigError: a setting is unknown, ill-typed or contradictory.
        RlkitError: as `RLTrainer.train` says.
    """
    if advantage is not None and not isinstance(advantage, str | Mapping | Estimator) and not callable(advantage):
        kind = type(advantage).__name__
        raise UsageError(f"advantage: a value of type {kind} is no name, no function and no mapping with a name")
    given = _named(envs)
    chosen: dict[str, object] = {**settings}
    if isinstance(advantage, str | Mapping | Estimator):
        chosen["advantage"] = advantage
    resolved = _resolved(config, chosen, envs=given, replace_envs=bool(given) and not isinstance(envs, Mapping))
    estimators = dict.fromkeys(resolved.config.envs, advantage) if callable(advantage) else None
    if trackers is None:
        from rlkit.trackers.console import ConsoleTracker

        trackers = [ConsoleTracker()]
    stop = StopSignal()
    again = resume and is_run_directory(named_directory(resolved.config))
    trainer = RLTrainer(resolved, envs=given, estimators=estimators, trackers=trackers, stop=stop, resume=again)
    return _wait(trainer.train, stop)


def _named(envs: Tasks | Mapping[str, Tasks] | None) -> Mapping[str, Tasks]:
    if envs is None:
        return {}
    if isinstance(envs, Mapping):
        return cast("Mapping[str, Tasks]", envs)
    if hasattr(envs, "next") or is_env(envs):
        return {type(envs).__name__: envs}
    tasks = list(envs) if isinstance(envs, Iterable) and not isinstance(envs, str) else envs
    return {type(tasks[0]).__name__ if isinstance(tasks, list) and tasks else "env": tasks}


def _resolved(
    config: Config | Path | str | None, settings: Mapping[str, object], *, envs: Iterable[str], replace_envs: bool
) -> Resolved:
    if isinstance(config, Path | str):
        return load_config([Path(config)], ["envs=null"] if replace_envs else [], settings=settings, envs=envs)
    fields = () if config is None else config.model_fields_set - ({"envs"} if replace_envs else set())
    return load_config([], settings={**{name: getattr(config, name) for name in fields}, **settings}, envs=envs)


class _Running[T]:
    """A coroutine in a thread of its own, with an event loop of its own: callers may have one running already."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.outcome = Future[T]()
        self._make = make
        self._cancel: Callable[[], object] = lambda: None
        threading.Thread(target=self._run, name="rlkit-train", daemon=True).start()

    def cancel(self) -> None:
        """Stop the coroutine, and give it a moment to clean up."""
        self._cancel()
        wait([self.outcome], CLEAN_UP_S)

    def _run(self) -> None:
        async def main() -> T:
            this, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert this is not None  # asyncio.run makes one
            self._cancel = lambda: loop.call_soon_threadsafe(this.cancel)
            return await self._make()

        try:
            self.outcome.set_result(run(main()))
        except BaseException as error:  # raised again in the caller's thread
            self.outcome.set_exception(error)


def _wait[T](make: Callable[[], Coroutine[Any, Any, T]], stop: StopSignal) -> T:
    """Run to the end. The first interrupt asks the run to finish its step and save; a second one stops it.

    A run that is still preparing has no step, and the first interrupt stops it.
    """
    running = _Running(make)
    try:
        return running.outcome.result()
    except KeyboardInterrupt:
        if not stop.is_watched:
            running.cancel()
            raise
        stop.request()
    try:
        return running.outcome.result()
    except KeyboardInterrupt:
        running.cancel()
        raise
