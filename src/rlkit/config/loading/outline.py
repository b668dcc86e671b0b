"""Outline of the configuration: its fields and their types, for messages and the documentation.

Invariant: the outline is derived from the schema, including registered estimators, losses and schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import LOSSES
from rlkit.algorithms.schedules import SCHEDULES
from rlkit.config.loading.nodes import KeyPath, Node, leaves
from rlkit.config.schema import Config
from rlkit.types import Json

type Schema = Mapping[str, Any]

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "string", "null": "null"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Type of a value."""

    type: str  # readable name of the type, such as `integer ≥ 1`
    description: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict[str, "Field"])
    entries: Shape | None = None  # shape of the values of a mapping whose keys the user chooses
    items: Shape | None = None
    # Sections of a tagged union, by the value of their first field (the tag).
    choices: Mapping[str, Shape] = field(default_factory=dict[str, "Shape"])
    nullable: bool = False  # null is valid

    @property
    def is_mapping(self) -> bool:
        """True for a mapping: a section, a tagged union, or entries with keys of the user's choice."""
        return bool(self.fields or self.choices) or self.entries is not None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a section. A required field has no default."""

    shape: Shape
    description: str
    default: Json
    required: bool


def config_schema() -> Schema:
    """Return the JSON schema of a configuration."""
    return _config_schema(*ESTIMATORS, *LOSSES, *SCHEDULES)


def outline() -> Shape:
    """Return the shape of the complete configuration."""
    return _outline(*ESTIMATORS, *LOSSES, *SCHEDULES)


@cache
def _config_schema(*_: str) -> Schema:
    return Config.model_json_schema()


@cache
def _outline(*_: str) -> Shape:
    return _shape(config_schema())


def locate(location: Sequence[str | int]) -> tuple[KeyPath, Shape | None, str]:
    """Translate the location of a pydantic error.

    Returns:
        Key path in the configuration (without the tags that pydantic inserts for tagged unions), shape of the parent of
        the last key, and tag of that parent ("" if it is not in a tagged union).
    """
    keys, shape, tag = list[str | int](), outline(), ""
    parent: Shape | None = None
    parent_tag = ""
    for part in location:
        if part == "[key]":
            break
        if shape is not None and part in shape.choices:
            shape, tag = shape.choices[str(part)], str(part)
            continue
        keys.append(part)
        parent, parent_tag = shape, tag
        shape, tag = (None if shape is None else _child(shape, part)), ""
    return tuple(keys), parent, parent_tag


def field_paths(shape: Shape | None = None, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the key path of every field and section below a shape; a key that the user chooses is `<name>`."""
    shape = shape or outline()
    for owner in (shape, *shape.choices.values()):
        for name, below in owner.fields.items():
            yield (*keys, name)
            yield from field_paths(below.shape, (*keys, name))
        if owner.entries is not None:
            yield from field_paths(owner.entries, (*keys, "<name>"))


def without_nulls(node: Node, shape: Shape | None = None) -> Node:
    """Replace a null in place of a section by the section's defaults.

    `sampling: null` (or `sampling:` without a value) resets the section. `envs: {arithmetic: null}` is the environment
    with default settings, or removes the environment if an earlier file defines it.
    """
    if all(leaf.value is not None for _, leaf in leaves(node)):  # most configurations, which need no schema then
        return node
    shape = shape or outline()
    if not isinstance(node.value, dict):
        return node
    entries = dict[str, Node]()
    for key, child in node.value.items():
        below = _child(shape, key)
        resets = child.value is None and below is not None and below.is_mapping and not below.nullable
        if resets and (shape.entries is None or child.is_null_override):
            continue
        entries[key] = Node({}, child.origin) if resets else without_nulls(child, below) if below else child
    return Node(entries, node.origin)


def _child(shape: Shape, key: str | int) -> Shape | None:
    if key in shape.fields:
        return shape.fields[str(key)].shape
    if isinstance(key, int):
        return shape.items
    return shape.entries or next((c.fields[key].shape for c in shape.choices.values() if key in c.fields), None)


def _shape(schema: Schema) -> Shape:
    while "$ref" in schema:
        schema = config_schema()["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    description = " ".join(str(schema.get("description", "")).split())
    if "oneOf" in schema or "anyOf" in schema:
        return _union(schema, description)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return Shape("section", description, fields=_fields(schema))
        case "object":
            entries = _shape(schema["additionalProperties"])
            return Shape(f"mapping of names to {entries.type}s", description, entries=entries)
        case "array":
            items = _shape(schema["items"])
            return Shape(f"list of {items.type}s", description, items=items)
        case None:
            return Shape("value", description, nullable=True)
        case kind:
            return Shape(_scalar_type(str(kind), schema), description)


def _union(schema: Schema, description: str) -> Shape:
    options = [_shape(option) for option in schema.get("oneOf") or schema["anyOf"]]
    if "oneOf" in schema:
        return Shape("section", description, choices={name: each for each in options for name in _names(each)})
    text = " or ".join(option.type for option in options)
    others = [option for option in options if option.type != "null"]
    # An option beside a section is its short form, such as a name.
    first = next((option for option in others if option.is_mapping), others[0])
    nullable = len(others) < len(options)
    return replace(first, type=text, description=description or first.description, nullable=nullable)


def _names(section: Shape) -> list[str]:
    """Return the values of a section's first field, which select it."""
    return [name.strip("`") for name in next(iter(section.fields.values())).shape.type.split(" or ")]


def _fields(schema: Schema) -> dict[str, Field]:
    required, fields = schema.get("required", ()), dict[str, Field]()
    for name, entry in schema["properties"].items():
        shape = _shape(entry)
        description = " ".join(str(entry.get("description", shape.description)).split())
        fields[name] = Field(shape, description, entry.get("default", {} if shape.entries else None), name in required)
    return fields


def _scalar_type(kind: str, schema: Schema) -> str:
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    # Bounds of the 64-bit range are not interesting to readers.
    limits = {sign: schema[key] for key, sign in _BOUNDS.items() if key in schema}
    bounds = [f"{sign} {limit:g}" for sign, limit in limits.items() if limit < 2**53]
    return " ".join([_TYPES[kind], " and ".join(bounds)]).strip()
