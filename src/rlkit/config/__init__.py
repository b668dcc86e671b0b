"""Configurations: from YAML files, the command line and Python to one checked `Config`.

Invariant: importing this package loads nothing; each public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.config.dotenv import export_dotenv
    from rlkit.config.load import load_config
    from rlkit.config.objects import load_envs, load_object
    from rlkit.config.reference import reference_markdown, schema_json
    from rlkit.config.resolved import Resolved, show_lines
    from rlkit.config.schema import Config

__all__ = [
    "Config",
    "Resolved",
    "export_dotenv",
    "load_config",
    "load_envs",
    "load_object",
    "reference_markdown",
    "schema_json",
    "show_lines",
]

_HOMES = {
    "Config": "schema",
    "Resolved": "resolved",
    "export_dotenv": "dotenv",
    "load_config": "load",
    "load_envs": "objects",
    "load_object": "objects",
    "reference_markdown": "reference",
    "schema_json": "reference",
    "show_lines": "resolved",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
