"""What pydantic found wrong, in the words of the person who wrote the configuration.

Invariant: one line for each mistake, with its place, its field and the way out; no value that came from the
environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.config.loading.nodes import Node, Steps, dotted, find, is_list, is_mapping, scalars
from rlkit.config.loading.outline import Shape, leaf_fields, locate
from rlkit.config.loading.secrets import redact
from rlkit.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

TYPE_ERRORS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "a value above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a value below"),
    "less_than_equal": ("le", "at most"),
}
_FIXED = {"string_too_short": "must not be empty", "too_short": "is empty: name at least one"}
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
}
_LONGEST_SHOWN = 40


def explain(error: ValidationError, root: Node) -> str:
    """Return a line for each mistake that pydantic raised, about the configuration `root`."""
    mistakes = error.errors(include_url=False, include_input=False)
    # A default that follows from other fields is not made while any of them is wrong.
    return "\n".join(_line(details, root) for details in mistakes if details["type"] != "default_factory_not_called")


def _line(details: ErrorDetails, root: Node) -> str:
    union = details["type"].startswith("union_tag")
    key = str(details.get("ctx", {}).get("key", "name"))
    steps, parent, tag = locate((*details["loc"], key) if union else details["loc"])
    if details["type"] == "value_error":
        return _own_line(str(details.get("ctx", {})["error"]), steps, root)
    told = _told(details, steps, parent, tag, root)
    return f"{_place(root, steps)}{dotted(steps)}: {told}"


def _own_line(message: str, steps: Steps, root: Node) -> str:
    """A message of one of the schema's own validators, which may begin with the field that it is about."""
    for _, node in scalars(root):
        if node.template is not None and isinstance(node.value, str) and node.value:
            for text in (node.value, repr(node.value)[1:-1]):
                message = message.replace(text, node.template)
    if not steps:
        subject = message.split(": ", 1)[0]
        steps = next((path for path in _paths(root) if dotted(path) == subject), ())
        return f"{_place(root, steps)}{message}"
    return f"{_place(root, steps)}{dotted(steps)}: {message}"


def _told(details: ErrorDetails, steps: Steps, parent: Shape | None, tag: str, root: Node) -> str:
    kind = details["type"]
    node = find(root, steps)
    found = "nothing" if node is None else describe(node)
    if kind == "extra_forbidden":
        return _unknown(steps, parent, tag)
    if kind == "missing":
        return (
            f"is missing{': say what to train on, for instance envs: {arithmetic: {}}' if steps == ('envs',) else ''}"
        )
    if kind.startswith("union_tag"):
        known = list(parent.choices) if parent else []
        near = did_you_mean(node.value, known) if node and isinstance(node.value, str) and not node.template else ""
        return f"expected {one_of(known)}, found {found}{'.' if near else ''}{near}"
    if kind == "string_pattern_mismatch":
        name = "the name" if details["loc"][-1] == "[key]" else found
        return f"{name} may hold letters, digits and the signs . _ - only, and begins with a letter or digit"
    return _FIXED.get(kind) or f"expected {_expected(details)}, found {found}"


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in TYPE_ERRORS:
        return TYPE_ERRORS[kind]
    if kind in _BOUNDS:
        return f"{_BOUNDS[kind][1]} {context[_BOUNDS[kind][0]]:g}"
    return details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _unknown(steps: Steps, parent: Shape | None, tag: str) -> str:
    name = str(steps[-1])
    if tag:
        union = locate(steps)[1]
        owners = [key for key, choice in union.choices.items() if name in choice.fields] if union else []
        belongs = f", it belongs to {' and '.join(owners)}" if owners else ""
        return f"is no field of {tag}{belongs}.{did_you_mean(name, parent.fields) if parent and not owners else ''}"
    near = did_you_mean(name, parent.fields if parent else ())
    if not near:
        paths = {path[-1]: ".".join(path) for path in leaf_fields() if len(path) > 1}
        known = [".".join(path) for path in leaf_fields()]
        if name in known:
            near = f" Write it as {name.replace('.', ': {')}: …{'}' * name.count('.')}"
        elif name in paths:
            near = f" Did you mean {paths[name]!r}?"
    return f"unknown field.{near}" if near or not parent else f"unknown field. Known: {', '.join(parent.fields)}"


def told_of_type(error: ValidationError, value: object) -> str:
    """What was expected of an argument and what kind of value was found, but not the value itself."""
    details = error.errors(include_url=False, include_input=False)
    expected = one_of(list(dict.fromkeys(_expected(each) for each in details)))
    if all(each["type"] in _BOUNDS for each in details):
        return f"expected {expected}"
    words = [word for each in details for word in re.findall(r"'([^']*)'", each.get("ctx", {}).get("expected", ""))]
    if isinstance(value, str) and (near := did_you_mean(value, words)):
        return f"expected {expected}.{near}"
    return f"expected {expected}, found {_KINDS.get(type(value), 'a mapping')}"


def one_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def describe(node: Node) -> str:
    """A value as a message shows it."""
    if node.template is not None:
        return f"the value of {_short(node.template)}"
    if is_mapping(node.value):
        return "a mapping"
    if is_list(node.value):
        return "a list"
    if isinstance(node.value, str):
        return _short(node.value)
    return json.dumps(node.value)


def _short(text: str) -> str:
    shown = redact(text)
    return repr(shown if len(shown) <= _LONGEST_SHOWN else f"{shown[: _LONGEST_SHOWN - 3]}...")


def _place(root: Node, steps: Steps) -> str:
    """`file:line: ` of the deepest part of the path that was written anywhere."""
    for length in range(len(steps), 0, -1):
        node = find(root, steps[:length])
        if node is not None:
            return f"{node.origin}: "
    return f"{root.origin.source}: " if root.origin.source else ""


def _paths(root: Node, steps: Steps = ()) -> list[Steps]:
    children = root.value.items() if is_mapping(root.value) else ()
    return [steps, *(path for key, child in children for path in _paths(child, (*steps, key)))]
