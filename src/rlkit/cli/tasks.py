"""`rlkit tasks`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.check import print_reports
from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.options import RedTeam
from rlkit.cli.common.output import Output
from rlkit.cli.common.signals import run_terminable


def check(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Task folder, or folder of tasks.")],
    *,
    environment: Annotated[
        str, typer.Option(help="Sandbox of the tasks: local, a Harbor environment type, or package.module:Class.")
    ] = "local",
    environment_kwargs: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the environment class; repeatable.")
    ] = None,
    task_id: Annotated[list[str] | None, typer.Option(help="Glob of tasks to check; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of tasks to skip; repeatable.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent tasks; with --redteam, of concurrent trials.")
    ] = 4,
    redteam: RedTeam = False,
) -> int:
    """Check Harbor tasks with their solution and an idle agent.

    The solution must earn the full reward, and the idle agent must not. The exit code is 1 if a task fails.
    With --redteam, the exit code is 1 if a cheating agent earns more than an idle agent.
    """
    from rlkit.config.loading.load import load_config
    from rlkit.envs.harbor import settings
    from rlkit.envs.harbor.checking import check_tasks, render_checks
    from rlkit.envs.harbor.tasks import Selection, find_tasks

    folders = find_tasks(directory, field="DIR")
    selection = Selection(task_ids=task_id or [], exclude=exclude or [], shuffle=False)
    tasks = {name: folders[name] for name in selection.select(list(folders))}
    # Parse KEY=VALUE as in a configuration, by loading one with a single environment, `target`.
    values = ["envs.target.env=harbor", *(f"envs.target.args.{pair}" for pair in environment_kwargs or [])]
    backend = settings.make_environment(environment, dict(load_config([], values).config.envs["target"].args))
    note = output.silent if output.json else output.note
    if redteam:
        from rlkit.redteam.attack import attack_folders

        return print_reports(output, {"": run_terminable(attack_folders(tasks, backend, jobs=jobs, note=note))})

    checks = run_terminable(
        check_tasks(
            tasks, environment=backend, jobs=jobs, on_check=lambda check: note(f"{check.task_id}: {check.finding}")
        )
    )
    is_ok = all(check.ok for check in checks)
    output.result({"ok": is_ok, "tasks": [asdict(check) for check in checks]}, render_checks(checks))
    return 0 if is_ok else FAILED


def convert(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a terminal-bench 1 task, or of several.")],
    *,
    to: Annotated[Path, typer.Option(help="Output folder; each task becomes a subfolder.")],
) -> int:
    """Convert terminal-bench 1 tasks into Harbor tasks."""
    from rlkit.envs.harbor.terminal_bench.convert import convert

    conversion = convert(directory, to)
    differences = {name: list(lines) for name, lines in conversion.differences.items()}
    lines: list[str] = []
    for path in conversion.folders:
        lines += [f"made    {path}", *(f"        {line}" for line in differences.get(path.name, ()))]
    lines += [f"failed  {name}: {reason}" for name, reason in conversion.failed.items()]
    record = {"folders": [str(path) for path in conversion.folders], "failed": dict(conversion.failed)}
    output.result({**record, "differences": differences}, "\n".join(lines))
    return FAILED if conversion.failed else 0


def generate(
    output: Output,
    *,
    to: Annotated[Path, typer.Option(help="Output folder, with a subfolder per task in train/ and held-out/.")],
    variants: Annotated[int, typer.Option(min=1, max=20, help="Number of training tasks of each kind.")] = 12,
    held_out: Annotated[int, typer.Option(min=1, max=20, help="Number of evaluation tasks of each kind.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the file and folder names.")] = 0,
) -> None:
    """Generate the small Harbor tasks of the environment `file_tasks`."""
    from rlkit.envs.harbor.generated.file_tasks import FileTasksSettings
    from rlkit.envs.harbor.generated.task_folders import write_file_tasks

    count = write_file_tasks(FileTasksSettings(variants=variants, held_out=held_out, seed=seed), to)
    output.result({"folder": str(to), "tasks": count}, f"wrote {count} tasks to {to}")
