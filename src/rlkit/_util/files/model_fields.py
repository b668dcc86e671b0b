"""Typed fields of the files of a model, such as its config.json.

Invariant: a field that is not valid raises `UsageError` with the file, the name of the field and its value.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, TypeAdapter, ValidationError

from rlkit.errors import UsageError

SIZE_MAX = 2**24  # far above every size of a dense model
SIZE = TypeAdapter[int](Annotated[int, Field(ge=1, le=SIZE_MAX)])
NUMBER = TypeAdapter[float](Annotated[float, Field(gt=0, allow_inf_nan=False)])
COUNT = TypeAdapter[int](Annotated[int, Field(ge=0, le=SIZE_MAX)])
INTEGERS = TypeAdapter(list[int])
_OBJECT = TypeAdapter(dict[str, object])
FLAG = TypeAdapter(bool)


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed fields of a JSON object or of a GGUF file's metadata."""

    path: Path
    raw: Mapping[str, object]

    def read[T](self, name: str, kind: TypeAdapter[T], default: T | None = None) -> T:
        """Return a field, or `default` if it is absent or null; raise `UsageError` with its name if it is not valid."""
        value = self.raw.get(name)
        value = default if value is None else value
        try:
            return kind.validate_python(value, strict=True)
        except ValidationError as error:
            raise UsageError(f"{self.path}: {name}: {error.errors()[0]['msg']}, not {reprlib.repr(value)}") from None

    def section(self, name: str) -> Fields | None:
        """Return a field that is an object; None if it is absent or null."""
        return None if self.raw.get(name) is None else Fields(self.path, self.read(name, _OBJECT))


def as_list(value: object) -> list[object]:
    """Return a JSON list, or a list of the value."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file of a model directory."""
    try:
        raw: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: a model directory must have this file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must be a JSON object")
    return cast("dict[str, object]", raw)
