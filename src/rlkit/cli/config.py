"""`rlkit config`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlkit.cli.common.arguments import resolve
from rlkit.cli.common.output import Output


def show(arguments: Sequence[str], output: Output) -> int:
    """Print every value and where it comes from. Returns the exit code."""
    from rlkit.config import show_lines

    resolved = resolve(arguments)
    if output.json:
        output.data({"config": resolved.tree, "origins": resolved.origins})
    else:
        output.line("\n".join(show_lines(resolved)))
    return 0


def schema(output: Output) -> int:
    """Print the JSON schema. Returns the exit code."""
    from rlkit.config import schema_json

    text = schema_json()
    if output.json:
        output.data(json.loads(text))
    else:
        output.line(text)
    return 0
