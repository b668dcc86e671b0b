"""The red team against one environment of any kind: tasks of Harbor's by trials, others by replies.

Invariant: an environment is attacked by what can cheat it, and a line is said of all that takes long.
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
    from rlkit.envs.harbor.settings import Environment
    from rlkit.envs.harbor.task import HarborTask

type Say = Callable[[str], None]


async def attack_environment(
    name: str,
    source: TaskSource | Sequence[Env],
    *,
    tasks: int,
    timeout_s: float,
    seed: int,
    say: Say = lambda message: None,
) -> RedTeamReport:
    """Try the cheats on some tasks of an environment, as `attack_replies` or `attack_tasks`, and say how far it is.

    Args:
        name: of the environment, for people.
        source: its tasks.
        tasks: how many are attacked.
        timeout_s: for one rollout; trials of Harbor's tasks have limits of their own.
        seed: chooses tasks of a sequence, and what cheats draw by chance.
        say: receives lines about progress.
    """
    if harbor := _harbor_tasks(source, tasks=tasks, seed=seed):
        folders = {task.task_id: task.path for task in harbor}
        return await attack_folders(folders, harbor[0].settings.environment, say=say)
    say(f"{name}: trying {len(REPLY_CHEATS)} cheats on up to {tasks} tasks")
    return await attack_replies(source, tasks=tasks, timeout_s=timeout_s, seed=seed)


async def attack_folders(
    tasks: Mapping[str, Path], environment: Environment, *, jobs: int = 4, say: Say = lambda message: None
) -> RedTeamReport:
    """Try the cheats on folders of Harbor's tasks, as `attack_tasks` does, and say how far it is."""
    from rlkit.redteam.task_attacks import attack_tasks
    from rlkit.redteam.task_cheats import TASK_CHEATS

    ended = Counter[str]()

    def tell(attempt: Attempt) -> None:
        ended[attempt.task_id] += 1
        if attempt.result == "earned":
            say(f"{attempt.task_id}: {attempt.cheat} earned {attempt.reward:g}, not {attempt.honest:g}")
        if ended[attempt.task_id] == len(TASK_CHEATS):
            done = sum(count == len(TASK_CHEATS) for count in ended.values())
            say(f"{attempt.task_id}: {len(TASK_CHEATS)} cheats tried; {done} of {len(tasks)} tasks done")

    say(f"trying {len(TASK_CHEATS)} cheats on {len(tasks)} tasks, {jobs} trials at a time")
    return await attack_tasks(tasks, environment=environment, jobs=jobs, on_attempt=tell)


def _harbor_tasks(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> Sequence[HarborTask]:
    """Return some tasks of Harbor's, where the source is made of these."""
    module = sys.modules.get("rlkit.envs.harbor.task")  # where it was not imported, no task is of its kind
    if module is None or not isinstance(source, Sequence) or not source:
        return []
    from rlkit.envs.harbor.task import HarborTask

    if not isinstance(source[0], HarborTask):
        return []
    drawn = draw_tasks(source, tasks=tasks, seed=seed)
    return [task for task in drawn if isinstance(task, HarborTask)]
