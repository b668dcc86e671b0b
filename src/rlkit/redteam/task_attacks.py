"""Attack Harbor tasks: each cheat in its own trial and environment.

Invariant: a failed trial does not affect other trials; only a missing requirement ends the attack.
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
from rlkit.envs.harbor.checking import find_error, join_line
from rlkit.envs.harbor.outcome import parse_rewards
from rlkit.envs.harbor.tasks import find_task_fault
from rlkit.envs.harbor.trial import play_trial
from rlkit.errors import MissingError
from rlkit.redteam import cheats_on_outputs, cheats_on_programs, cheats_on_rewards, cheats_on_tests
from rlkit.redteam.report import Attempt, RedTeamReport, classify_attempt
from rlkit.redteam.task_cheat import PRELUDE, SKIP_EXIT_CODE, TaskCheat
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.models.trial.result import TrialResult

AGENT = "rlkit.redteam.agent:CheatingAgent"
HONEST = TaskCheat("honest-empty-attempt", "Does nothing.", "")

TASK_CHEATS = (
    *cheats_on_rewards.CHEATS,
    *cheats_on_tests.CHEATS,
    *cheats_on_programs.CHEATS,
    *cheats_on_outputs.CHEATS,
)
"""All cheats, ordered by target; names are unique, and the documentation repeats the descriptions."""

VERIFIER_S = 60.0  # time limit of the tests: some cheats make them hang
_OUTPUT_PATH = re.compile(r"`(/?(?:[\w-][\w.-]*/)*[\w-]+\.[\w.-]*\w)`")
"""Path of a file with an extension in an instruction."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """Result of a trial."""

    rewards: Mapping[str, float] | None  # the verifier's rewards; None if there are none
    skip_reason: str = ""  # reason why the script could not run; "" if it ran
    error: str = ""  # reason for missing rewards


@stop_leftover_tasks()
async def attack_tasks(
    tasks: Mapping[str, Path],
    *,
    environment: EnvironmentConfig,
    jobs: int,
    cheats: Sequence[TaskCheat] = TASK_CHEATS,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> RedTeamReport:
    """Try each cheat on each task, and compare its reward with that of an honest empty attempt.

    Args:
        tasks: folders of tasks, by id.

    Raises:
        UsageError: the environment cannot run a task.
        MissingError: the environment cannot run on this machine.
    """
    slots = asyncio.Semaphore(jobs)

    async def run(path: Path, cheat: TaskCheat) -> _Trial:
        async with slots:
            return await _run_trial(path, cheat, environment)

    async def attack_task(name: str, path: Path) -> Sequence[Attempt] | str:
        if (reason := await in_thread(find_task_fault, path)) is not None:
            return reason
        honest = await run(path, HONEST)
        if honest.rewards is None:
            return f"an honest empty attempt gets no reward: {honest.error}"
        rewards = honest.rewards

        async def try_cheat(cheat: TaskCheat) -> Attempt:
            attempt = _make_attempt(cheat, name, await run(path, cheat), rewards)
            on_attempt(attempt)
            return attempt

        return await run_together(try_cheat(cheat) for cheat in cheats)

    results = dict(zip(tasks, await run_together(attack_task(name, path) for name, path in tasks.items()), strict=True))
    attempts = [attempt for result in results.values() if not isinstance(result, str) for attempt in result]
    order = {cheat.name: index for index, cheat in enumerate(cheats)}
    attempts.sort(key=lambda attempt: order[attempt.cheat])
    return RedTeamReport(attempts, {name: result for name, result in results.items() if isinstance(result, str)})


def _make_attempt(cheat: TaskCheat, task_id: str, trial: _Trial, honest: Mapping[str, float]) -> Attempt:
    reward, baseline = _compare_rewards(trial.rewards, honest)
    result, detail = classify_attempt(reward, baseline), trial.error
    if trial.skip_reason and (reward is None or reward <= baseline):
        result, reward, detail = "not tried", None, trial.skip_reason
    return Attempt(cheat.name, cheat.description, task_id, result, reward, baseline, detail)


def _compare_rewards(rewards: Mapping[str, float] | None, honest: Mapping[str, float]) -> tuple[float | None, float]:
    """Return the rewards of a cheat and of the honest attempt: `reward`, or else the number with the largest gain."""
    if rewards is None:
        return None, honest.get("reward", max(honest.values(), default=0.0))
    if "reward" in rewards or "reward" in honest:
        return rewards.get("reward"), honest.get("reward", 0.0)
    pairs = [(value, honest.get(key, 0.0)) for key, value in rewards.items()]
    return max(pairs, key=lambda pair: pair[0] - pair[1], default=(None, 0.0))


async def _run_trial(path: Path, cheat: TaskCheat, environment: EnvironmentConfig) -> _Trial:
    variables = await in_thread(_read_variables, path)
    fields: dict[str, Json] = {
        "agent": {"import_path": AGENT, "kwargs": {"script": PRELUDE + cheat.script, "variables": variables}},
        "verifier": {"max_timeout_sec": VERIFIER_S},
    }
    try:
        return await play_trial(path, environment, _read_trial, fields=fields)
    except MissingError:  # no trial can run
        raise
    except Exception as error:  # a fault of one trial must not hide the others
        return _Trial(None, error=join_line(type(error).__name__, str(error)))


def _read_variables(path: Path) -> dict[str, Json]:
    """Return facts that an agent can know: file names in the instructions, and names of test files."""
    instructions = " ".join(file.read_text() for file in sorted(path.glob("**/instruction.md")))
    folders = [path / "tests", *path.glob("steps/*/tests")]
    files = {file.relative_to(folder) for folder in folders for file in folder.rglob("*") if file.is_file()}
    return {
        "OUTPUTS": " ".join(dict.fromkeys(_OUTPUT_PATH.findall(instructions))),
        "TESTS": " ".join(sorted(str(file) for file in files if file.suffix != ".sh" and " " not in str(file))),
    }


def _read_trial(result: TrialResult, folder: Path) -> _Trial:
    from rlkit.redteam.agent import REPORT

    error = find_error(result)
    text = "" if error is None else join_line(error.exception_type, error.exception_message)
    rewards = result.verifier_result.rewards if result.verifier_result else None
    scripts = [json.loads(file.read_text()) for file in sorted(folder.glob(f"**/{REPORT}"))]
    return _Trial(None if rewards is None else parse_rewards(rewards), _find_skip_reason(scripts), text)


def _find_skip_reason(scripts: Sequence[Mapping[str, Json]]) -> str:
    """Return the reason why no script ran; "" if a script ran."""
    if not scripts or any(script["exit_code"] == 0 for script in scripts):
        return ""
    last = scripts[-1]
    output = cast("str", last["output"]).strip().splitlines()
    reason = output[-1].strip() if output else "no output"
    if last["exit_code"] == SKIP_EXIT_CODE:
        return reason
    return f"its script ended with exit code {last['exit_code']}: {reason}"
