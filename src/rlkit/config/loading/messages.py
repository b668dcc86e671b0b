"""Error messages for invalid configurations, translated from pydantic's errors.

Invariant: each mistake is one line with its location, its field and a fix. No message shows the value of an environment
variable.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlkit.config.loading.foreign_names import ANSWERS, FOREIGN_NAMES, UNITS, VALUE_ANSWERS
from rlkit.config.loading.nodes import KeyPath, Node, dotted, find, leaves, walk
from rlkit.config.loading.outline import Field, Shape, field_paths, locate
from rlkit.config.loading.secrets import redact
from rlkit.errors import did_you_mean

TYPE_ERRORS = {
    "int_parsing_size": "a smaller integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "union_tag"), "a mapping"),
}
_BOUNDS = {
    "greater_than": ("gt", "a value above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a value below"),
    "less_than_equal": ("le", "at most"),
}
_FIXED = {"string_too_short": "must not be empty", "too_short": "must not be empty: add at least one entry"}
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
}
_TEXT_MAX_CHARS = 40


def explain(error: ValidationError, root: Node) -> str:
    """Return a line for each mistake that pydantic found in the configuration `root`."""
    mistakes = error.errors(include_url=False, include_input=False)
    # pydantic counts only the valid entries of a list, and skips a default that depends on an invalid field.
    skipped = {("too_short", details["loc"][:-1]) for details in mistakes}
    mistakes = [details for details in mistakes if (details["type"], details["loc"]) not in skipped]
    return "\n".join(_line(details, root) for details in mistakes if details["type"] != "default_factory_not_called")


def _line(details: ErrorDetails, root: Node) -> str:
    union = details["type"].startswith("union_tag")
    key = str(details.get("ctx", {}).get("key", "name"))
    keys, parent, tag = locate((*details["loc"], key) if union else details["loc"])
    if details["type"] == "value_error":
        return _validator_line(str(details.get("ctx", {})["error"]), keys, root)
    problem = _describe_problem(details, keys, parent, tag, root)
    return f"{_place(root, keys)}{dotted(keys)}: {problem}"


def _validator_line(message: str, keys: KeyPath, root: Node) -> str:
    """Return the line for a message of the schema's validators, which may begin with a field."""
    for _, node in leaves(root):
        if node.template is not None and isinstance(node.value, str) and node.value:
            for text in (node.value, repr(node.value)[1:-1]):
                message = message.replace(text, node.template)
    if not keys:
        subject = message.split(": ", 1)[0]
        keys = next((path for path, _ in walk(root) if dotted(path) == subject), ())
        return f"{_place(root, keys)}{message}"
    return f"{_place(root, keys)}{dotted(keys)}: {message}"


