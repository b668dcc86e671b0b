"""Load and validate a configuration from files and overrides.

Invariant: later files override earlier files, and the command line overrides all files. One `ConfigError` reports all
mistakes that the schema finds, one per line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from rlkit._util.paths import expand_user
from rlkit.config.loading.environment_variables import interpolate, read_dotenv
from rlkit.config.loading.messages import TYPE_ERRORS, explain
from rlkit.config.loading.nodes import KeyPath, Node, Origin, dotted, find, from_python, merge, plain, rewrite
from rlkit.config.loading.objects import FILE_OBJECT, missing_file
from rlkit.config.loading.outline import locate, without_nulls
from rlkit.config.loading.overrides import apply
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.secrets import refuse_redacted, refuse_secrets
from rlkit.config.loading.yaml_text import read_file, scalar
from rlkit.config.schema import Config
from rlkit.config.schema.objective import expand_name
from rlkit.errors import ConfigError


def load_config(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    envs: Iterable[str] = (),
) -> ResolvedConfig:
    """Load a configuration from files and overrides.

    ::

        resolved = load_config([Path("base.yaml"), Path("mine.yaml")], ["sampling.stop=[a, b]", "name=null"])

    Mappings are merged key by key; a list, a scalar or an empty mapping replaces the earlier value. A null in place of
    a section resets it to its defaults: `eval=null` and `eval={}` remove all evaluations of earlier files, and
    `eval.envs.held_out=null` removes one environment. `${NAME}` and `${NAME:-default}` in a string are replaced by the
    environment variable, or by its value in `.env` in the working directory. A relative `file.py:name`, `path` of
    a table or model directory is searched in the folder of the configuration file, then in the working directory.

    Args:
        files: YAML files, merged in this order.
        overrides: `path=value`, applied to the files in this order.
        settings: Python values, as nested mappings or sections of the schema, merged last. `${NAME}` in their strings
            is literal.
        environ: variables of `${NAME}`; None for the process's environment and `.env`.
        envs: names of environments to train on; those that the configuration lacks are added with default settings.

    Raises:
        ConfigError: a file cannot be read, or a value is unknown, ill-typed, contradictory or a literal secret.
    """
    if environ is None:
        environ = {**read_dotenv(), **os.environ}
    root = Node({}, Origin(""))
    for path in files:
        node = read_file(Path(path))
        refuse_secrets(node)
        root = merge(root, node)
    for override in overrides:
        root = apply(root, override)
        refuse_secrets(root)
    root = interpolate(without_nulls(root), environ)
    if settings is not None:
        root = merge(root, from_python(settings))
    root = rewrite(_add_envs(without_nulls(root), envs), _expand_short_form)
    root = rewrite(root, partial(_make_path_absolute, root))
    refuse_redacted(root)
    config, root = _check(root)
    return ResolvedConfig.from_nodes(config, root)


def load_arguments(arguments: Sequence[str], *, name: str | None = None) -> ResolvedConfig:
    """Load a configuration from arguments of the command line; `name` overrides the name of the run."""
    files, overrides = split_arguments(arguments)
    # As JSON, because a name such as 2024 would otherwise be read as a number.
    return load_config(files, overrides if name is None else [*overrides, f"name={json.dumps(name)}"])


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate configuration files from overrides, each in order.

    An argument that contains `=` is an override, unless a file of that name exists.
    """
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).is_file()]
    return [Path(argument) for argument in arguments if argument not in overrides], overrides


def _add_envs(root: Node, names: Iterable[str]) -> Node:
    """Add an environment with default settings for each missing name."""
    envs = find(root, ("envs",))
    present = envs.value if envs is not None and isinstance(envs.value, dict) else {}
    missing = {name: dict[str, object]() for name in names if name not in present}
    return merge(root, from_python({"envs": missing})) if missing else root


def _expand_short_form(keys: KeyPath, node: Node) -> Node:
    """Expand a bare `advantage: name`, and a bare `workers: 2`, to a section, and `files: name` to a list."""
    match keys:
        case ("rollouts", "workers") | ("envs", _, "workers") if node.value is not None:
            # without fields, the run's own process
            count = Node(0, node.origin) if isinstance(node.value, dict) else node
            return Node({"count": count}, node.origin)
        case ("advantage" | "loss",) | ("envs", _, "advantage") if isinstance(node.value, str):
            # Only the text may come from an environment variable, not the rest of the section.
            entries = {
                key: Node(text, node.origin, node.template if text == node.value else None)
                for key, text in expand_name(node.value).items()
            }
            return Node(entries, node.origin)
        case ("source" | "warm_start", "files") if isinstance(node.value, str):
            return Node([node], node.origin)
        case _:
            return node


def _check(root: Node) -> tuple[Config, Node]:
    """Validate the configuration; return it with its nodes, in which variables of other types than string are
    parsed."""
    try:
        # Strict JSON mode accepts lists and mappings for all collection types, unlike strict Python mode.
        return Config.model_validate_json(json.dumps(plain(root)), strict=True), root
    except ValidationError as error:
        if (reparsed := _retype(error, root)) is None:
            raise ConfigError(explain(error, root)) from None
    return _check(reparsed)


def _retype(error: ValidationError, root: Node) -> Node | None:
    """Parse the value of `${NAME}` as YAML if a string has the wrong type; return None if nothing changes."""
    parsed = dict[KeyPath, Node]()
    for details in error.errors(include_url=False, include_input=False, include_context=False):
        keys = locate(details["loc"])[0]
        node = find(root, keys)
        if details["type"] in TYPE_ERRORS and node and node.template is not None and isinstance(node.value, str):
            with suppress(ValueError):
                value = scalar(node.value)
                if not isinstance(value, str):
                    parsed[keys] = Node(value, node.origin, node.template)
    return rewrite(root, parsed.get) if parsed else None


def _make_path_absolute(root: Node, keys: KeyPath, node: Node) -> Node:
    """Make the path of a user's file, or of a model's directory, absolute."""
    if not isinstance(node.value, str):
        return node
    is_conversations = keys[:2] in (("source", "files"), ("warm_start", "files"))
    folder = node.origin.folder or (Path.cwd() if is_conversations else None)
    if (keys == ("model",) or is_conversations) and folder is not None and node.value:
        path = folder / expand_user(node.value)
        is_there = path.is_file() if is_conversations else path.is_dir()
        return Node(str(path.resolve()), node.origin, node.template) if is_there else node
    reference = FILE_OBJECT.fullmatch(node.value)
    file, name = (reference["file"], f":{reference['name']}") if reference else (node.value, "")
    match keys:
        case ("envs", key, "args", *rest) | ("eval", "envs", key, "args", *rest):
            env = find(root, (*keys[:-2], "env"))
            is_table = rest == ["path"] and (env.value if env else key) in ("rows", "math") and folder is not None
            is_argument = True  # a text of the form `file.py:name` need not be an import path
        case (*_, str()):
            is_table = is_argument = False
        case _:
            return node
    if not (reference or is_table):
        return node
    places = [place / expand_user(file) for place in (folder, Path.cwd()) if place is not None]
    for path in places:
        if path.is_file():
            return Node(f"{path.resolve()}{name}", node.origin, node.template)
    if is_argument:
        return Node(str(places[0].resolve()), node.origin, node.template) if is_table else node
    missing = missing_file(node.template or file, places, hidden=node.template is not None)
    raise ConfigError(f"{node.origin}: {dotted(keys)}: {missing}")
