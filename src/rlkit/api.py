"""`rlkit.train`, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Unpack, cast

from rlkit._util.threads import DaemonThreadPool, Interruptible
from rlkit.algorithms.advantages import AnyEstimator
from rlkit.algorithms.losses import LossFunction
from rlkit.config.loading.load import load_config
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.run_config import is_run_directory, require_run_directory
from rlkit.config.schema import Config
from rlkit.config.schema.keywords import SectionLike, Settings
from rlkit.env import is_env
from rlkit.tasks.sources import Tasks
from rlkit.trackers import RunResult, Tracker
from rlkit.training import StopSignal
from rlkit.training.trainer import RLTrainer

CLEAN_UP_S = 10.0
"""Time limit for the clean-up of a run that was interrupted twice."""

_SIGNAL_S = 1.0  # the system may give a signal to another thread, which does not wake the thread that must handle it


def train(
    config: Config | Path | str | None = None,
    *,
    envs: Tasks | Mapping[str, Tasks | SectionLike] | None = None,
    advantage: AnyEstimator | SectionLike | str | None = None,
    loss: LossFunction | SectionLike | str | None = None,
    trackers: Sequence[Tracker] | None = None,
    resume: bool = False,
    **settings: Unpack[Settings],
) -> RunResult:
    """Train a model and wait for the result; works in scripts and in notebooks.

    ::

        rlkit.train(model="HuggingFaceTB/SmolLM2-135M-Instruct", envs=[Reverse(w) for w in words], steps=20)
        rlkit.train("examples/arithmetic.yaml", steps=5, batch={"groups": 4})

    The first Ctrl-C finishes the step and saves; the second stops the run.

    Args:
        config: a configuration or its path; None starts from the defaults.
        envs: tasks, which replace those of the configuration; or a mapping of names to tasks or to sections such as
            `{"env": "rows", …}`, which are added to those of the configuration.
        advantage: an estimator, its name, or a mapping with its name and settings.
        loss: a loss function, the name of a loss, or a mapping with its name and settings.
        trackers: observers of the run; None prints a line per step.
        resume: resume the run of that `name`, if there is one.
        settings: fields of the configuration, which override `config`.

    Raises:
        ConfigError: a setting is unknown, ill-typed or contradictory.
        RlkitError: see `RLTrainer.train`.
    """
    fields: dict[str, object] = {**settings}
    tasks, sections = _name_envs(envs)
    if sections:
        fields["envs"] = sections
    named = {"loss": loss, "advantage": advantage}
    fields |= {field: value for field, value in named.items() if value is not None and not callable(value)}
    resolved = _resolve(config, fields, envs=tasks, replace_envs=bool(tasks) and not isinstance(envs, Mapping))
    estimators = dict.fromkeys(resolved.config.envs, advantage) if callable(advantage) else None
    if trackers is None:
        from rlkit.trackers.console import ConsoleTracker

        trackers = [ConsoleTracker()]
    stop, function = StopSignal(), loss if callable(loss) else None
    resume = resume and is_run_directory(require_run_directory(resolved.config))
    with resolved.locate_errors():
        trainer = RLTrainer(
            resolved, envs=tasks, estimators=estimators, loss=function, trackers=trackers, stop=stop, resume=resume
        )
    return _run_in_thread(trainer.train, stop)


def _name_envs(
    envs: Tasks | Mapping[str, Tasks | SectionLike] | None,
) -> tuple[Mapping[str, Tasks], Mapping[str, SectionLike]]:
    """Return the tasks and the sections by name."""
    if not isinstance(envs, Mapping):
        return ({} if envs is None else _name_tasks(envs)), {}
    named = cast("Mapping[str, object]", envs)
    sections = {name: cast("SectionLike", section) for name, section in named.items() if isinstance(section, Mapping)}
    return {name: cast("Tasks", tasks) for name, tasks in named.items() if name not in sections}, sections


def _name_tasks(envs: Tasks) -> Mapping[str, Tasks]:
    if hasattr(envs, "next") or is_env(envs):
        return {type(envs).__name__: cast("Tasks", envs)}
    tasks = list(envs) if isinstance(envs, Iterable) and not isinstance(envs, str) else envs
    return {type(tasks[0]).__name__ if isinstance(tasks, list) and tasks else "env": tasks}


def _resolve(
    config: Config | Path | str | None, settings: Mapping[str, object], *, envs: Iterable[str], replace_envs: bool
) -> ResolvedConfig:
    if isinstance(config, Path | str):
        return load_config([Path(config)], ["envs=null"] if replace_envs else [], settings=settings, envs=envs)
    fields = () if config is None else config.model_fields_set - ({"envs"} if replace_envs else set())
    return load_config([], settings={**{name: getattr(config, name) for name in fields}, **settings}, envs=envs)


def _run_in_thread[T](make: Callable[[], Coroutine[object, object, T]], stop: StopSignal) -> T:
    """Run a coroutine on an event loop in a thread of its own, since the caller may have one running.

    The first interrupt asks the run to finish its step and save. The second cancels it, and so does the first if the
    run is still preparing and has no step.
    """
    interruptible, thread = Interruptible(), DaemonThreadPool(1, name="rlkit-train")
    result = thread.submit(lambda: interruptible.run(make()))
    thread.shutdown(wait=False)  # it ends after this call
    while True:
        try:
            while not result.done():
                wait([result], _SIGNAL_S)
            return result.result()
        except KeyboardInterrupt:
            if stop.is_requested or not stop.is_watched:
                interruptible.interrupt()
                wait([result], CLEAN_UP_S)
                raise
            stop.request()
