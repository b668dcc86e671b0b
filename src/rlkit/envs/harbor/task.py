"""`HarborTask`: a task of Harbor as an environment of rlkit's.

Invariant: each rollout is one trial of its own, whose completions all come from the rollout's policy; what an episode
is worth follows from the trial's report and from the rules alone.
"""

from __future__ import annotations

import asyncio
import tomllib
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

from rlkit._util.stopwatch import Stopwatch, current_stopwatches, use_stopwatches
from rlkit._util.threads import in_thread
from rlkit.env import Env
from rlkit.envs.harbor.outcome import VERIFIER_ERRORS, Cause, Report, make_outcome
from rlkit.envs.harbor.phases import GatePass, gates
from rlkit.envs.harbor.settings import TrialSettings
from rlkit.envs.harbor.trial import list_steps, make_environment_fields, measure_phases, play_trial
from rlkit.policy import Policy
from rlkit.types import Json, Outcome

if TYPE_CHECKING:
    from harbor.models.trial.result import ExceptionInfo, TrialResult

    from rlkit.envs.harbor.agents.agent_end import AgentEnd

_GRAVEST_FIRST: tuple[Cause | None, ...] = get_args(Cause.__value__)

UNTIMED_AGENT_S = 1800.0
"""Of an agent that nothing else would end: half of what a rollout may take, so that tests can follow."""

_OUTAGE_SHARE = 0.1
"""Of an agent's time, that a service in trouble may take; with more, it was not the agent that ran out of time."""


@dataclass(frozen=True)
class HarborTask(Env):
    """A task of Harbor in a folder, played by an agent with the model that is trained."""

    task_id: str
    path: Path
    settings: TrialSettings = field(default_factory=TrialSettings)

    stochastic: ClassVar[bool] = True

    async def rollout(self, policy: Policy) -> Outcome:
        """Run one trial.

        Raises:
            EnvironmentFault: it went wrong in a way that the rules drop.
            UsageError: the task asks for what the environment does not have.
        """
        settings = self.settings
        await in_thread(import_module, settings.agent.import_path.partition(":")[0])  # for seconds, the first time
        from rlkit.envs.harbor.agents.policy_registry import get_agent_end, register_policy

        stopwatch, clock = Stopwatch(), asyncio.get_running_loop().time
        began_s = clock()

        def read(result: TrialResult, passing: GatePass, folder: Path) -> Report:
            excused_s = clock() - began_s - stopwatch.played_s
            return self._report(result, passing, folder, get_agent_end(key), outage_s=excused_s - passing.waited_s)

        with register_policy(policy) as key, use_stopwatches({*current_stopwatches(), stopwatch}):
            report = await play_trial(
                lambda folder: self._config(folder, key),
                read,
                gates=gates("harbor", settings.phases),
                trials_dir=settings.trials_dir,
                keep=self._kept,
            )
        return make_outcome(report, settings.rules, settings.reward)

    def _config(self, folder: Path, key: str) -> dict[str, Json]:
        settings = self.settings
        return {
            "task": {"path": str(self.path)},
            "trials_dir": str(folder),
            "timeout_multiplier": settings.timeout_multiplier,
            "agent": {
                "import_path": settings.agent.import_path,
                "kwargs": settings.agent.options(key),
                "override_timeout_sec": agent_timeout_s(self.path, settings),
            },
            "environment": make_environment_fields(settings.environment),
            "verifier": {"override_timeout_sec": settings.verifier_timeout_s},
        }

    def _report(
        self, result: TrialResult, passing: GatePass, folder: Path, end: AgentEnd, *, outage_s: float
    ) -> Report:
        verdict = result.verifier_result
        cause, error = _fault(result, end)
        seconds = measure_phases(result, passing) | {"sampling": end.llm_s}
        detail = end.detail if error is None else " ".join(error.exception_message.split())
        if cause == "timeout" and outage_s > _OUTAGE_SHARE * seconds.get("agent", 0.0):
            cause, detail = "environment_error", f"{detail}, {outage_s:.0f} of them for a service in trouble"
        metrics = {
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "agent_turns": float(end.turns),
            "parse_errors": float(end.parse_errors),
            "truncated_turns": float(end.truncated_turns),
            "summaries": float(end.summaries),
            "max_turns": float(cause is None and end.reason == "max_turns"),
        }
        report = Report(
            rewards=None if verdict is None else verdict.rewards,
            cause=cause,
            detail=detail,
            error=None if error is None else error.exception_type,
            cut=cause in ("timeout", "overflow") or end.reason == "max_turns",
            metrics=metrics,
            info={"ended": cause or _reason(end), "detail": end.detail},
        )
        if not self._kept(report):
            return report
        return replace(report, info={**report.info, "trial": str(folder)})

    def _kept(self, report: Report | None) -> bool:
        if self.settings.keep != "failed" or report is None:
            return self.settings.keep != "none"
        try:
            make_outcome(report, self.settings.rules, self.settings.reward)
        except Exception:  # whatever it is, there is no reward
            return True
        return False


def agent_timeout_s(path: Path, settings: TrialSettings) -> float | None:
    """Return the time limit of an agent in the place of the one of the task in a folder; None for the task's.

    An agent without a limit on its turns is given `UNTIMED_AGENT_S` by a task that says nothing: with summaries its
    context never fills, and the rollout's own time limit would leave it without a verdict.
    """
    if settings.agent_timeout_s is not None or settings.agent.max_turns is not None:
        return settings.agent_timeout_s
    task = tomllib.loads((path / "task.toml").read_text())
    timed = any("timeout_sec" in part.get("agent", {}) for part in (task, *task.get("steps", ())))
    return None if timed else UNTIMED_AGENT_S


def _reason(end: AgentEnd) -> str:
    """Why the agent stopped; `unreadable` if no reply of the model could be carried out."""
    return "unreadable" if 0 < end.turns <= end.parse_errors + end.truncated_turns else end.reason


def _fault(result: TrialResult, end: AgentEnd) -> tuple[Cause | None, ExceptionInfo | None]:
    """What went wrong, and its exception if it had one: of several faults, as in a task of steps, the gravest."""
    errors = [result.exception_info, *(part.exception_info for part in list_steps(result))]
    faults: list[tuple[Cause | None, ExceptionInfo | None]] = [(_cause(error), error) for error in errors if error]
    if end.reason in ("overflow", "agent_error", "service_error"):
        faults.append((end.reason, None))
    return min(faults, key=lambda fault: _GRAVEST_FIRST.index(fault[0]), default=(None, None))


def _cause(error: ExceptionInfo) -> Cause:
    match error.exception_type:
        case "AgentTimeoutError":
            return "timeout"
        case "NonZeroAgentExitCodeError":
            return "agent_error"
        case name:
            return "verifier_error" if name in VERIFIER_ERRORS else "environment_error"
