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
    from rlkit.cli.app import app

    app(prog_name="rlkit")
