"""`rlkit tasks`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.check import FAULTS_FOUND, print_attacks
from rlkit.cli.common.options import RedTeam
from rlkit.cli.common.output import Output
from rlkit.cli.common.signals import run_terminable


def check(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A task, or a folder of tasks.")],
    *,
    environment: Annotated[
        str, typer.Option(help="Where they run: local, a type of Harbor's, or package.module:Class.")
    ] = "local",
    environment_kwargs: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the environment's class.")
    ] = None,
    task_id: Annotated[list[str] | None, typer.Option(help="A glob of the tasks to check; several times.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="A glob of those to leave out; several times.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at one time.")] = 4,
    redteam: RedTeam = False,
) -> int:
    """Try each task with its solution, and with an agent that does nothing.

    Exit code 1 if a solution does not get the full reward, or doing nothing does; with --redteam, if a cheat earns more
    than an honest empty attempt.
    """
    from rlkit.config import load_config
    from rlkit.envs.harbor import settings
    from rlkit.envs.harbor.checking import check_tasks, render_checks
    from rlkit.envs.harbor.tasks import Selection, find_tasks

    folders = find_tasks(directory, field="DIR")
    selection = Selection(task_ids=task_id or [], exclude=exclude or [], shuffle=False)
    chosen = {name: folders[name] for name in selection.select(list(folders))}
    # Values mean what they do in a configuration.
    values = ["envs.target.env=harbor", *(f"envs.target.args.{pair}" for pair in environment_kwargs or [])]
    where = settings.make_environment(environment, dict(load_config([], values).config.envs["target"].args))
    say = output.silent if output.json else output.note
    if redteam:
        from rlkit.redteam.attack import attack_folders

        return print_attacks(output, {"": run_terminable(attack_folders(chosen, where, jobs=jobs, say=say))})

    checks = run_terminable(
        check_tasks(
            chosen, environment=where, jobs=jobs, on_check=lambda check: say(f"{check.task_id}: {check.finding}")
        )
    )
    good = all(checked.ok for checked in checks)
    output.result({"ok": good, "tasks": [asdict(checked) for checked in checks]}, render_checks(checks))
    return 0 if good else FAULTS_FOUND


def convert(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A task of terminal-bench 1, or a folder of them.")],
    *,
    to: Annotated[Path, typer.Option(help="The folder that gets a folder for each task.")],
) -> int:
    """Convert tasks of terminal-bench 1 (task.yaml) into tasks of Harbor (task.toml)."""
    from rlkit.envs.harbor.terminal_bench.convert import convert

    done = convert(directory, to)
    differences = {name: list(lines) for name, lines in done.differences.items()}
    lines: list[str] = []
    for path in done.folders:
        lines += [f"made    {path}", *(f"        {line}" for line in differences.get(path.name, ()))]
    lines += [f"failed  {name}: {reason}" for name, reason in done.failed.items()]
    made = [str(path) for path in done.folders]
    output.result({"made": made, "failed": dict(done.failed), "differences": differences}, "\n".join(lines))
    return FAULTS_FOUND if done.failed else 0


def generate(
    output: Output,
    *,
    to: Annotated[Path, typer.Option(help="The folder that gets train/ and held-out/ with a folder for each task.")],
    variants: Annotated[int, typer.Option(min=1, max=20, help="Training tasks of each kind.")] = 12,
    held_out: Annotated[int, typer.Option(min=1, max=20, help="Tasks of each kind for evaluation.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Decides the names of files and folders.")] = 0,
) -> int:
    """Write small tasks about files, as `file_tasks` of the environment harbor plays them."""
    from rlkit.envs.harbor.generated.file_tasks import FileTasks
    from rlkit.envs.harbor.generated.task_folders import write_file_tasks

    count = write_file_tasks(FileTasks(variants=variants, held_out=held_out, seed=seed), to)
    output.result({"folder": str(to), "tasks": count}, f"wrote {count} tasks to {to}")
    return 0
