"""One trial of Harbor, from its folder to its end.

Invariant: the verdict is there as soon as the verifier has spoken; the environment is taken down behind it. However a
trial ends, also when whoever waits for it is cancelled, its environment is stopped, its folder goes unless it is to be
kept, and it holds no gate.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit._util.threads import in_thread
from rlkit.envs.harbor.phases import GatePass, Gates
from rlkit.envs.harbor.settings import Environment
from rlkit.rollout.task_guard import register_cleanup
from rlkit.sandbox.sandbox_folders import SandboxFolder
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.result import StepResult, TimingInfo, TrialResult
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial

SEALED_VERIFIER = "rlkit.envs.harbor.verification.verifier:SealedVerifier"

_log = logging.getLogger("rlkit.harbor")


async def play_trial[T](
    make: Callable[[Path], Mapping[str, Json]],
    read: Callable[[TrialResult, GatePass, Path], T],
    *,
    gates: Gates,
    trials_dir: Path | None,
    keep: Callable[[T | None], bool],
) -> T:
    """Run a trial and return its verdict.

    Args:
        make: gives the fields of Harbor's `TrialConfig` for a folder of trials.
        read: gives the verdict, from what Harbor knows once the verifier has spoken, the gates passed and the trial's
            folder.
        gates: the gates that the trial passes.
        trials_dir: the folder of trials; None for one of rlkit's own, which is found again if this process is killed.
        keep: says whether the trial's folder stays, given its verdict, or None where it came to none.

    Raises:
        Exception: what Harbor raises of a task or an environment that it cannot make.
    """
    running = _RunningTrial(make, read, gates.enter(), trials_dir, keep)
    task = asyncio.create_task(running.run())
    waited_for = register_cleanup(task)
    try:
        return await running.verdict
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        if not waited_for:
            await asyncio.wait([task])


@dataclass(eq=False)
class _RunningTrial[T]:
    make: Callable[[Path], Mapping[str, Json]]
    read: Callable[[TrialResult, GatePass, Path], T]
    passing: GatePass
    trials_dir: Path | None
    keep: Callable[[T | None], bool]
    verdict: asyncio.Future[T] = field(init=False, default_factory=lambda: asyncio.get_running_loop().create_future())

    async def run(self) -> None:
        place: SandboxFolder | None = None
        folder: Path | None = None
        try:
            place = await in_thread(SandboxFolder, ()) if self.trials_dir is None else None
            trial = await _create(self.make(place.path if place else self.trials_dir or Path()))
            folder = trial.paths.trial_dir
            self._watch(trial)
            result = await trial.run()
            self._tell(result, folder)
        except asyncio.CancelledError:
            self.verdict.cancel()
            raise
        except Exception as error:
            if self.verdict.done():  # it has spoken, and nobody waits any more
                _log.warning("a trial failed after its verdict: %s: %s", type(error).__name__, error)
            else:
                self.verdict.set_exception(error)
        finally:
            self.passing.leave()
            await in_thread(self._clear, folder, place)

    def _watch(self, trial: Trial) -> None:
        """Pass the gates with the trial's phases, and speak when its environment is about to be taken down."""
        from harbor.trial.hooks import TrialEvent

        from rlkit.envs.harbor.verification.agent_records import watch_records
        from rlkit.envs.harbor.verification.sealing import note_processes

        environment, folder = trial.agent_environment, trial.paths.trial_dir
        records = watch_records(environment, trial.paths.agent_dir, folder / "agent-records")
        stop, start_environment = environment.stop, environment.start

        async def tell_and_stop(delete: bool) -> None:
            if trial.result.verifier_result is not None or trial.result.exception_info is not None:
                self.passing.leave()
                self._tell(trial.result, folder)
            await stop(delete)

        async def start(_: TrialHookEvent) -> None:
            await self.passing.start()

        async def begin(_: TrialHookEvent) -> None:
            await self.passing.play()
            await in_thread(records.begin)

        async def rest(_: TrialHookEvent) -> None:
            self.passing.leave()
            await in_thread(records.save)

        async def verify(_: TrialHookEvent) -> None:
            await self.passing.verify()

        async def start_noted(force_build: bool) -> None:
            await start_environment(force_build)
            await note_processes(environment)

        environment.stop = tell_and_stop
        environment.start = start_noted
        trial.add_hook(TrialEvent.ENVIRONMENT_START, start)
        trial.add_hook(TrialEvent.AGENT_START, begin)
        trial.add_hook(TrialEvent.AGENT_END, rest)
        trial.add_hook(TrialEvent.VERIFICATION_START, verify)

    def _tell(self, result: TrialResult, folder: Path) -> None:
        if self.verdict.done():
            return
        try:
            self.verdict.set_result(self.read(result, self.passing, folder))
        except Exception as error:
            self.verdict.set_exception(error)

    def _clear(self, folder: Path | None, place: SandboxFolder | None) -> None:
        if place is not None:
            place.remove()
        elif folder is not None:
            done = self.verdict.done() and not self.verdict.cancelled() and self.verdict.exception() is None
            if not self.keep(self.verdict.result() if done else None):
                shutil.rmtree(folder, ignore_errors=True)


async def _create(fields: Mapping[str, Json]) -> Trial:
    await in_thread(import_module, "harbor.trial.trial")  # for seconds, the first time
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig.model_validate(fields)
    config.verifier.import_path = config.verifier.import_path or SEALED_VERIFIER
    return await Trial.create(config)


def make_environment_fields(environment: Environment) -> dict[str, Json]:
    """The fields of Harbor's configuration of an environment."""
    return {
        "type": environment.type,
        "import_path": environment.import_path,
        "kwargs": dict(environment.kwargs),
        "force_build": environment.force_build,
        "override_cpus": environment.cpus,
        "override_memory_mb": environment.memory_mb,
        "override_storage_mb": environment.storage_mb,
    }


def list_steps(result: TrialResult) -> Sequence[TrialResult | StepResult]:
    """The parts of a trial that were played: its steps, or itself where it has none."""
    return list(result.step_results) if result.step_results else [result]


def measure_phases(result: TrialResult, passing: GatePass) -> dict[str, float]:
    """How long each phase took, by its name, and the wait at gates."""
    parts = list_steps(result)
    phases = {
        "start": [result.environment_setup],
        "agent_setup": [result.agent_setup],
        "agent": [part.agent_execution for part in parts],
        "verifier": [part.verifier for part in parts],
    }
    return {"gates": passing.waited_s} | {
        name: sum(map(_seconds, timings)) for name, timings in phases.items() if any(timings)
    }


def _seconds(timing: TimingInfo | None) -> float:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return (timing.finished_at - timing.started_at).total_seconds()
