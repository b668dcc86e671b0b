"""The commands of `rlkit tasks`, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.common.guard import command
from rlkit.cli.common.options import Debug, Help, Json

tasks_app = typer.Typer(help="Look after tasks of Harbor.", no_args_is_help=True, rich_markup_mode=None)


@tasks_app.callback(add_help_option=False)
def tasks_root(show_help: Help = False) -> None:
    """Look after tasks of Harbor."""


@tasks_app.command("check")
def tasks_check(  # noqa: PLR0917  Typer reads options from parameters of any kind
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A task, or a folder of tasks.")],
    environment: Annotated[
        str, typer.Option(help="Where they run: local, a type of Harbor's, or package.module:Class.")
    ] = "local",
    environment_kwargs: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the environment's class.")
    ] = None,
    task_id: Annotated[list[str] | None, typer.Option(help="A glob of the tasks to check; several times.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="A glob of those to leave out; several times.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at one time.")] = 4,
    redteam: Annotated[
        bool, typer.Option("--redteam", help="Try the red team's cheats instead: none may earn a reward.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Try each task with its solution, and with an agent that does nothing.

    Exit code 1 if a solution does not get the full reward, or doing nothing does; with --redteam, if a cheat earns more
    than an honest empty attempt.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.tasks.tasks import check

        kwargs, ids, without = environment_kwargs or [], task_id or [], exclude or []
        raise typer.Exit(
            check(
                directory,
                output,
                environment=environment,
                kwargs=kwargs,
                task_ids=ids,
                exclude=without,
                jobs=jobs,
                redteam=redteam,
            )
        )


@tasks_app.command("convert")
def tasks_convert(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A task of terminal-bench 1, or a folder of them.")],
    to: Annotated[Path, typer.Option(help="The folder that gets a folder for each task.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert tasks of terminal-bench 1 (task.yaml) into tasks of Harbor (task.toml)."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.tasks.tasks import convert

        raise typer.Exit(convert(directory, to, output))


@tasks_app.command("generate")
def tasks_generate(  # noqa: PLR0917  Typer reads options from parameters of any kind
    to: Annotated[Path, typer.Option(help="The folder that gets train/ and held-out/ with a folder for each task.")],
    variants: Annotated[int, typer.Option(min=1, max=20, help="Training tasks of each kind.")] = 12,
    held_out: Annotated[int, typer.Option(min=1, max=20, help="Tasks of each kind for evaluation.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Decides the names of files and folders.")] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write small tasks about files, as `file_tasks` of the environment harbor plays them."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.tasks.tasks import generate

        raise typer.Exit(generate(to, output, variants=variants, held_out=held_out, seed=seed))
