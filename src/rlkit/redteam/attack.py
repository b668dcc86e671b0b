"""Red-team any environment: cheating agents on Harbor tasks, cheating replies on other environments.

Invariant: only applicable cheats are tried, and every slow phase reports progress.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.check.context import draw_tasks
from rlkit.env import Env, TaskSource
from rlkit.redteam.reply_attacks import attack_replies
from rlkit.redteam.reply_cheats import REPLY_CHEATS
from rlkit.redteam.report import Attempt, RedTeamReport

if TYPE_CHECKING:
    from harbor.models.trial.config import EnvironmentConfig

    from rlkit.envs.harbor.task import HarborTask

type Note = Callable[[str], None]


async def attack_environment(
    name: str,
    source: TaskSource | Sequence[Env],
    *,
    tasks: int,
    timeout_s: float,
    seed: int,
    note: Note = lambda message: None,
) -> RedTeamReport:
    """Try the cheats on a sample of tasks: `attack_tasks` for Harbor tasks, `attack_replies` otherwise.

    Args:
        tasks: maximum number of tasks to draw.
        timeout_s: limit of one rollout, in seconds; Harbor trials have their own limits.
        seed: seed of the sample of tasks and of the random content of cheats.
    """
    if harbor_tasks := _draw_harbor_tasks(source, tasks=tasks, seed=seed):
        folders = {task.task_id: task.path for task in harbor_tasks}
        return await attack_folders(folders, harbor_tasks[0].settings.environment, note=note)
    note(f"{name}: trying {len(REPLY_CHEATS)} cheats on up to {tasks} tasks")
    return await attack_replies(source, tasks=tasks, timeout_s=timeout_s, seed=seed)


async def attack_folders(
    tasks: Mapping[str, Path], environment: EnvironmentConfig, *, jobs: int = 4, note: Note = lambda message: None
) -> RedTeamReport:
    """Try the cheats on folders of Harbor tasks with `attack_tasks`, and report progress."""
    from rlkit.redteam.task_attacks import TASK_CHEATS, attack_tasks

    counts = Counter[str]()

    def report_progress(attempt: Attempt) -> None:
        counts[attempt.task_id] += 1
        if attempt.result == "earned":
            note(
                f"{attempt.task_id}: {attempt.cheat} earned {attempt.reward:g}; "
                f"an honest attempt earns {attempt.honest_reward:g}"
            )
        if counts[attempt.task_id] == len(TASK_CHEATS):
            done = sum(count == len(TASK_CHEATS) for count in counts.values())
            note(f"{attempt.task_id}: all {len(TASK_CHEATS)} cheats done; {done} of {len(tasks)} tasks done")

    note(f"trying {len(TASK_CHEATS)} cheats on {len(tasks)} tasks, {jobs} trials at a time")
    return await attack_tasks(tasks, environment=environment, jobs=jobs, on_attempt=report_progress)


def _draw_harbor_tasks(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> Sequence[HarborTask]:
    """Draw tasks if the source holds Harbor tasks; else return an empty list."""
    module = sys.modules.get("rlkit.envs.harbor.task")  # if it is not imported, there are no Harbor tasks
    if module is None or not isinstance(source, Sequence) or not source:
        return []
    from rlkit.envs.harbor.task import HarborTask

    if not isinstance(source[0], HarborTask):
        return []
    return [task for task in draw_tasks(source, tasks=tasks, seed=seed) if isinstance(task, HarborTask)]
