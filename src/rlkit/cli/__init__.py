"""The command line.

Invariant: it parses, builds objects, calls the library and maps exceptions to exit codes, nothing else; what a command
needs is imported when that command runs.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of `rlkit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end a run.
            stream.reconfigure(errors="backslashreplace")
    from typer.main import get_command

    from rlkit.cli.app import app

    command = get_command(app)
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            # As with --help: without a default, Typer imports pydantic before it shows the help of a command.
            parameter.default = False
    command(prog_name="rlkit")
