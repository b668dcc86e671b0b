"""Run a Harbor trial.

Invariant: the verdict is returned as soon as the verifier has finished; the environment is stopped in the background.
However a trial ends, even if its caller is cancelled, its environment is stopped, its gates (limits of the trials
per phase) are released, and its folder is removed unless it should be kept.
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
from rlkit.envs.harbor.phases import GatePass, Gates, PhaseLimits
from rlkit.envs.harbor.settings import Keep
from rlkit.rollout.task_guard import register_cleanup
from rlkit.sandbox.sandbox_folders import SandboxFolder
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.models.trial.result import StepResult, TimingInfo, TrialResult
    from harbor.trial.hooks import TrialHookEvent
    from harbor.trial.trial import Trial

SEALED_VERIFIER = "rlkit.envs.harbor.verification.verifier:SealedVerifier"

_log = logging.getLogger("rlkit.harbor")


async def play_trial[T](
    task_path: Path,
    environment: EnvironmentConfig,
    read: Callable[[TrialResult, Path], T],
    *,
    fields: Mapping[str, Json],
    prepare: Callable[[Trial], None] = lambda trial: None,
    gate_pass: GatePass | None = None,
    trials_dir: Path | None = None,
    keep: Keep = "none",
) -> T:
    """Run a trial and return its verdict.

    Args:
        read: makes the verdict from Harbor's result and the trial's folder, after verification; it may raise.
        fields: other fields of Harbor's `TrialConfig`.
        prepare: called with the trial before it runs.
        gate_pass: gates of the trial; None for no limits.
        trials_dir: folder of trials; None for a temporary folder, removed by a later process if this one is killed.
        keep: keep the trial's folder; `failed` for trials without a verdict.

    Raises:
        Exception: Harbor cannot create the task or the environment.
    """
    environment = environment.model_copy(deep=True)  # Harbor completes it
    config = {**fields, "task": {"path": str(task_path)}, "environment": environment}
    running = _RunningTrial(config, read, prepare, gate_pass or GatePass(Gates(PhaseLimits())), trials_dir, keep)
    task = asyncio.create_task(running.run())
    is_awaited_by_run = register_cleanup(task)
    try:
        return await running.verdict
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        if not is_awaited_by_run:
            await asyncio.wait([task])


@dataclass(eq=False)
class _RunningTrial[T]:
    config: Mapping[str, object]
    read: Callable[[TrialResult, Path], T]
    prepare: Callable[[Trial], None]
    gate_pass: GatePass
    trials_dir: Path | None
    keep: Keep
    verdict: asyncio.Future[T] = field(init=False, default_factory=lambda: asyncio.get_running_loop().create_future())

    async def run(self) -> None:
        temporary: SandboxFolder | None = None
        folder: Path | None = None
        try:
            temporary = await in_thread(SandboxFolder, ()) if self.trials_dir is None else None
            trials_dir = temporary.path if temporary else self.trials_dir
            trial = await _create_trial({**self.config, "trials_dir": str(trials_dir)})
            folder = trial.paths.trial_dir
            self.prepare(trial)
            self._add_hooks(trial)
            result = await trial.run()
            self._set_verdict(result, folder)
        except asyncio.CancelledError:
            self.verdict.cancel()
            raise
        except Exception as error:
            if self.verdict.done():  # the caller has its verdict
                _log.warning("a trial failed after its verdict: %s: %s", type(error).__name__, error)
            else:
                self.verdict.set_exception(error)
        finally:
            self.gate_pass.release()
            await in_thread(self._remove_folder, folder, temporary)

    def _add_hooks(self, trial: Trial) -> None:
        """Add the gates to the trial, and set the verdict just before its environment is stopped."""
        from harbor.trial.hooks import TrialEvent

        from rlkit.envs.harbor.verification.agent_records import AgentRecords, records_by_environment
        from rlkit.envs.harbor.verification.sealing import note_processes

        environment, folder = trial.agent_environment, trial.paths.trial_dir
        records = AgentRecords(trial.paths.agent_dir, folder / "agent-records")
        records = records_by_environment.setdefault(environment, records)
        stop, start_environment = environment.stop, environment.start

        async def set_verdict_and_stop(delete: bool) -> None:
            if trial.result.verifier_result is not None or trial.result.exception_info is not None:
                self.gate_pass.release()
                self._set_verdict(trial.result, folder)
            await stop(delete)

        async def on_agent_start(_: TrialHookEvent) -> None:
            await self.gate_pass.wait_to_play()
            await in_thread(records.begin)

        async def on_agent_end(_: TrialHookEvent) -> None:
            self.gate_pass.release()
            await in_thread(records.save)

        async def start_and_note_processes(force_build: bool) -> None:
            await start_environment(force_build)
            await note_processes(environment)

        environment.stop = set_verdict_and_stop
        environment.start = start_and_note_processes
        trial.add_hook(TrialEvent.ENVIRONMENT_START, lambda _: self.gate_pass.wait_to_start())
        trial.add_hook(TrialEvent.AGENT_START, on_agent_start)
        trial.add_hook(TrialEvent.AGENT_END, on_agent_end)
        trial.add_hook(TrialEvent.VERIFICATION_START, lambda _: self.gate_pass.wait_to_verify())

    def _set_verdict(self, result: TrialResult, folder: Path) -> None:
        if self.verdict.done():
            return
        try:
            self.verdict.set_result(self.read(result, folder))
        except Exception as error:
            self.verdict.set_exception(error)

    def _remove_folder(self, folder: Path | None, temporary: SandboxFolder | None) -> None:
        if temporary is not None:
            temporary.remove()
        elif folder is not None:
            has_failed = not self.verdict.done() or self.verdict.cancelled() or self.verdict.exception() is not None
            if self.keep == "none" or (self.keep == "failed" and not has_failed):
                shutil.rmtree(folder, ignore_errors=True)


async def _create_trial(fields: Mapping[str, object]) -> Trial:
    await in_thread(import_module, "harbor.trial.trial")  # the first import takes seconds
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig.model_validate(fields)
    config.verifier.import_path = config.verifier.import_path or SEALED_VERIFIER
    return await Trial.create(config)


def list_steps(result: TrialResult) -> Sequence[TrialResult | StepResult]:
    """Return the results of a trial's steps, or its own result if it has no steps."""
    return list(result.step_results) if result.step_results else [result]


def measure_phases(result: TrialResult, gate_pass: GatePass) -> dict[str, float]:
    """Return the seconds of each phase by name, and those of waiting at gates."""
    steps = list_steps(result)
    phases = {
        "start": [result.environment_setup],
        "agent_setup": [result.agent_setup],
        "agent": [step.agent_execution for step in steps],
        "verifier": [step.verifier for step in steps],
    }
    return {"gates": gate_pass.waited_s} | {
        name: sum(map(_measure_seconds, timings)) for name, timings in phases.items() if any(timings)
    }


def _measure_seconds(timing: TimingInfo | None) -> float:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return (timing.finished_at - timing.started_at).total_seconds()
