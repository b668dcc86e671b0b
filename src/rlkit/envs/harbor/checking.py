"""Check of tasks: the solution must earn the full reward, and an idle agent must not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit._util.threads import in_thread, run_together
from rlkit.config.loading.objects import load_object
from rlkit.envs.harbor.outcome import AGENT_ERRORS, FATAL_ERRORS, VERIFIER_ERRORS, parse_rewards
from rlkit.envs.harbor.tasks import find_task_fault, join_names
from rlkit.envs.harbor.trial import list_steps, play_trial
from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.metrics.metrics import SOLVED
from rlkit.rollout.task_guard import stop_leftover_tasks

if TYPE_CHECKING:
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.models.trial.result import ExceptionInfo, TrialResult

type Finding = Literal["sound", "broken", "solved", "no solution", "environment failed"]
"""Result of a check.

- `sound`: the solution earns the full reward, and an idle agent does not.
- `broken`: the solution does not earn the full reward.
- `solved`: an idle agent earns the full reward.
- `no solution`: the task has no solution, and an idle agent does not earn the full reward.
- `environment failed`: there is no result; the task may work in another environment.
"""

FAULTS: tuple[Finding, ...] = ("broken", "solved", "environment failed")

_DETAIL_CHARS = 400
_OUTPUT_LINES = 8
_OUTPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class TaskCheck:
    """Result of the check of a task."""

    task_id: str
    finding: Finding
    solution_rewards: Mapping[str, float] | None  # rewards of the solution from the verifier; None if there are none
    no_op_rewards: Mapping[str, float] | None  # rewards of an idle agent
    detail: str
    seconds: float
    # Last lines of the output of the tests or of the environment's engine, if the check found a fault.
    output: Sequence[str] = ()
    loopholes: Sequence[str] = ()  # ways for an agent to forge a reward here, and their fixes

    @property
    def ok(self) -> bool:
        """True if the task can be trained on."""
        return self.finding not in FAULTS


@dataclass(frozen=True)
class _AgentTrial:
    rewards: Mapping[str, float] | None
    error: str
    is_environment_fault: bool = False
    output: Sequence[str] = ()

    @property
    def is_solved(self) -> bool:
        """True if `reward` is the full reward; without `reward`, if all numbers of the verifier are."""
        return bool(self.rewards) and min(_select_numbers(self.rewards)) >= SOLVED


@stop_leftover_tasks()
async def check_tasks(
    tasks: Mapping[str, Path],
    *,
    environment: EnvironmentConfig,
    jobs: int,
    on_check: Callable[[TaskCheck], None] = lambda checked: None,
) -> Sequence[TaskCheck]:
    """Run each task with Harbor's agents `oracle`, which runs the solution, and `nop`, which does nothing.

    Args:
        tasks: folders by id.
        jobs: maximum number of concurrent tasks.
        on_check: called with each result.

    Raises:
        MissingError: the environment cannot run on this machine.
    """
    slots = asyncio.Semaphore(jobs)

    async def check(name: str, path: Path) -> TaskCheck:
        async with slots:
            result = await _check_task(name, path, environment)
        on_check(result)
        return result

    return await run_together(check(name, path) for name, path in tasks.items())


def render_checks(checks: Sequence[TaskCheck]) -> str:
    """Render a table of tasks with their findings, rewards, seconds and faults.

    Output about a fault follows the line of its task. The last lines list the loopholes.
    """
    width = max(4, *(len(check.task_id) for check in checks)) if checks else 4
    lines = [f"{'task':{width}}  {'':18}  solution  nothing  seconds"]
    for check in checks:
        rewards = f"{_render_rewards(check.solution_rewards):>8}  {_render_rewards(check.no_op_rewards):>7}"
        line = f"{check.task_id:{width}}  {check.finding:18}  {rewards}  {check.seconds:7.1f}  {check.detail}"
        lines.append(line.rstrip())
        lines += [f"{'':{width}}  | {line}" for line in check.output]
    for loophole in dict.fromkeys(line for check in checks for line in check.loopholes):
        names = [check.task_id for check in checks if loophole in check.loopholes]
        lines.append(f"not sealed ({join_names(names)}): {loophole}")
    return "\n".join(lines)


def _render_rewards(rewards: Mapping[str, float] | None) -> str:
    return "/".join(f"{value:g}" for value in _select_numbers(rewards)) if rewards else "-"


def _select_numbers(rewards: Mapping[str, float]) -> Collection[float]:
    return [rewards["reward"]] if "reward" in rewards else rewards.values()


async def _check_task(name: str, path: Path, environment: EnvironmentConfig) -> TaskCheck:
    start_s = time.monotonic()
    if (fault := await in_thread(find_task_fault, path)) is not None:
        return TaskCheck(name, "broken", None, None, fault, time.monotonic() - start_s)
    agents = ["nop", "oracle"] if await in_thread(_has_solution, path) else ["nop"]
    nothing, *others = await asyncio.gather(*(_run_agent(path, agent, environment) for agent in agents))
    solution = others[0] if others else None
    finding, detail, output = _judge(solution, nothing)
    rewards = None if solution is None else solution.rewards
    loopholes = await in_thread(_find_loopholes, path, environment)
    return TaskCheck(name, finding, rewards, nothing.rewards, detail, time.monotonic() - start_s, output, loopholes)


def _find_loopholes(path: Path, environment: EnvironmentConfig) -> Sequence[str]:
    """List the ways to forge a reward that verification in an environment does not prevent."""
    from harbor.models.task.task import Task
    from harbor.models.task.verifier_mode import task_has_any_shared_verifier

    from rlkit.envs.harbor.verification.sealing import TestedWork, describe_seal
    from rlkit.sandbox.inside import landlock

    config = Task(path).config
    if not task_has_any_shared_verifier(config):
        return ()
    cls = load_object(environment.import_path, field="environment") if environment.import_path else None
    has_view = hasattr(cls, "seal") and not landlock.confinement_problem()
    return describe_seal(has_view=has_view, work=TestedWork.of(config.metadata))


def _judge(solution: _AgentTrial | None, nothing: _AgentTrial) -> tuple[Finding, str, Sequence[str]]:
    """Return the finding, a description of the fault, and output about the fault."""
    for trial, label in ((solution, "its solution"), (nothing, "doing nothing")):
        if trial is not None and trial.is_environment_fault:
            return "environment failed", f"{label}: {trial.error}", trial.output
    if solution is not None and not solution.is_solved:
        return "broken", f"its solution: {solution.error or 'does not get the full reward'}", solution.output
    if nothing.rewards is None:
        return "broken", f"doing nothing: {nothing.error}", nothing.output
    if nothing.is_solved:
        return "solved", "doing nothing gets the full reward", nothing.output
    return ("sound" if solution else "no solution"), "", ()


async def _run_agent(path: Path, agent: str, environment: EnvironmentConfig) -> _AgentTrial:
    try:
        return await play_trial(path, environment, _read, fields={"agent": {"name": agent}})
    except MissingError:  # no task could run
        raise
    except Exception as error:  # a fault of one task must not hide faults of others
        output = _last_lines(str(error))
        # The task itself was read without error: a UsageError means that it does not fit the environment.
        return _AgentTrial(None, join_line(type(error).__name__, str(error)), not isinstance(error, UsageError), output)


def _read(result: TrialResult, folder: Path) -> _AgentTrial:
    error = find_error(result)
    text = "" if error is None else join_line(error.exception_type, error.exception_message)
    output = _read_test_output(folder) or _last_lines("" if error is None else error.exception_message)
    if error is not None and error.exception_type not in {*VERIFIER_ERRORS, *AGENT_ERRORS, *FATAL_ERRORS}:
        return _AgentTrial(None, text, True, output)
    rewards = result.verifier_result.rewards if result.verifier_result else None
    try:
        return _AgentTrial(None if rewards is None else parse_rewards(rewards), text, output=output)
    except EnvironmentFault as fault:
        return _AgentTrial(None, join_line(type(fault).__name__, str(fault)), output=output)


def find_error(result: TrialResult) -> ExceptionInfo | None:
    """Return the first error of a trial; MissingError if the environment cannot run on this machine."""
    errors = [step.exception_info for step in list_steps(result)] + [result.exception_info]
    error = next((info for info in errors if info is not None), None)
    if error is not None and error.exception_type == MissingError.__name__:
        raise MissingError(error.exception_message)
    return error


def join_line(kind: str, message: str) -> str:
    """Return an error's class and message on one line, shortened."""
    text = " ".join(f"{kind}: {message}".split())
    return text if len(text) <= _DETAIL_CHARS else f"{text[:_DETAIL_CHARS]}…"


def _last_lines(text: str) -> Sequence[str]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_OUTPUT_LINES:])


def _read_test_output(folder: Path) -> Sequence[str]:
    """Return the last lines of the output of a trial's tests (of its last step, if it has steps)."""
    paths = sorted(folder.rglob("verifier/test-std*.txt"), key=lambda path: path.stat().st_mtime)
    for path in reversed(paths):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _OUTPUT_BYTES))
            if lines := _last_lines(file.read(_OUTPUT_BYTES).decode(errors="replace")):
                return lines
    return ()


def _has_solution(path: Path) -> bool:
    return any(path.glob("solution/solve.*")) or any(path.glob("steps/*/solution/solve.*"))
