"""`rlkit tasks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.common.output import Data, Output, printable
from rlkit.cli.common.signals import terminable
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.harbor.checking import Checked

FAULTS_FOUND = 1
_NAMED = 5
"""Tasks that are named in the line about what is not sealed."""


def check(
    folder: Path,
    output: Output,
    *,
    environment: str,
    kwargs: Sequence[str],
    task_ids: Sequence[str],
    exclude: Sequence[str],
    jobs: int,
    redteam: bool = False,
) -> int:
    """Try each task with its solution and without, or with the red team's cheats. Returns the exit code."""
    from rlkit.envs.harbor.checking import check_tasks
    from rlkit.envs.harbor.settings import environment as named_environment
    from rlkit.envs.harbor.tasks import Selection, find

    found = find(folder, field="DIR")
    chosen = Selection(task_ids=task_ids, exclude=exclude, shuffle=False).of(list(found))
    where = named_environment(environment, _values(kwargs))

    def told(checked: Checked) -> None:
        if not output.json:
            output.note(f"{checked.task_id}: {checked.finding}")

    tasks = {name: found[name] for name in chosen}
    if redteam:
        from rlkit.cli.tasks.redteam import attack_folder

        return attack_folder(tasks, where, output, jobs=jobs)
    with terminable() as interruptible:
        checks = interruptible.run(check_tasks(tasks, environment=where, jobs=jobs, told=told))
    good = all(checked.ok for checked in checks)
    if output.json:
        listed: list[Data] = [asdict(checked) for checked in checks]
        output.data({"ok": good, "tasks": listed})
    else:
        output.line(table(checks))
    return 0 if good else FAULTS_FOUND


def convert(source: Path, target: Path, output: Output) -> int:
    """Convert tasks of terminal-bench 1, and print a line a task and a difference. Returns the exit code."""
    from rlkit.envs.harbor.terminal_bench.convert import convert as convert_tasks

    done = convert_tasks(source, target)
    if output.json:
        differing = {name: list(lines) for name, lines in done.differences.items()}
        output.data({"made": [str(path) for path in done.made], "failed": dict(done.failed), "differences": differing})
    else:
        for path in done.made:
            output.line(f"made    {path}")
            for line in done.differences.get(path.name, ()):
                output.line(f"        {printable(line)}")
        for name, why in done.failed.items():
            output.line(f"failed  {name}: {why}")
    return FAULTS_FOUND if done.failed else 0


def generate(target: Path, output: Output, *, variants: int, held_out: int, seed: int) -> int:
    """Write generated tasks, and print how many. Returns the exit code."""
    from rlkit.envs.harbor.generated.file_tasks import FileTasks
    from rlkit.envs.harbor.generated.task_folders import write_file_tasks

    count = write_file_tasks(FileTasks(variants=variants, held_out=held_out, seed=seed), target)
    if output.json:
        output.data({"folder": str(target), "tasks": count})
    else:
        output.line(f"wrote {count} tasks to {target}")
    return 0


def table(checks: Sequence[Checked]) -> str:
    """`name  sound  solution 1  nothing 0  0.4 s`, with what is wrong at the end and what was said of it below.

    The last lines say what an agent could forge a reward with.
    """
    width = max((len(checked.task_id) for checked in checks), default=0)
    lines = [f"{'task':{max(width, 4)}}  {'':18}  solution  nothing  seconds"]
    for one in checks:
        rewards = f"{_shown(one.solution):>8}  {_shown(one.nothing):>7}"
        line = f"{one.task_id:{max(width, 4)}}  {one.finding:18}  {rewards}  {one.seconds:7.1f}  {one.detail}"
        lines.append(line.rstrip())
        lines += [f"{'':{max(width, 4)}}  | {printable(said)}" for said in one.said]
    for open_end in dict.fromkeys(line for one in checks for line in one.open_ends):
        names = [one.task_id for one in checks if open_end in one.open_ends]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"not sealed ({', '.join(names[:_NAMED])}{more}): {open_end}")
    return "\n".join(lines)


def _shown(rewards: Mapping[str, float] | None) -> str:
    if not rewards:
        return "-"
    if "reward" in rewards:
        return f"{rewards['reward']:g}"
    return "/".join(f"{value:g}" for value in rewards.values())


def _values(pairs: Sequence[str]) -> dict[str, Json]:
    """`key=value` as a configuration reads them."""
    from rlkit.config import load_config

    given = ["envs.target.env=harbor", *(f"envs.target.args.{pair}" for pair in pairs)]
    return dict(load_config([], given).config.envs["target"].args)
