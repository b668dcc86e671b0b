"""`rlkit init`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlkit.cli.common.output import Output


def run(directory: Path, output: Output, *, name: str | None) -> int:
    """Write the project, and print what to do next. Returns the exit code."""
    from rlkit.tools.scaffold import scaffold

    files = scaffold(directory, name=name)
    if output.json:
        output.data({"directory": str(directory), "files": [str(path) for path in files]})
        return 0
    output.line(f"made {directory} with {', '.join(path.name for path in files)}")
    output.line("next:")
    for command in (
        f"cd {shlex.quote(str(directory))}",
        "pytest",
        "rlkit check config.yaml",
        "rlkit train config.yaml",
    ):
        output.line(f"  {command}")
    return 0
