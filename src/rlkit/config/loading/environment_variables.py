"""Environment variables in a configuration: the file `.env`, and `${NAME}` in strings.

Invariant: the value of a variable is never printed. `.env` never replaces a variable that is already set. A node whose
value contains a variable keeps its original text.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dotenv.parser import parse_stream

from rlkit.config.loading.nodes import KeyPath, Node, dotted, rewrite
from rlkit.errors import ConfigError, did_you_mean

DOTENV = Path(".env")

_REFERENCE = re.compile(r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def read_dotenv(path: Path = DOTENV) -> dict[str, str]:
    """Return the variables in a file of `KEY=VALUE` lines; an empty mapping if the file does not exist.

    Values may be quoted (in double quotes, `\\n` is a line break). Comments and `export` before a name are ignored.

    Raises:
        ConfigError: the file cannot be read, or a line is not of the form `KEY=VALUE`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # `.env` may also be a virtual environment
        return {}
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    values = dict[str, str]()
    for binding in parse_stream(io.StringIO(text)):
        name, value, original = binding.key, binding.value, binding.original
        if binding.error or (name is not None and (value is None or not name.isidentifier())):
            line = original.line + len(original.string) - len(original.string.lstrip("\n"))  # after blank lines
            raise ConfigError(f"{path}:{line}: not of the form KEY=VALUE; quote a value that contains quotes")
        if name is not None and value is not None:
            values[name] = value
    return values


def export_dotenv(path: Path = DOTENV, *, environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Add variables of `.env` to the environment unless they are already set; return the names of the added ones."""
    missing = {name: value for name, value in read_dotenv(path).items() if name not in environ}
    environ.update(missing)
    return tuple(missing)


def interpolate(root: Node, environ: Mapping[str, str]) -> Node:
    """Replace `${NAME}` and `${NAME:-default}` in every string by the variable's value or the default.

    `$${` is an escape for `${`; any other `$` is literal. Keys are not changed.

    Raises:
        ConfigError: a variable is not set, or a `${` does not begin a reference.
    """

    def interpolate_node(keys: KeyPath, node: Node) -> Node:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        where = f"{node.origin}: {dotted(keys)}"
        value = _REFERENCE.sub(lambda reference: _resolve(reference, environ, where), node.value)
        return Node(value, node.origin, template=node.value)

    return rewrite(root, interpolate_node)


def _resolve(reference: re.Match[str], environ: Mapping[str, str], where: str) -> str:
    name, default = reference["name"], reference["default"]
    if reference["escaped"]:
        return reference["escaped"]
    if name is None:
        fix = "write '$${' for a literal '${'"
        raise ConfigError(f"{where}: '${{' must begin ${{NAME}} or ${{NAME:-default}}; {fix}")
    if default is not None and "${" in default:
        raise ConfigError(f"{where}: the default of ${{{name}}} cannot contain another reference")
    if default is not None:
        return environ.get(name) or default
    if name not in environ:
        fix = f"Set it in the environment or in .env, or write ${{{name}:-default}}"
        problem = f"the environment variable {name} is not set.{did_you_mean(name, environ)}"
        raise ConfigError(f"{where}: {problem} {fix}")
    return environ[name]


def escape(text: str) -> str:
    """Return the string that `interpolate` turns into `text`."""
    return text.replace("${", "$${")
