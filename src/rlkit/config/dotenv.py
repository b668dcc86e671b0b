"""`.env`: settings and credentials of a working directory.

Invariant: a value is never shown, and never replaces one that the environment already has.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from rlkit.errors import ConfigError

DOTENV = Path(".env")

_ENTRY = re.compile(
    r"""
    [^\S\n]* (?:
        (?:export[^\S\n]+)? (?P<name>[A-Za-z_][A-Za-z0-9_]*) [^\S\n]*=[^\S\n]*
        (?: "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)' | (?P<bare>[^\s"'\#](?:[^\n\#]|(?<!\s)\#)*|) )
    )? [^\S\n]* (?:(?<!\S)\#[^\n]*)? (?:\n|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def read_dotenv(path: Path = DOTENV) -> dict[str, str]:
    """The names and values of a file of `KEY=VALUE` lines; an empty mapping if there is no such file.

    Values may stand in quotes (in double ones `\\n` is a line break); `export` before a name and comments are ignored.

    Raises:
        ConfigError: the file cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except IsADirectoryError:
        return {}  # the folder of a virtual environment, which some people call `.env`
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, write KEY=VALUE lines") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values = dict[str, str]()
    text, position = text.replace("\r\n", "\n"), 0
    while position < len(text):
        found = _ENTRY.match(text, position)
        if found is None:
            line = text.count("\n", 0, position) + 1
            raise ConfigError(f"{path}:{line}: not of the form KEY=VALUE; put a value with quotes in it in quotes")
        position = found.end()
        if found["double"] is not None:
            values[found["name"]] = re.sub(r"\\(.)", _unescaped, found["double"], flags=re.DOTALL)
        elif found["name"] is not None:
            values[found["name"]] = found["single"] if found["single"] is not None else found["bare"].strip()
    return values


def _unescaped(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[1])


def export_dotenv(path: Path = DOTENV, *, environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Put what `.env` says into the environment, for libraries that read their credentials there.

    Args:
        path: the file.
        environ: the environment to add to; names that it has already keep their values.

    Returns:
        The names that were added.

    Raises:
        ConfigError: the file cannot be read.
    """
    added = {name: value for name, value in read_dotenv(path).items() if name not in environ}
    environ.update(added)
    return tuple(added)
