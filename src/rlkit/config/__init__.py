"""Configurations: load, validate and describe a `Config` from YAML files, the command line and Python.

Invariant: importing this package loads nothing; each public name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.config.loading.environment_variables import export_dotenv
    from rlkit.config.loading.load import load_arguments, load_config
    from rlkit.config.loading.objects import load_envs, load_object
    from rlkit.config.loading.resolved import ResolvedConfig, show_lines
    from rlkit.config.reference.describe import reference_markdown, schema_json
    from rlkit.config.schema import Config

__all__ = [
    "Config",
    "ResolvedConfig",
    "export_dotenv",
    "load_arguments",
    "load_config",
    "load_envs",
    "load_object",
    "reference_markdown",
    "schema_json",
    "show_lines",
]

_HOMES = {
    "Config": "schema",
    "ResolvedConfig": "loading.resolved",
    "export_dotenv": "loading.environment_variables",
    "load_arguments": "loading.load",
    "load_config": "loading.load",
    "load_envs": "loading.objects",
    "load_object": "loading.objects",
    "reference_markdown": "reference.describe",
    "schema_json": "reference.describe",
    "show_lines": "loading.resolved",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
