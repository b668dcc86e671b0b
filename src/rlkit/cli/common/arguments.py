"""Telling configuration files from single values.

Invariant: an argument with `=` in it is a value, unless a file has that very name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.config import Resolved


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files and the overrides (`steps=20`) among the arguments, each in order."""
    values = [argument for argument in arguments if "=" in argument and not Path(argument).is_file()]
    return [Path(argument) for argument in arguments if argument not in values], values


def resolve(arguments: Sequence[str], *, name: str | None = None) -> Resolved:
    """Return the configuration that the arguments describe, named `name` if that is given."""
    from rlkit.config import load_config

    files, values = split(arguments)
    # As JSON, because a name such as 2024 would otherwise be read as a number.
    named = [] if name is None else [f"name={json.dumps(name)}"]
    return load_config(files, [*values, *named])
