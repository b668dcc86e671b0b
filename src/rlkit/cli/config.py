"""`rlkit init`, `rlkit config` and `rlkit import`."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.common.options import Configs
from rlkit.cli.common.output import Output


def init(
    output: Output,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to create; an existing folder must be empty.")
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="Name of the environment; by default the name of the folder.")
    ] = None,
) -> None:
    """Create a project.

    The folder contains an environment, its configuration, a passing test and a README.
    """
    from rlkit.tools.scaffold import scaffold

    files = scaffold(directory, name=name)
    tests = ["pytest"] if find_spec("pytest") else []  # rlkit does not install it
    steps = [f"cd {shlex.quote(str(directory))}", *tests, "rlkit check config.yaml", "rlkit train config.yaml"]
    summary = f"created {directory} with {', '.join(path.name for path in files)}"
    output.result(
        {"directory": str(directory), "files": [str(path) for path in files]},
        "\n".join([summary, "next:", *(f"  {step}" for step in steps)]),
    )


def show(output: Output, config: Configs) -> None:
    """Print the complete configuration with the origin of each value."""
    from rlkit.config.loading.load import load_arguments
    from rlkit.config.loading.resolved import show_lines

    resolved = load_arguments(config)
    output.result({"config": resolved.tree, "origins": resolved.origins}, "\n".join(show_lines(resolved)))


def schema(output: Output) -> None:
    """Print the JSON schema of configurations, for editors."""
    from rlkit.config.loading.outline import config_schema

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **config_schema()}
    output.result(schema, json.dumps(schema, indent=2, ensure_ascii=False))


def import_openreward(
    output: Output, file: Annotated[Path, typer.Argument(metavar="FILE", help="tinker-config.yaml file to convert.")]
) -> None:
    """Convert a tinker-config.yaml of OpenReward's cookbook.

    The rlkit configuration is printed on stdout, and notes on the conversion on stderr.
    """
    import yaml

    from rlkit.envs.openreward.convert import convert_file

    converted = convert_file(file)
    text = yaml.safe_dump(converted.settings, sort_keys=False, allow_unicode=True).rstrip()
    output.result({"config": converted.settings, "notes": [*converted.notes]}, text)
    for note in () if output.json else converted.notes:
        output.note(note)
