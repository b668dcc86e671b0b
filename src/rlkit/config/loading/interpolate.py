"""`${NAME}` in the strings of a configuration.

Invariant: a node whose value came from the environment keeps the text as it was written, and only that text is ever
shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlkit.config.loading.nodes import Node, Steps, dotted, rewrite
from rlkit.errors import ConfigError, did_you_mean

_TOKEN = re.compile(r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def interpolate(root: Node, environ: Mapping[str, str]) -> Node:
    """Every string with `${NAME}` replaced by the environment's value, and `${NAME:-default}` by it or the default.

    `$${` stands for a plain `${`; any other `$` is itself. Keys are left alone.

    Raises:
        ConfigError: a name is not set, or a `${` begins no reference.
    """

    def interpolate_node(steps: Steps, node: Node) -> Node:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        where = f"{node.origin}: {dotted(steps)}"
        value = _TOKEN.sub(lambda token: _value(token, environ, where), node.value)
        return Node(value, node.origin, template=node.value)

    return rewrite(root, interpolate_node)


def _value(token: re.Match[str], environ: Mapping[str, str], where: str) -> str:
    name, default = token["name"], token["default"]
    if token["escaped"]:
        return token["escaped"]
    if name is None:
        raise ConfigError(f"{where}: '${{' begins no ${{NAME}} or ${{NAME:-default}}; write '$${{' for a plain one")
    if default is not None and "${" in default:
        raise ConfigError(f"{where}: the default of ${{{name}}} cannot hold another reference")
    if default is not None:
        return environ.get(name) or default
    if name not in environ:
        raise ConfigError(
            f"{where}: the environment variable {name} is not set.{did_you_mean(name, environ)} "
            f"Set it, here or in .env, or write ${{{name}:-default}}"
        )
    return environ[name]


def escape(text: str) -> str:
    """The text that interpolation turns into `text`."""
    return text.replace("${", "$${")
