"""Whether tasks are sound: the solution gets the full reward, and doing nothing does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit.concurrency import in_thread, together
from rlkit.containment import leftovers_ended
from rlkit.envs.harbor.outcome import numbers
from rlkit.envs.harbor.phases import Gates, Passing, PhaseLimits
from rlkit.envs.harbor.settings import Environment
from rlkit.envs.harbor.tasks import broken
from rlkit.envs.harbor.trial import environment_fields, play, steps_of
from rlkit.errors import MissingError
from rlkit.metrics import SOLVED
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.result import TrialResult

type Finding = Literal["sound", "broken", "solved", "no solution"]
"""`broken`: its solution does not get the full reward. `solved`: doing nothing does. `no solution`: it has none, and
only doing nothing was tried."""

FAULTS: tuple[Finding, ...] = ("broken", "solved")


@dataclass(frozen=True)
class Checked:
    """What was found out about a task.

    Args:
        task_id: which.
        finding: in a word.
        solution: the verifier's numbers for the solution; None where there were none.
        nothing: those for doing nothing.
        detail: what went wrong.
        seconds: that it took.
    """

    task_id: str
    finding: Finding
    solution: Mapping[str, float] | None
    nothing: Mapping[str, float] | None
    detail: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it can be trained on."""
        return self.finding not in FAULTS


@dataclass(frozen=True)
class _Tried:
    rewards: Mapping[str, float] | None
    error: str

    @property
    def full(self) -> bool:
        """Full marks: in `reward`, or in every number of a verifier that gives no such one."""
        if not self.rewards:
            return False
        return min([self.rewards["reward"]] if "reward" in self.rewards else self.rewards.values()) >= SOLVED


@leftovers_ended()
async def check_tasks(
    tasks: Mapping[str, Path],
    *,
    environment: Environment,
    jobs: int,
    told: Callable[[Checked], None] = lambda checked: None,
) -> Sequence[Checked]:
    """Try each task with Harbor's agents `oracle`, which runs its solution, and `nop`, which does nothing.

    Args:
        tasks: their folders, by id.
        environment: where they run.
        jobs: tasks at one time.
        told: of each as it is done.

    Raises:
        UsageError: the environment cannot run a task.
        MissingError: the environment cannot run on this machine.
    """
    places = asyncio.Semaphore(jobs)
    gates = Gates(PhaseLimits())

    async def one(name: str, path: Path) -> Checked:
        async with places:
            checked = await _checked(name, path, environment, gates)
        told(checked)
        return checked

    return await together(one(name, path) for name, path in tasks.items())


async def _checked(name: str, path: Path, environment: Environment, gates: Gates) -> Checked:
    started_s = time.monotonic()
    if (why := await in_thread(broken, path)) is not None:
        return Checked(name, "broken", None, None, why, time.monotonic() - started_s)
    solvable = await in_thread(_has_solution, path)
    agents = ["oracle", "nop"] if solvable else ["nop"]
    tried = dict(
        zip(agents, await asyncio.gather(*(_tried(path, agent, environment, gates) for agent in agents)), strict=True)
    )
    nothing, solution = tried["nop"], tried.get("oracle")
    finding: Finding = "sound" if solution else "no solution"
    detail = ""
    if nothing.full:
        finding, detail = "solved", "doing nothing gets the full reward"
    if nothing.rewards is None:
        finding, detail = "broken", f"doing nothing: {nothing.error}"
    if solution is not None and not solution.full:
        finding, detail = "broken", f"its solution: {solution.error or 'does not get the full reward'}"
    rewards = None if solution is None else solution.rewards
    return Checked(name, finding, rewards, nothing.rewards, detail, time.monotonic() - started_s)


async def _tried(path: Path, agent: str, environment: Environment, gates: Gates) -> _Tried:
    def make(folder: Path) -> dict[str, Json]:
        return {
            "task": {"path": str(path)},
            "trials_dir": str(folder),
            "agent": {"name": agent},
            "environment": environment_fields(environment),
        }

    try:
        return await play(make, _read, gates=gates, trials_dir=None, keep=lambda tried: False)
    except MissingError:  # no task could run
        raise
    except Exception as error:  # what is wrong with one task must not hide what is with others
        return _Tried(None, " ".join(f"{type(error).__name__}: {error}".split()))


def _read(result: TrialResult, _passing: Passing, _folder: Path) -> _Tried:
    errors = [part.exception_info for part in steps_of(result)] + [result.exception_info]
    error = next((one for one in errors if one is not None), None)
    if error is not None and error.exception_type == MissingError.__name__:
        raise MissingError(error.exception_message)
    said = "" if error is None else " ".join(f"{error.exception_type}: {error.exception_message}".split())
    rewards = result.verifier_result.rewards if result.verifier_result else None
    return _Tried(None if rewards is None else numbers(rewards), said)


def _has_solution(path: Path) -> bool:
    return any(path.glob("solution/solve.*")) or any(path.glob("steps/*/solution/solve.*"))
