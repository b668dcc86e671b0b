"""Cheats against tasks of Harbor's: one trial for each, in an environment of its own.

Invariant: a trial that breaks is a result, and says nothing of the others; only what is missing on this machine ends
the whole.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit._util.threads import in_thread, run_together
from rlkit.envs.harbor.outcome import parse_rewards
from rlkit.envs.harbor.phases import GatePass, Gates, PhaseLimits
from rlkit.envs.harbor.settings import Environment
from rlkit.envs.harbor.tasks import find_task_fault
from rlkit.envs.harbor.trial import list_steps, make_environment_fields, play_trial
from rlkit.errors import MissingError
from rlkit.redteam.report import Attempt, RedTeamReport, attempt_result
from rlkit.redteam.task_cheat import SKIPPED, TaskCheat
from rlkit.redteam.task_cheats import TASK_CHEATS
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.result import TrialResult

AGENT = "rlkit.redteam.agent:CheatingAgent"
HONEST = TaskCheat("honest-empty-attempt", "Does nothing.", "")

VERIFIER_S = 60.0
"""Seconds that tests may take: some cheats hang them, and wait for what never comes."""

_FILE = re.compile(r"`(/?(?:[\w-][\w.-]*/)*[\w-]+\.[\w.-]*\w)`")
"""A path in an instruction, as far as it names a file with an ending."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One trial that ended.

    Args:
        rewards: the verifier's numbers; None where there were none.
        skipped: why the cheat could not be carried out; "" where it was.
        error: why there are no numbers.
    """

    rewards: Mapping[str, float] | None
    skipped: str = ""
    error: str = ""


@stop_leftover_tasks()
async def attack_tasks(
    tasks: Mapping[str, Path],
    *,
    environment: Environment,
    jobs: int,
    cheats: Sequence[TaskCheat] = TASK_CHEATS,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> RedTeamReport:
    """Try each cheat on each task, and compare what it earns with an honest empty attempt.

    Args:
        tasks: folders of tasks, by id.
        on_attempt: called with each attempt as it ends.

    Raises:
        UsageError: the environment cannot run a task.
        MissingError: the environment cannot run on this machine.
    """
    places, gates = asyncio.Semaphore(jobs), Gates(PhaseLimits())

    async def run(path: Path, cheat: TaskCheat) -> _Trial:
        async with places:
            return await _trial(path, cheat, environment, gates)

    async def attack(name: str, path: Path) -> Sequence[Attempt] | str:
        if (reason := await in_thread(find_task_fault, path)) is not None:
            return reason
        honest = await run(path, HONEST)
        if honest.rewards is None:
            return f"an honest empty attempt gets no reward: {honest.error}"
        rewards = honest.rewards

        async def attempt(cheat: TaskCheat) -> Attempt:
            made = _attempt(cheat, name, await run(path, cheat), rewards)
            on_attempt(made)
            return made

        return await run_together(attempt(cheat) for cheat in cheats)

    results = dict(zip(tasks, await run_together(attack(name, path) for name, path in tasks.items()), strict=True))
    attempts = [attempt for result in results.values() if not isinstance(result, str) for attempt in result]
    order = {cheat.name: place for place, cheat in enumerate(cheats)}
    attempts.sort(key=lambda attempt: order[attempt.cheat])
    return RedTeamReport(attempts, {name: result for name, result in results.items() if isinstance(result, str)})


def _attempt(cheat: TaskCheat, task_id: str, trial: _Trial, honest: Mapping[str, float]) -> Attempt:
    reward, baseline = _compared(trial.rewards, honest)
    result, detail = attempt_result(reward, baseline), trial.error
    if trial.skipped and (reward is None or reward <= baseline):
        result, reward, detail = "not tried", None, trial.skipped
    return Attempt(cheat.name, cheat.does, task_id, result, reward, baseline, detail)


def _compared(rewards: Mapping[str, float] | None, honest: Mapping[str, float]) -> tuple[float | None, float]:
    """Return two rewards: `reward`, or of several numbers without that name the pair that gained most."""
    if rewards is None:
        return None, honest.get("reward", max(honest.values(), default=0.0))
    if "reward" in rewards or "reward" in honest:
        return rewards.get("reward"), honest.get("reward", 0.0)
    pairs = [(value, honest.get(key, 0.0)) for key, value in rewards.items()]
    return max(pairs, key=lambda pair: pair[0] - pair[1], default=(None, 0.0))


async def _trial(path: Path, cheat: TaskCheat, environment: Environment, gates: Gates) -> _Trial:
    variables = await in_thread(_variables, path)

    def make(folder: Path) -> dict[str, Json]:
        return {
            "task": {"path": str(path)},
            "trials_dir": str(folder),
            "agent": {"import_path": AGENT, "kwargs": {"script": cheat.command, "variables": variables}},
            "environment": make_environment_fields(environment),
            "verifier": {"max_timeout_sec": VERIFIER_S},
        }

    try:
        return await play_trial(make, _read, gates=gates, trials_dir=None, keep=lambda trial: False)
    except MissingError:  # no trial could run
        raise
    except Exception as error:  # what breaks one trial must not hide the others
        return _Trial(None, error=" ".join(f"{type(error).__name__}: {error}".split()))


def _variables(path: Path) -> dict[str, Json]:
    """Return the facts that an agent can know: the files that the instructions name, and those of the tests."""
    instructions = " ".join(file.read_text() for file in sorted(path.glob("**/instruction.md")))
    folders = [path / "tests", *path.glob("steps/*/tests")]
    files = {file.relative_to(folder) for folder in folders for file in folder.rglob("*") if file.is_file()}
    return {
        "OUTPUTS": " ".join(dict.fromkeys(_FILE.findall(instructions))),
        "TESTS": " ".join(sorted(str(file) for file in files if file.suffix != ".sh" and " " not in str(file))),
    }


def _read(result: TrialResult, _passing: GatePass, folder: Path) -> _Trial:
    from rlkit.redteam.agent import REPORT

    errors = [part.exception_info for part in list_steps(result)] + [result.exception_info]
    error = next((info for info in errors if info is not None), None)
    if error is not None and error.exception_type == MissingError.__name__:
        raise MissingError(error.exception_message)
    text = "" if error is None else " ".join(f"{error.exception_type}: {error.exception_message}".split())
    rewards = result.verifier_result.rewards if result.verifier_result else None
    scripts = [json.loads(file.read_text()) for file in sorted(folder.glob(f"**/{REPORT}"))]
    return _Trial(None if rewards is None else parse_rewards(rewards), _reason_to_skip(scripts), text)


def _reason_to_skip(scripts: Sequence[Mapping[str, Json]]) -> str:
    """Return the reason why no step's script was carried out; "" where one was."""
    if not scripts or any(script["exit_code"] == 0 for script in scripts):
        return ""
    last = scripts[-1]
    said = cast("str", last["said"]).strip().splitlines()
    reason = said[-1].strip() if said else "no output"
    return reason if last["exit_code"] == SKIPPED else f"its script ended with exit code {last['exit_code']}: {reason}"
