"""`.env`: settings and credentials of a working directory.

Invariant: a value is never shown, and never replaces one that the environment already has.
"""

from __future__ import annotations

import io
import os
from collections.abc import MutableMapping
from pathlib import Path

from dotenv.parser import parse_stream

from rlkit.errors import ConfigError

DOTENV = Path(".env")


def read_dotenv(path: Path = DOTENV) -> dict[str, str]:
    """The names and values of a file of `KEY=VALUE` lines; an empty mapping if there is no such file.

    Values may stand in quotes (in double ones `\\n` is a line break); `export` before a name and comments are ignored.

    Raises:
        ConfigError: the file cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # a virtual environment may have this name, too
        return {}
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, write KEY=VALUE lines") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values = dict[str, str]()
    for binding in parse_stream(io.StringIO(text)):
        name, value, original = binding.key, binding.value, binding.original
        if binding.error or (name is not None and (value is None or not name.isidentifier())):
            blank = len(original.string) - len(original.string.lstrip("\n"))  # lines before it that belong to it
            line = original.line + blank
            raise ConfigError(f"{path}:{line}: not of the form KEY=VALUE; put a value with quotes in it in quotes")
        if name is not None and value is not None:
            values[name] = value
    return values


def export_dotenv(path: Path = DOTENV, *, environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Add the variables of `.env` that are not set to the environment, for libraries; return their names."""
    added = {name: value for name, value in read_dotenv(path).items() if name not in environ}
    environ.update(added)
    return tuple(added)
