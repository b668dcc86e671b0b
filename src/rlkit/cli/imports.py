"""`rlkit import`."""

from __future__ import annotations

from pathlib import Path

from rlkit.cli.common.output import Output


def openreward_config(file: Path, output: Output) -> int:
    """Print the configuration that does the same, and on stderr what to know about it. Returns the exit code."""
    import yaml

    from rlkit.config import load_config
    from rlkit.config.loading.nodes import plain
    from rlkit.config.loading.yaml_text import read_file
    from rlkit.envs.openreward.convert import convert
    from rlkit.errors import UsageError

    old = plain(read_file(file))
    if not isinstance(old, dict):
        raise UsageError(f"{file}: a configuration is a mapping")
    try:
        made = convert(old)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    try:
        load_config([], settings=made.settings)  # what cannot be trained with is said now
    except UsageError as error:
        raise UsageError(f"{file}: {made.named_as_there(str(error).removeprefix('python: '))}") from None
    if output.json:
        output.data({"config": made.settings, "notes": [*made.notes]})
        return 0
    output.line(yaml.safe_dump(made.settings, sort_keys=False, allow_unicode=True).rstrip())
    for note in made.notes:
        output.note(note)
    return 0
