"""Arguments of a user's function or class, from a configuration.

Invariant: no message shows a value, since it may come from an environment variable.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace, UnionType
from typing import Annotated, Protocol, TypeAliasType, Union, cast, get_args, get_origin, get_type_hints

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rlkit.config.loading.messages import describe_type_error
from rlkit.errors import ConfigError, did_you_mean


class Load(Protocol):
    """`rlkit.config.loading.objects.load_object`, whose module imports this module."""

    def __call__(self, path: str, /, *, field: str) -> object:
        """Return the object at an import path."""


def bind(
    function: Callable[..., object],
    values: Mapping[str, JsonValue],
    *,
    field: str,
    defaults: Mapping[str, object],
    load: Load,
) -> dict[str, object]:
    """Return the keyword arguments of a call of `function`: `values`, checked against its signature and converted.

    Args:
        defaults: values for parameters that are not in `values`. A function is passed only to a parameter annotated as
            callable.
        load: loads the object at an import path, for a parameter annotated as callable.

    Raises:
        ConfigError: an argument is unknown, missing or of the wrong type.
    """
    if (parameters := _parameters(function)) is None:
        return dict(values)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in values if name not in keywords]
    if unknown and not open_ended:
        near = did_you_mean(unknown[0], keywords) or f" Known: {', '.join(keywords) or 'none'}"
        raise ConfigError(f"{field}.{unknown[0]}: unknown argument.{near}")
    hints = _hints(function)
    fitting = {
        name: value
        for name, value in defaults.items()
        if name in keywords and (not callable(value) or _takes_callable(hints.get(name)))
    }
    arguments = fitting | dict[str, object](values)
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if is_required and parameter.kind is not parameter.VAR_KEYWORD and name not in arguments:
            near = did_you_mean(name, defaults)
            raise ConfigError(f"{field}.{name}: is required{near and '.'}{near}")
    for name, value in values.items():
        if name in keywords and name in hints:
            arguments[name] = _convert(value, hints[name], field=f"{field}.{name}", load=load)
    return arguments


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None if it has no signature, as in extension modules."""
    if isinstance(function, type) and function.__new__ is object.__new__:
        initialiser: object = function.__init__
        # Subclasses of a protocol without an initialiser have a placeholder of this name.
        if initialiser is object.__init__ or getattr(initialiser, "__name__", "") == "_no_init_or_replace_init":
            return {}
    with suppress(TypeError, ValueError):
        return inspect.signature(function).parameters
    return None


def _hints(function: Callable[..., object]) -> dict[str, object]:
    target: object = function.__init__ if isinstance(function, type) else function
    names: dict[str, object] = getattr(inspect.unwrap(cast("Callable[..., object]", target)), "__globals__", {})
    hints = dict[str, object]()
    for name, annotation in getattr(target, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        with suppress(Exception):  # a name may be imported for type checkers only
            hints |= get_type_hints(alone, globalns=names, include_extras=True)
    return hints


def _convert(value: object, annotation: object, *, field: str, load: Load) -> object:
    if isinstance(value, str) and _takes_callable(annotation):
        function = load(value, field=field)
        if not callable(function):
            raise ConfigError(f"{field}: expected the import path of a function, found another object")
        return function
    try:
        adapter = TypeAdapter[object](annotation)  # pyright: ignore[reportArgumentType]  known only at run time
        text = json.dumps(value)
    except (PydanticUserError, TypeError, ValueError):
        return value  # pydantic does not know the type, so the user's code checks it
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as strict:
        if isinstance(value, str):
            with suppress(ValidationError):
                return adapter.validate_python(value)  # values of environment variables are text
        raise ConfigError(f"{field}: {describe_type_error(strict, value)}") from None


def _takes_callable(annotation: object) -> bool:
    if isinstance(annotation, TypeAliasType):
        return _takes_callable(annotation.__value__)
    origin = get_origin(annotation)
    if origin is Annotated:
        return _takes_callable(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return any(_takes_callable(option) for option in get_args(annotation))
    if annotation is Callable or origin is Callable:
        return True
    return getattr(annotation, "_is_protocol", False) is True and "__call__" in vars(annotation)
