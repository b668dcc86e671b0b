"""Whether tasks are sound: the solution gets the full reward, and doing nothing does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit._util.threads import in_thread, run_together
from rlkit.config.loading.objects import load_object
from rlkit.envs.harbor.outcome import AGENT_ERRORS, UNMENDABLE, VERIFIER_ERRORS, parse_rewards
from rlkit.envs.harbor.phases import GatePass, Gates, PhaseLimits
from rlkit.envs.harbor.settings import Environment
from rlkit.envs.harbor.tasks import find_task_fault
from rlkit.envs.harbor.trial import list_steps, make_environment_fields, play_trial
from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.metrics.metrics import SOLVED
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.result import TrialResult

type Finding = Literal["sound", "broken", "solved", "no solution", "environment failed"]
"""`broken`: its solution does not get the full reward. `solved`: doing nothing does. `no solution`: it has none, and
only doing nothing was tried. `environment failed`: nothing can be said of the task, which may be sound elsewhere."""

FAULTS: tuple[Finding, ...] = ("broken", "solved", "environment failed")

_DETAIL_CHARS = 400
_SAID_LINES = 8
_SAID_BYTES = 1 << 16
_NAMED_TASKS = 5
"""Tasks that are named in the line about what is not sealed."""


@dataclass(frozen=True)
class TaskCheck:
    """The result of a check of a task.

    Args:
        solution: the verifier's numbers for the solution; None where there were none.
        nothing: the verifier's numbers for doing nothing.
        said: last lines of what the tests, or the environment's engine, said of a fault.
        open_ends: ways for an agent to forge a reward here, and how they are closed.
    """

    task_id: str
    finding: Finding
    solution: Mapping[str, float] | None
    nothing: Mapping[str, float] | None
    detail: str
    seconds: float
    said: Sequence[str] = ()
    open_ends: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the task can be trained on."""
        return self.finding not in FAULTS


@dataclass(frozen=True)
class _Tried:
    rewards: Mapping[str, float] | None
    error: str
    of_environment: bool = False
    said: Sequence[str] = ()

    @property
    def full(self) -> bool:
        """Whether `reward`, or every number of a verifier that gives no such one, is full marks."""
        return bool(self.rewards) and min(_deciding(self.rewards)) >= SOLVED


@stop_leftover_tasks()
async def check_tasks(
    tasks: Mapping[str, Path],
    *,
    environment: Environment,
    jobs: int,
    on_check: Callable[[TaskCheck], None] = lambda checked: None,
) -> Sequence[TaskCheck]:
    """Try each task with Harbor's agents `oracle`, which runs its solution, and `nop`, which does nothing.

    Args:
        tasks: folders by id.
        jobs: tasks at one time.
        on_check: called with each result as it is there.

    Raises:
        MissingError: the environment cannot run on this machine.
    """
    places = asyncio.Semaphore(jobs)
    gates = Gates(PhaseLimits())

    async def one(name: str, path: Path) -> TaskCheck:
        async with places:
            checked = await _checked(name, path, environment, gates)
        on_check(checked)
        return checked

    return await run_together(one(name, path) for name, path in tasks.items())


def render_checks(checks: Sequence[TaskCheck]) -> str:
    """Return `name  sound  solution 1  nothing 0  0.4 s` for each task, with what is wrong at the end.

    Below a task is what was said of its fault. The last lines say what an agent could forge a reward with.
    """
    width = max(4, *(len(checked.task_id) for checked in checks)) if checks else 4
    lines = [f"{'task':{width}}  {'':18}  solution  nothing  seconds"]
    for checked in checks:
        rewards = f"{_rewards(checked.solution):>8}  {_rewards(checked.nothing):>7}"
        line = f"{checked.task_id:{width}}  {checked.finding:18}  {rewards}  {checked.seconds:7.1f}  {checked.detail}"
        lines.append(line.rstrip())
        lines += [f"{'':{width}}  | {said}" for said in checked.said]
    for open_end in dict.fromkeys(line for checked in checks for line in checked.open_ends):
        names = [checked.task_id for checked in checks if open_end in checked.open_ends]
        more = f" and {len(names) - _NAMED_TASKS} more" if len(names) > _NAMED_TASKS else ""
        lines.append(f"not sealed ({', '.join(names[:_NAMED_TASKS])}{more}): {open_end}")
    return "\n".join(lines)


def _rewards(rewards: Mapping[str, float] | None) -> str:
    return "/".join(f"{value:g}" for value in _deciding(rewards)) if rewards else "-"


def _deciding(rewards: Mapping[str, float]) -> Collection[float]:
    return [rewards["reward"]] if "reward" in rewards else rewards.values()


