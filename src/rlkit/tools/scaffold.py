"""Files of a new project: an environment, its configuration, a passing test, and a README.

Invariant: existing files are not overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from rlkit._util.files import write_text
from rlkit.errors import UsageError

FILES = ("README.md", "config.yaml", "env.py", "test_env.py")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


def scaffold(directory: Path, *, name: str | None = None) -> Sequence[Path]:
    """Write the files of a new project and return their paths.

    Args:
        directory: folder to create; it may exist if it is empty.
        name: name of the environment in the configuration; derived from the directory's name by default.

    Raises:
        UsageError: the directory is not empty or cannot be created, or the name has characters other than letters,
            digits, `.`, `_`, `-`.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: name a folder that does not exist or is empty")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: name a folder that does not exist or is empty")
    default = re.sub(r"[^A-Za-z0-9_.\-]+", "-", directory.resolve().name).strip("-._") or "env"
    chosen = default if name is None else name
    if not _NAME.fullmatch(chosen):
        raise UsageError(
            f"--name: {chosen!r} must begin with a letter or digit and contain only letters, digits, '.', '_' and '-'"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} cannot be created: {error.strerror}") from None
    templates = files("rlkit.tools") / "templates" / "init"
    for file in FILES:
        text = Template((templates / f"{file}.tmpl").read_text(encoding="utf-8")).substitute(name=chosen)
        write_text(directory / file, text)
    return [directory / file for file in FILES]
