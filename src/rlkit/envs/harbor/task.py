"""`HarborTask`: a Harbor task as an environment.

Invariant: each rollout is one trial, whose completions all come from the rollout's policy. The outcome of an episode
depends only on the trial's report and the rules.
"""

from __future__ import annotations

import asyncio
import tomllib
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, get_args

from rlkit._util.stopwatch import Stopwatch, current_stopwatches, use_stopwatches
from rlkit._util.threads import in_thread
from rlkit.env import Env
from rlkit.envs.harbor.agents.agent import AgentEnd, join_ends
from rlkit.envs.harbor.outcome import VERIFIER_ERRORS, Cause, Report, make_outcome
from rlkit.envs.harbor.phases import GatePass, get_gates
from rlkit.envs.harbor.settings import TrialSettings
from rlkit.envs.harbor.trial import list_steps, measure_phases, play_trial
from rlkit.policy import Policy
from rlkit.types import Outcome

if TYPE_CHECKING:
    from harbor.models.trial.result import ExceptionInfo, TrialResult


_GRAVEST_FIRST: tuple[Cause | None, ...] = get_args(Cause.__value__)

UNTIMED_AGENT_S = 1800.0
"""Time limit of an agent without other limits: half of a rollout's default limit, which leaves time for tests."""

_OUTAGE_SHARE = 0.1
"""Share of outages in an agent's time above which a timeout is attributed to the service, not the agent."""


@dataclass(frozen=True)
class HarborTask(Env):
    """A Harbor task in a folder, played by an agent with the trained model."""

    task_id: str
    path: Path
    settings: TrialSettings = field(default_factory=TrialSettings)

    stochastic: ClassVar[bool] = True

    async def rollout(self, policy: Policy) -> Outcome:
        """Run one trial.

        Raises:
            EnvironmentFault: the trial had a fault for which the rule is `drop`.
            UsageError: the task needs a feature that the environment lacks.
        """
        settings = self.settings
        await in_thread(import_module, settings.agent.module)  # the first import takes seconds
        gate_pass = GatePass(get_gates(settings.phases))
        stopwatch, clock = Stopwatch(), asyncio.get_running_loop().time
        start_s = clock()

        def read(result: TrialResult, folder: Path) -> Outcome:
            excused_s = clock() - start_s - stopwatch.played_s
            outage_s = excused_s - gate_pass.waited_s
            report = self._make_report(result, gate_pass, folder, join_ends(agent.ends), outage_s=outage_s)
            return make_outcome(report, settings.rules, settings.reward)

        with use_stopwatches({*current_stopwatches(), stopwatch}):
            async with settings.open_agent(policy) as agent:
                return await play_trial(
                    self.path,
                    settings.environment,
                    read,
                    fields={
                        "timeout_multiplier": settings.timeout_multiplier,
                        "agent": {**agent.fields, "override_timeout_sec": agent_timeout_s(self.path, settings)},
                        "verifier": {"override_timeout_sec": settings.verifier_timeout_s},
                    },
                    prepare=agent.prepare,
                    gate_pass=gate_pass,
                    trials_dir=settings.trials_dir,
                    keep=settings.keep,
                )

    def _make_report(
        self, result: TrialResult, gate_pass: GatePass, folder: Path, end: AgentEnd, *, outage_s: float
    ) -> Report:
        verdict = result.verifier_result
        cause, error = _find_gravest_fault(result, end)
        seconds = measure_phases(result, gate_pass) | {"sampling": end.llm_s}
        detail = end.detail if error is None else " ".join(error.exception_message.split())
        if cause == "timeout" and self.settings.agent.is_installed and not end.turns:
            cause, detail = "environment_error", f"{detail}, without a reply of its model"
        if cause == "timeout" and outage_s > _OUTAGE_SHARE * seconds.get("agent", 0.0):
            cause, detail = "environment_error", f"{detail}, {outage_s:.0f} of them in a service outage"
        metrics = {
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "agent_turns": float(end.turns),
            "parse_errors": float(end.parse_errors),
            "truncated_turns": float(end.truncated_turns),
            "summaries": float(end.summaries),
            "max_turns": float(cause is None and end.reason == "max_turns"),
        }
        return Report(
            rewards=None if verdict is None else verdict.rewards,
            cause=cause,
            detail=detail,
            error=None if error is None else error.exception_type,
            truncated=cause in ("timeout", "overflow") or end.reason == "max_turns",
            metrics=metrics,
            info={
                "ended": cause or _find_end_reason(end),
                "detail": end.detail,
                **({"trial": str(folder)} if self.settings.keep == "all" else {}),
            },
        )


def agent_timeout_s(path: Path, settings: TrialSettings) -> float | None:
    """Return the time limit of an agent that overrides that of the task in a folder; None for the task's.

    Without a limit in the task or on the turns it is `UNTIMED_AGENT_S`. With summaries the context never fills, and the
    rollout's own time limit would end the episode without a verdict.
    """
    if settings.agent_timeout_s is not None or settings.agent.max_turns is not None:
        return settings.agent_timeout_s
    task = tomllib.loads((path / "task.toml").read_text())
    timed = any("timeout_sec" in part.get("agent", {}) for part in (task, *task.get("steps", ())))
    return None if timed else UNTIMED_AGENT_S


def _find_end_reason(end: AgentEnd) -> str:
    """Return the reason why the agent stopped; `unreadable` if no reply of the model could be executed."""
    return "unreadable" if 0 < end.turns <= end.parse_errors + end.truncated_turns else end.reason


def _find_gravest_fault(result: TrialResult, end: AgentEnd) -> tuple[Cause | None, ExceptionInfo | None]:
    """Return the cause and the exception, if any, of the gravest fault in all steps."""
    errors = [result.exception_info, *(step.exception_info for step in list_steps(result))]
    faults: list[tuple[Cause | None, ExceptionInfo | None]] = [(_classify(error), error) for error in errors if error]
    if end.reason in ("overflow", "agent_error", "service_error"):
        faults.append((end.reason, None))
    return min(faults, key=lambda fault: _GRAVEST_FIRST.index(fault[0]), default=(None, None))


def _classify(error: ExceptionInfo) -> Cause:
    from harbor.agents.installed import base

    match error.exception_type:
        case "AgentTimeoutError":
            return "timeout"
        case name if issubclass(getattr(base, name, Exception), base.NonZeroAgentExitCodeError):
            return "agent_error"
        case name:
            return "verifier_error" if name in VERIFIER_ERRORS else "environment_error"
