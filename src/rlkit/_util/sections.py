"""Base classes of configuration sections, and tables of sections selected by name.

Invariant: a section is immutable and rejects unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from inspect import getdoc
from typing import Annotated, ClassVar, Self, cast, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema, to_json

from rlkit.errors import UsageError, did_you_mean

type Positive = Annotated[int, Field(ge=1)]
type Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _validate_section(self) -> Self:
        self._check_section()
        return self

    def _check_section(self) -> None:
        """Raise ValueError if fields contradict each other, or one has no effect."""

    def is_default(self, name: str) -> bool:
        """Return whether a field has its default."""
        return getattr(self, name) == type(self).model_fields[name].default

    def refuse_unused(self, *names: str, fix: str) -> None:
        """Raise ValueError if one of these fields, which have no effect here, differs from its default."""
        for name in names:
            if not self.is_default(name):
                raise ValueError(f"{name} has no effect: {fix}")


def validate_fields[T](kind: type[T], values: object, *, place: str, strict: bool | None = None) -> T:
    """Return a model or dataclass with these fields; UsageError that names the first invalid field, below `place`."""
    try:
        return cast("T", _make_adapter(kind).validate_python(values, strict=strict))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field, problem = ".".join(map(str, (place, *fault["loc"]))), fault["msg"].removeprefix("Value error, ")
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            names = list(kind.model_fields if issubclass(kind, BaseModel) else kind.__annotations__)
            problem = "unknown." + (did_you_mean(str(fault["loc"][-1]), names) or f" Known: {', '.join(names)}")
        raise UsageError(f"{field}: {problem}") from None


def check_fields(instance: object) -> None:
    """Raise a UsageError that names the first attribute whose value does not fit its annotation."""
    for name, hint in _find_hints(type(instance)).items():
        validate_fields(hint, getattr(instance, name), place=name, strict=True)


_find_hints = cache(partial(get_type_hints, include_extras=True))
_make_adapter = cache(TypeAdapter[object])


_SETTINGLESS_MAX = 2  # maximum number of classes without settings that are described separately


class NamedSection(Section):
    """A section selected by name from a `SectionTable`; its settings are fields."""

    key: ClassVar[str] = "name"
    """The key that holds the name."""
    name: ClassVar[str]
    kind: ClassVar[str]
    """Word for messages, such as `estimator`."""

    @model_serializer(mode="wrap")
    def _with_name(self, settings: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {self.key: self.name, **settings(self)}


@dataclass(frozen=True, slots=True, eq=False)
class SectionTable:
    """Type annotation of a field whose value is one of several classes, selected by name; later additions count.

    ::

        type LossConfig = Annotated[Loss, SectionTable(LOSSES)]
    """

    classes: Mapping[str, type[NamedSection]]
    default: str | None = None  # name to use if the key is missing
    forms: str = "a mapping"  # forms of a value, for messages

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._choose)

    @property
    def _key(self) -> str:
        return next(iter(self.classes.values())).key

    def _choose(self, value: object, info: ValidationInfo) -> object:
        if type(value) in self.classes.values():
            return value
        if not isinstance(value, Mapping | str):
            raise PydanticCustomError("section_type", "Input should be {forms}", {"forms": self.forms})
        settings = {self._key: None} if isinstance(value, str) else dict(cast("Mapping[str, object]", value))
        name = settings.pop(self._key, self.default)
        if not isinstance(name, str) or name not in self.classes:
            context = {"key": self._key, "names": ", ".join(self.classes)}
            raise PydanticCustomError("union_tag", "Input should be {names}", context)
        # Error locations contain the name before the field, as in a tagged union.
        validator, tagged = _validator(self.classes[name]), {name: settings}
        if info.mode == "json":
            return validator.validate_json(to_json(tagged), strict=True)[name]
        return validator.validate_python(tagged)[name]

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each class by the first paragraph of its docstring; group classes without settings."""
        plain = [name for name, each in self.classes.items() if not each.model_fields]
        plain = plain if len(plain) > _SETTINGLESS_MAX else []
        options = list[JsonSchemaValue]()
        for name, each in self.classes.items():
            schema = handler.resolve_ref_schema(handler(each.__pydantic_core_schema__))
            text, choice = (getdoc(each) or "").partition("\n\n")[0], {"const": name}
            if name in plain[1:]:
                continue
            if name in plain:
                text, choice = f"An {each.kind} without settings.", {"enum": plain}
            key = {"type": "string", **choice, "description": f"The {each.kind}."}
            if name == self.default:
                key["default"] = name
            properties, required = {self._key: key, **schema["properties"]}, list[str](schema.get("required", ()))
            required += [] if name == self.default else [self._key]
            options.append({**schema, "description": text, "properties": properties, "required": required})
        return {"oneOf": options}


@cache
def _validator(section: type[NamedSection]) -> SchemaValidator:
    field = core_schema.typed_dict_field(section.__pydantic_core_schema__)
    return SchemaValidator(core_schema.typed_dict_schema({section.name: field}))
