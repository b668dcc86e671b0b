"""Command-line application.

Invariant: commands import the library when they run, not before, so `--help` is fast.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, override

import typer
from typer.core import TyperGroup

from rlkit.cli import check, checkpoints, config, evaluate, launch, runs, serve, sync, tasks, train, view
from rlkit.cli.common.guard import add_command
from rlkit.cli.common.output import rlkit_version


class Group(TyperGroup):
    """Command group that renders help without pydantic, which Typer imports for flags without a default."""

    @override
    def get_params(self, ctx: typer.Context):  # pyright: ignore[reportIncompatibleMethodOverride]  a private type
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if parameter.name in ("help", "install_completion", "show_completion"):
                parameter.default = False
        return parameters


class CheckGroup(Group):
    """Command group in which `rlkit check TARGET` is short for `rlkit check env TARGET`."""

    @override
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  a private type
        is_command = bool(args) and args[0] in {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if is_command else ["env", *args])


class RunsGroup(Group):
    """Command group in which `rlkit runs` is short for `rlkit runs list`."""

    @override
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  a private type
        has_command = bool(args) and (args[0] in ctx.help_option_names or not args[0].startswith("-"))
        return super().parse_args(ctx, args if has_command else ["list", *args])


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"rlkit {rlkit_version()}")
        raise typer.Exit


app = typer.Typer(
    cls=Group,
    epilog="Exit codes: 0 success, 1 the run failed, 2 bad usage or configuration, 3 something is missing, "
    "4 budget reached, 130 interrupted with a checkpoint.",
    no_args_is_help=True,
    # Rich rendering takes four times as long as the rest of --help.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train open-weight language models by reinforcement learning through the Tinker API."""


def _add_group(name: str, help: str, cls: type[Group] = Group) -> typer.Typer:
    group = typer.Typer(cls=cls, help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


add_command(app, "train", train.train)
add_command(app, "resume", train.resume)
add_command(app, "eval", evaluate.evaluate)
add_command(app, "export", checkpoints.export_run)
add_command(app, "sync", sync.sync)
add_command(app, "serve", serve.serve)
add_command(app, "chat", serve.chat)
add_command(app, "init", config.init, dotenv=False)
add_command(app, "doctor", runs.doctor)
add_command(app, "audit", runs.audit)
add_command(app, "records", runs.records)
add_command(app, "verify", runs.verify)
add_command(app, "view", view.view)

_runs = _add_group("runs", "List, remove and rename runs.", RunsGroup)
add_command(_runs, "list", runs.list_all)
add_command(_runs, "rm", runs.remove)
add_command(_runs, "mv", runs.rename)

_check = _add_group(
    "check",
    "Check an environment or a service. `rlkit check TARGET` checks an environment (options: `rlkit check env`).",
    CheckGroup,
)
add_command(_check, "env", check.check)
add_command(_check, "service", check.check_service)

_config = _add_group("config", "Inspect a configuration.")
add_command(_config, "show", config.show)
add_command(_config, "schema", config.schema, dotenv=False, json_help="Print the schema on one line.")

_checkpoints = _add_group("checkpoints", "Manage saved weights.")
add_command(_checkpoints, "list", checkpoints.list_all)
add_command(_checkpoints, "show", checkpoints.show)
add_command(_checkpoints, "delete", checkpoints.delete)
add_command(_checkpoints, "prune", checkpoints.prune)
add_command(_checkpoints, "ttl", checkpoints.ttl)
add_command(_checkpoints, "download", checkpoints.download)
add_command(_checkpoints, "export", checkpoints.export)

_launch = _add_group("launch", "Submit a run to remote machines.")
add_command(_launch, "beaker", launch.beaker)

_tasks = _add_group("tasks", "Check, convert and generate Harbor tasks.")
add_command(_tasks, "check", tasks.check)
add_command(_tasks, "convert", tasks.convert)
add_command(_tasks, "generate", tasks.generate)

_import = _add_group("import", "Convert configurations of other programs.")
add_command(_import, "openreward-config", config.import_openreward, dotenv=False)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end a run.
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="rlkit")
