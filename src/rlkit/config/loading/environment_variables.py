"""Environment variables in a configuration: the file `.env`, and `${NAME}` in strings.

Invariant: no value of the environment is ever shown. `.env` never replaces a variable that is set, and a node whose
value came from a variable keeps the text as it was written.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dotenv.parser import parse_stream

from rlkit.config.loading.nodes import Node, Steps, dotted, rewrite
from rlkit.errors import ConfigError, did_you_mean

DOTENV = Path(".env")

_REFERENCE = re.compile(r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def read_dotenv(path: Path = DOTENV) -> dict[str, str]:
    """Return the names and values of a file of `KEY=VALUE` lines; an empty mapping if there is no such file.

    Values may stand in quotes (in double ones `\\n` is a line break). `export` before a name and comments are ignored.

    Raises:
        ConfigError: the file cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # a virtual environment may have this name, too
        return {}
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; write KEY=VALUE lines") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values = dict[str, str]()
    for binding in parse_stream(io.StringIO(text)):
        name, value, original = binding.key, binding.value, binding.original
        if binding.error or (name is not None and (value is None or not name.isidentifier())):
            blank = len(original.string) - len(original.string.lstrip("\n"))  # blank lines before the binding
            line = original.line + blank
            raise ConfigError(f"{path}:{line}: not of the form KEY=VALUE; quote a value that contains quotes")
        if name is not None and value is not None:
            values[name] = value
    return values


def export_dotenv(path: Path = DOTENV, *, environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Add the variables of `.env` that are not set to the environment, for libraries; return their names."""
    missing = {name: value for name, value in read_dotenv(path).items() if name not in environ}
    environ.update(missing)
    return tuple(missing)


def interpolate(root: Node, environ: Mapping[str, str]) -> Node:
    """Replace `${NAME}` in every string by the variable's value, and `${NAME:-default}` by it or the default.

    `$${` stands for a plain `${`; any other `$` is itself. Keys are left alone.

    Raises:
        ConfigError: a variable is not set, or a `${` begins no reference.
    """

    def interpolate_node(steps: Steps, node: Node) -> Node:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        where = f"{node.origin}: {dotted(steps)}"
        value = _REFERENCE.sub(lambda reference: _resolve(reference, environ, where), node.value)
        return Node(value, node.origin, template=node.value)

    return rewrite(root, interpolate_node)


def _resolve(reference: re.Match[str], environ: Mapping[str, str], where: str) -> str:
    name, default = reference["name"], reference["default"]
    if reference["escaped"]:
        return reference["escaped"]
    if name is None:
        raise ConfigError(f"{where}: '${{' begins no ${{NAME}} or ${{NAME:-default}}; write '$${{' for a plain one")
    if default is not None and "${" in default:
        raise ConfigError(f"{where}: the default of ${{{name}}} cannot contain another reference")
    if default is not None:
        return environ.get(name) or default
    if name not in environ:
        raise ConfigError(
            f"{where}: the environment variable {name} is not set.{did_you_mean(name, environ)} "
            f"Set it, here or in .env, or write ${{{name}:-default}}"
        )
    return environ[name]


def escape(text: str) -> str:
    """Return the string that `interpolate` turns into `text`."""
    return text.replace("${", "$${")