async def _checked(name: str, path: Path, environment: Environment, gates: Gates) -> TaskCheck:
    started_s = time.monotonic()
    if (why := await in_thread(find_task_fault, path)) is not None:
        return TaskCheck(name, "broken", None, None, why, time.monotonic() - started_s)
    solvable = await in_thread(_has_solution, path)
    agents = ["oracle", "nop"] if solvable else ["nop"]
    tried = dict(
        zip(agents, await asyncio.gather(*(_tried(path, agent, environment, gates) for agent in agents)), strict=True)
    )
    nothing, solution = tried["nop"], tried.get("oracle")
    finding, detail, said = _judge(solution, nothing)
    rewards = None if solution is None else solution.rewards
    open_ends = await in_thread(_open_ends, path, environment)
    return TaskCheck(name, finding, rewards, nothing.rewards, detail, time.monotonic() - started_s, said, open_ends)


def _open_ends(path: Path, environment: Environment) -> Sequence[str]:
    """Say what verification in an environment leaves open for a task."""
    from harbor.models.task.task import Task
    from harbor.models.task.verifier_mode import task_has_any_shared_verifier

    from rlkit.envs.harbor.verification.sealing import TestedWork, describe_seal
    from rlkit.sandbox.inside import landlock

    config = Task(path).config
    if not task_has_any_shared_verifier(config):
        return ()
    where = load_object(environment.import_path, field="environment") if environment.import_path else None
    has_view = hasattr(where, "seal") and not landlock.confinement_problem()
    return describe_seal(has_view=has_view, work=TestedWork.of(config.metadata))


def _judge(solution: _Tried | None, nothing: _Tried) -> tuple[Finding, str, Sequence[str]]:
    """Return the finding, what went wrong, and what was said of it."""
    for tried, what in ((solution, "its solution"), (nothing, "doing nothing")):
        if tried is not None and tried.of_environment:
            return "environment failed", f"{what}: {tried.error}", tried.said
    if solution is not None and not solution.full:
        return "broken", f"its solution: {solution.error or 'does not get the full reward'}", solution.said
    if nothing.rewards is None:
        return "broken", f"doing nothing: {nothing.error}", nothing.said
    if nothing.full:
        return "solved", "doing nothing gets the full reward", nothing.said
    return ("sound" if solution else "no solution"), "", ()


async def _tried(path: Path, agent: str, environment: Environment, gates: Gates) -> _Tried:
    def make(folder: Path) -> dict[str, Json]:
        return {
            "task": {"path": str(path)},
            "trials_dir": str(folder),
            "agent": {"name": agent},
            "environment": make_environment_fields(environment),
        }

    try:
        return await play_trial(make, _read, gates=gates, trials_dir=None, keep=lambda tried: False)
    except MissingError:  # no task could run
        raise
    except Exception as error:  # what is wrong with one task must not hide what is with others
        said = _last_lines(str(error))
        # The task itself was read before, so that what is left is how it fits this environment, or the environment.
        return _Tried(None, _one_line(type(error).__name__, str(error)), not isinstance(error, UsageError), said)


def _read(result: TrialResult, _passing: GatePass, folder: Path) -> _Tried:
    errors = [part.exception_info for part in list_steps(result)] + [result.exception_info]
    error = next((one for one in errors if one is not None), None)
    if error is not None and error.exception_type == MissingError.__name__:
        raise MissingError(error.exception_message)
    told = "" if error is None else _one_line(error.exception_type, error.exception_message)
    said = _said_by_tests(folder) or _last_lines("" if error is None else error.exception_message)
    if error is not None and error.exception_type not in {*VERIFIER_ERRORS, *AGENT_ERRORS, *UNMENDABLE}:
        return _Tried(None, told, True, said)
    rewards = result.verifier_result.rewards if result.verifier_result else None
    try:
        return _Tried(None if rewards is None else parse_rewards(rewards), told, said=said)
    except EnvironmentFault as fault:
        return _Tried(None, _one_line(type(fault).__name__, str(fault)), said=said)


def _one_line(kind: str, message: str) -> str:
    text = " ".join(f"{kind}: {message}".split())
    return text if len(text) <= _DETAIL_CHARS else f"{text[:_DETAIL_CHARS]}…"


def _last_lines(text: str) -> Sequence[str]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_SAID_LINES:])


def _said_by_tests(folder: Path) -> Sequence[str]:
    """Return the last lines that the tests of a trial, or of its last step, printed."""
    printed = sorted(folder.rglob("verifier/test-std*.txt"), key=lambda path: path.stat().st_mtime)
    for path in reversed(printed):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _SAID_BYTES))
            if lines := _last_lines(file.read(_SAID_BYTES).decode(errors="replace")):
                return lines
    return ()


def _has_solution(path: Path) -> bool:
    return any(path.glob("solution/solve.*")) or any(path.glob("steps/*/solution/solve.*"))
