"""A validated configuration with the origin of each value.

Invariant: `tree` and `origins` contain no values of environment variables and no credentials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

from rlkit.config.loading.environment_variables import escape
from rlkit.config.loading.nodes import KeyPath, Node, dotted, find, from_python, leaves, plain, rewrite
from rlkit.config.loading.secrets import REDACTED, is_secret, key_of
from rlkit.config.loading.yaml_text import parse, read_file, scalar
from rlkit.config.schema import Config
from rlkit.errors import ConfigError
from rlkit.types import Json

DEFAULT = "default"

_PLAIN_TEXT = re.compile(r"[A-Za-z0-9/.$_~][A-Za-z0-9/._+\-${}:@]*(?<!:)")
_TAGS = re.compile(r"^track:\n(?:  .*\n)*?  wandb:\n(?:    .*\n)*?    tags: (\[.*)", re.MULTILINE)
_VALUE_MAX_CHARS = 56


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A validated configuration.

    Args:
        config: configuration for the run. It may contain values of environment variables, so print `tree` instead.
        tree: complete configuration as JSON, including defaults, with `${NAME}` not interpolated.
        origins: origin of each value in `tree` by its dotted path: `file:line`, `command line`, `python` or `default`.
    """

    config: Config = field(repr=False)
    tree: Mapping[str, Json]
    origins: Mapping[str, str]

    @classmethod
    def from_python(cls, config: Config) -> Self:
        """Wrap a configuration made in Python; `tree` has `[redacted]` in place of credentials."""
        return cls.from_nodes(config, from_python(config))

    @classmethod
    def from_nodes(cls, config: Config, root: Node) -> Self:
        """Wrap a configuration with the origins of the nodes of `root`."""

        def record(keys: KeyPath, node: Node) -> Node:
            if (source := find(root, keys)) is not None and source.template is not None:
                return Node(source.template, node.origin)
            text = escape(node.value) if isinstance(node.value, str) else ""
            return Node(REDACTED if is_secret(key_of(keys), text) else text, node.origin) if text else node

        # The environments of these sections repeat them, and would show the values of their variables.
        source_envs = {name: True for name in ("source", "warm_start") if getattr(config, name) is not None}
        fields = from_python(config.model_dump(mode="json", exclude={"envs": source_envs}))
        recorded = rewrite(fields, record)
        tree = cast("dict[str, Json]", plain(recorded))
        nodes = {path: find(root, path) for path, _ in leaves(recorded)}
        origins = {dotted(path): DEFAULT if node is None else str(node.origin) for path, node in nodes.items()}
        return cls(config, tree, origins)

    @contextmanager
    def locate_errors(self) -> Generator[None]:
        """Begin the message of a ConfigError about a value with the origin of the value."""
        try:
            yield
        except ConfigError as error:
            if (origin := self.origins.get(str(error).partition(": ")[0], DEFAULT)) != DEFAULT:
                error.args = (f"{origin}: {error}",)
            raise


def show_lines(resolved: ResolvedConfig) -> list[str]:
    """Render the configuration as lines of YAML, one value per line, with its origin in a comment."""
    lines = list(_lines(resolved.tree, resolved.origins, ()))
    width = min(_VALUE_MAX_CHARS, max(len(text) for text, origin in lines if origin))
    return [f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines]


def read_settings(path: Path) -> list[tuple[str, str, str]]:
    """Return dotted name, JSON and origin of each value in a file of the lines of `show_lines`; empty without origin.

    Raises:
        ConfigError: as in `read_file`.
    """
    root, lines = read_file(path), path.read_text().split("\n")
    settings = list[tuple[str, str, str]]()
    for keys, node in leaves(root):
        line = lines[node.origin.line - 1] if node.origin.line else ""
        settings.append((dotted(keys), json.dumps(plain(node)), line.rpartition("  # ")[2] if "  # " in line else ""))
    return settings


def find_tags(text: str) -> list[str]:
    """Return `track.wandb.tags` of a text of `show_lines` without parsing its rest; ConfigError if it is no YAML."""
    line = _TAGS.search(text)
    node = parse(line[1], source="track.wandb.tags", lines=False) if line else None
    return [str(tag.value) for _, tag in leaves(node)] if node is not None and node.value else []


def _lines(tree: Mapping[str, Json], origins: Mapping[str, str], path: KeyPath) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, value in tree.items():
        head, child_path = f"{indent}{_text(key)}:", (*path, key)
        places = dict.fromkeys(origins[dotted(leaf)] for leaf, _ in leaves(from_python(value), child_path))
        if isinstance(value, dict) and value:
            yield head, ""
            yield from _lines(value, origins, child_path)
        else:
            yield f"{head} {_text(value)}", ", ".join(places)


def _text(value: Json) -> str:
    """Render a value as one line of YAML that YAML 1.1 and 1.2 parse alike."""
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and scalar_is_text(value) and "${" not in value:
        return value
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, list):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=not (isinstance(value, str) and value.isprintable()))


def scalar_is_text(text: str) -> bool:
    """Return whether a plain scalar is a string in YAML 1.1 and 1.2."""
    is_boolean = text.lower() in ("y", "n", "yes", "no", "on", "off")  # in YAML 1.1
    with suppress(ValueError):
        return not is_boolean and isinstance(scalar(text), str)
    return False
