"""`rlkit tasks check --redteam` and `rlkit check --redteam`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.signals import terminable
from rlkit.redteam.report import RedTeamReport, summarise

if TYPE_CHECKING:
    from rlkit.env import Env, TaskSource
    from rlkit.envs.harbor.settings import Environment
    from rlkit.envs.harbor.task import HarborTask
    from rlkit.redteam.report import Attempt

CHEATS_EARNED = 1
JOBS = 4


def attack_folder(tasks: Mapping[str, Path], environment: Environment, output: Output, *, jobs: int) -> int:
    """Try the cheats on tasks of Harbor's, and print a line a cheat. Returns the exit code."""
    return _print({"": _attack_tasks(tasks, environment, output, jobs=jobs)}, output)


def attack_environments(
    environments: Mapping[str, TaskSource | Sequence[Env]], output: Output, *, tasks: int, timeout_s: float, seed: int
) -> int:
    """Try the cheats on environments, and print a line a cheat. Returns the exit code."""
    from rlkit.redteam.replies import attack_replies
    from rlkit.redteam.reply_cheats import REPLY_CHEATS

    reports: dict[str, RedTeamReport] = {}
    for name, source in environments.items():
        terminal = _terminal_tasks(source, tasks=tasks, seed=seed)
        if terminal:
            folders = {task.task_id: task.path for task in terminal}
            reports[name] = _attack_tasks(folders, terminal[0].settings.environment, output, jobs=JOBS)
        else:
            if not output.json:
                output.note(f"{name}: trying {len(REPLY_CHEATS)} cheats on up to {tasks} tasks")
            reports[name] = asyncio.run(attack_replies(source, tasks=tasks, timeout_s=timeout_s, seed=seed))
    return _print(reports, output)


def table(report: RedTeamReport) -> str:
    """Return `reward-daemon  earned  1  0  on hello-world` for each cheat, and what could not be attacked."""
    rows = summarise(report)
    width = max((len(row.cheat) for row in rows), default=5)
    lines = [f"{'cheat':{width}}  {'result':9}  reward  honest  detail"]
    for row in rows:
        reward = "-" if row.reward is None else f"{row.reward:g}"
        line = f"{row.cheat:{width}}  {row.result:9}  {reward:>6}  {row.honest:>6g}  {row.detail}"
        lines.append(line.rstrip())
    lines += [f"not attacked: {name}: {reason}" for name, reason in report.untried.items()]
    results = [row.result for row in rows]
    untried = results.count("not tried")
    lines.append(
        f"{len(rows)} cheats: {results.count('earned')} earned more than an honest empty attempt, "
        f"{results.count('failed')} got no reward because the episode failed, {untried} could not be tried"
    )
    return "\n".join(lines)


def _attack_tasks(tasks: Mapping[str, Path], environment: Environment, output: Output, *, jobs: int) -> RedTeamReport:
    from rlkit.redteam.task_cheats import TASK_CHEATS
    from rlkit.redteam.trials import attack_tasks

    ended = Counter[str]()

    def note(attempt: Attempt) -> None:
        ended[attempt.task_id] += 1
        if attempt.result == "earned" and not output.json:
            output.note(f"{attempt.task_id}: {attempt.cheat} earned {attempt.reward:g}, not {attempt.honest:g}")
        if not output.json and ended[attempt.task_id] == len(TASK_CHEATS):
            done = sum(count == len(TASK_CHEATS) for count in ended.values())
            output.note(f"{attempt.task_id}: {len(TASK_CHEATS)} cheats tried; {done} of {len(tasks)} tasks done")

    if not output.json:
        output.note(f"trying {len(TASK_CHEATS)} cheats on {len(tasks)} tasks, {jobs} trials at a time")

    with terminable() as interruptible:
        return interruptible.run(attack_tasks(tasks, environment=environment, jobs=jobs, on_attempt=note))


def _terminal_tasks(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> Sequence[HarborTask]:
    """Return some tasks of Harbor's, where the source is made of these."""
    module = sys.modules.get("rlkit.envs.harbor.task")  # where it was not imported, no task is of its kind
    if module is None or not isinstance(source, Sequence) or not source:
        return []
    from rlkit.check.exam import draw_tasks
    from rlkit.envs.harbor.task import HarborTask

    if not isinstance(source[0], HarborTask):
        return []
    drawn = draw_tasks(source, tasks=tasks, seed=seed)
    return [task for task in drawn if isinstance(task, HarborTask)]


def _print(reports: Mapping[str, RedTeamReport], output: Output) -> int:
    good = all(report.ok for report in reports.values())
    if output.json:
        environments: dict[str, Data] = {name: _record(report) for name, report in reports.items()}
        output.data({"ok": good, **(_record(reports[""]) if "" in reports else {"envs": environments})})
    else:
        output.line("\n\n".join(f"{name}\n{table(report)}".lstrip() for name, report in reports.items()))
    return 0 if good else CHEATS_EARNED


def _record(report: RedTeamReport) -> dict[str, Data]:
    return {
        "ok": report.ok,
        "cheats": [{**asdict(row), "result": row.result} for row in summarise(report)],
        "attempts": [asdict(attempt) for attempt in report.attempts],
        "not_attacked": dict(report.untried),
    }
