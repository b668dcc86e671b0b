"""The commands of `rlkit launch`, and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from rlkit.cli.common.guard import command
from rlkit.cli.common.options import Debug, Help, Json

launch_app = typer.Typer(
    help="Submit a run to machines that are elsewhere.", no_args_is_help=True, rich_markup_mode=None
)


@launch_app.callback(add_help_option=False)
def launch_root(show_help: Help = False) -> None:
    """Submit a run to machines that are elsewhere."""


@launch_app.command("beaker")
def launch_beaker(  # noqa: PLR0917  Typer reads options from parameters of any kind
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="The command, behind --.", show_default=False)
    ],
    workspace: Annotated[str | None, typer.Option(help="Workspace; that of your account by default.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budget that pays.")] = None,
    cluster: Annotated[list[str] | None, typer.Option(help="A cluster that it may run on; several times.")] = None,
    hostname: Annotated[list[str] | None, typer.Option(help="A node that it may run on; several times.")] = None,
    image: Annotated[str, typer.Option(help="Name of an image in Beaker, or docker:NAME.")] = "rlkit",
    name: Annotated[str, typer.Option(help="Name of the task, and of a run that has none.")] = "rlkit",
    experiment: Annotated[str | None, typer.Option(help="Name of the experiment; Beaker's choice by default.")] = None,
    description: Annotated[str | None, typer.Option(help="For people.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each replica; the hosted service needs none.")] = 0,
    cpus: Annotated[float | None, typer.Option(min=0.1, help="CPUs of each replica.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each replica, such as 32GiB.")] = None,
    priority: Annotated[str, typer.Option(help="low, normal, high, urgent or immediate.")] = "normal",
    preemptible: Annotated[
        bool | None,
        typer.Option("--preemptible/--not-preemptible", help="May be stopped and started again.", show_default="yes"),
    ] = None,
    min_runtime: Annotated[str | None, typer.Option(help="Not stopped before that, such as 2h.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a job that failed is tried again.")] = 0,
    replicas: Annotated[int, typer.Option(min=1, help="How many run at once.")] = 1,
    host_networking: Annotated[bool, typer.Option("--host-networking", help="Use the host's network.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Stopped after that, such as 24h.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable; several times. Not for secrets.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SECRET]", help="A variable that gets a secret of the workspace; several times."),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:SOURCE:/PATH", help="weka, dataset, host, result, volume or secret; several times."),
    ] = None,
    runs_dir: Annotated[str | None, typer.Option(metavar="/PATH", help="Where runs are written; on a mount.")] = None,
    code: Annotated[str, typer.Option(help="git: fetch the commit that is checked out here; or image.")] = "git",
    install: Annotated[str | None, typer.Option(help="A command before it, such as 'uv sync --frozen'.")] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Also with changes that are not pushed, which the job does not have.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print what it prints until it ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the specification; needs no account.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Submit a command to Beaker.

    A run that is trained gets a name and goes on when the job is started again.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.launch.launch import Options, beaker

        options = Options(
            workspace=workspace,
            budget=budget,
            clusters=cluster or [],
            hostnames=hostname or [],
            image=image,
            name=name,
            experiment=experiment,
            description=description,
            gpus=gpus,
            cpus=cpus,
            memory=memory,
            priority=priority,
            preemptible=preemptible,
            min_runtime=min_runtime,
            retries=retries,
            replicas=replicas,
            host_networking=host_networking,
            timeout=timeout,
            env=env or [],
            secrets=secret or [],
            mounts=mount or [],
            runs_dir=runs_dir,
            code=code,
            install=install,
            allow_dirty=allow_dirty,
        )
        raise typer.Exit(beaker(words, options, output, follow=follow, dry_run=dry_run))
