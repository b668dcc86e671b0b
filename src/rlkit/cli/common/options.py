"""Arguments and options that several commands have.

Invariant: one name means the same in every command.
"""

from __future__ import annotations

from typing import Annotated

import typer

Configs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG",
        help="YAML files, the later over the earlier, and then single values such as steps=20.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NoPanel = Annotated[bool, typer.Option("--no-panel", help="Plain lines also on a terminal.")]
Uploads = Annotated[
    bool, typer.Option("--openreward", help="Upload rollouts of OpenReward's environments; needs OPENREWARD_API_KEY.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]


def _help(context: typer.Context, asked: bool) -> None:
    if asked:
        typer.echo(context.get_help())
        raise typer.Exit


# Typer's own --help of a group has no default, for lack of which Typer imports pydantic, also for `train --help`.
Help = Annotated[bool, typer.Option("--help", "-h", callback=_help, is_eager=True, help="Show this message and exit.")]