def _describe_problem(details: ErrorDetails, keys: KeyPath, parent: Shape | None, tag: str, root: Node) -> str:
    kind = details["type"]
    node = find(root, keys)
    if kind == "union_tag" and node is None and (bare := find(root, keys[:-1])) and isinstance(bare.value, str):
        node = bare  # a name in place of its section
    actual = "nothing" if node is None else describe(node)
    if kind == "extra_forbidden":
        return _unknown(keys, parent, tag, leaves=[path for path, _ in leaves(root) if path[: len(keys)] == keys])
    if kind == "missing":
        return "is missing"
    if kind.startswith("union_tag"):
        choices = list(parent.choices) if parent else []
        if node and node.value in choices:
            return f"is missing. Write {dotted(keys[:-1])} as {{{keys[-1]}: {node.value}}}"
        near = ""
        if node and isinstance(node.value, str) and not node.template:
            answer = VALUE_ANSWERS.get(f"{dotted(keys)}={node.value}")
            near = f" {answer}" if answer else did_you_mean(node.value, choices)
        return f"expected {one_of(choices)}, found {actual}{'.' if near else ''}{near}"
    if kind == "string_pattern_mismatch":
        name = "the name" if details["loc"][-1] == "[key]" else actual
        return f"{name} may contain only letters, digits and . _ -, and must begin with a letter or digit"
    return _FIXED.get(kind) or f"expected {_expected(details)}, found {actual}"


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in TYPE_ERRORS:
        return TYPE_ERRORS[kind]
    if kind in _BOUNDS:
        return f"{_BOUNDS[kind][1]} {context[_BOUNDS[kind][0]]:g}"
    return details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _unknown(keys: KeyPath, parent: Shape | None, tag: str, *, leaves: Sequence[KeyPath]) -> str:
    name = str(keys[-1])
    if tag:
        union = locate(keys)[1]
        owners = [key for key, choice in union.choices.items() if name in choice.fields] if union else []
        belongs = f", it belongs to {' and '.join(owners)}" if owners else ""
        return f"is not a field of {tag}{belongs}.{did_you_mean(name, parent.fields) if parent and not owners else ''}"
    keys_inside = {path[len(keys)] for path in leaves if len(path) > len(keys)}
    fields: Mapping[str, Field] = parent.fields if parent else {}
    sections = [key for key in fields if keys_inside & set(fields[key].shape.fields)]
    if near := did_you_mean(name, sections):
        return f"unknown field.{near}"
    if (answer := _answer_foreign(leaves, inside=dotted(keys))) is not None:
        return f"unknown field. {answer}"
    if name in map(".".join, field_paths()):
        return f"unknown field. Write it as {name.replace('.', ': {')}: …{'}' * name.count('.')}"
    is_env_field = keys[-3:-2] == ("envs",)
    places = {} if is_env_field else _list_places()
    near = "" if name in places else did_you_mean(name, fields)
    if not near and is_env_field:
        near = f" Write an argument of the environment as args: {{{name}: …}}"
    if not near and (names := difflib.get_close_matches(name, places, n=1, cutoff=0.8)):
        near = f" Did you mean {' or '.join(map(repr, places[names[0]][:2]))}?"
    return f"unknown field.{near}" if near or not parent else f"unknown field. Known: {', '.join(parent.fields)}"


def _list_places() -> dict[str, list[str]]:
    """Return the paths of nested fields and sections by their names; of environments, those that nothing else has."""
    envs, others = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path in dict.fromkeys(field_paths()):
        if len(path) > 1:
            (envs if "<name>" in path else others)[path[-1]].append(".".join(path))
    return {**envs, **others}


def _answer_foreign(leaves: Sequence[KeyPath], *, inside: str) -> str | None:
    """Return what to do in place of the first path whose last part, or last two, are a name of another trainer.

    Args:
        inside: path of the unknown field; a field that it is inside of is no answer.
    """
    paths = [".".join(map(str, path)).split(".") for path in leaves]  # a key may be dotted
    for name in (name for path in paths for name in (".".join(path[-2:]), path[-1])):
        if name in ANSWERS:
            return ANSWERS[name]
        if (field := FOREIGN_NAMES.get(name)) is not None and f".{field}." not in f".{inside}.":
            return f"Did you mean {field!r}?{f' It counts {UNITS[field]}.' if field in UNITS else ''}"
    return None


def describe_type_error(error: ValidationError, value: object) -> str:
    """Return the expected type of an argument and the actual type, without the value."""
    details = error.errors(include_url=False, include_input=False)
    expected = one_of(list(dict.fromkeys(_expected(mistake) for mistake in details)))
    if all(mistake["type"] in _BOUNDS for mistake in details):
        return f"expected {expected}"
    choices = [mistake.get("ctx", {}).get("expected", "") for mistake in details]
    words = [word for choice in choices for word in re.findall(r"'([^']*)'", choice)]
    if isinstance(value, str) and (near := did_you_mean(value, words)):
        return f"expected {expected}.{near}"
    return f"expected {expected}, found {_KINDS.get(type(value), 'a mapping')}"


def one_of(words: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def describe(node: Node) -> str:
    """Render a value for a message."""
    if node.template is not None:
        return f"the value of {_short(node.template)}"
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    return _short(node.value) if isinstance(node.value, str) else json.dumps(node.value)


def _short(text: str) -> str:
    text = redact(text)
    return repr(text if len(text) <= _TEXT_MAX_CHARS else f"{text[: _TEXT_MAX_CHARS - 3]}...")


def _place(root: Node, keys: KeyPath) -> str:
    """Return `file:line: ` for the longest prefix of the key path that a file or override contains."""
    for length in range(len(keys), 0, -1):
        if (node := find(root, keys[:length])) is not None:
            return f"{node.origin}: "
    return f"{root.origin.source}: " if root.origin.source else ""
