"""Constructions in JSON, NPY and CSV files. Integers are exact, and decimals float64, as programs read them.

Invariant: a file is only data: nothing of it is executed, and a value that it claims is never used as its value.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import UsageError

MAX_BYTES = 32 << 20
_MAX_EXPONENT = 2048  # C5 then has fewer digits than Python converts to text
_KEYS = ("values", "construction", "h_values", "f_values", "heights", "sequence", "circles")
_CLAIMS = ("value", "score", "c5", "c5_bound", "M_certified_decimal")


def read_witness(path: Path, *, key: str) -> tuple[NDArray[np.object_], Mapping[str, str]]:
    """Read a construction, in a JSON object from the field `key` or one of the common names.

    Returns:
        The numbers, each an int, a float or a Fraction, and the values that the file claims for them, by field.

    Raises:
        UsageError: there is no such file, or it has no array of numbers.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        content = _parse(path.read_bytes(), path.suffix.lower())
        fields = cast("dict[str, object]", content if isinstance(content, dict) else {"values": content})
        values, exponent = _find_values(fields, (key, *_KEYS))
        items = np.array(values, object)
        numbers = np.array([_check_number(item, exponent) for item in items.flat], object).reshape(items.shape)
        texts = {name: str(fields.get(name)) for name in _CLAIMS}
        claims = {name: text for name, text in texts.items() if re.fullmatch(r"-?(\d|nan|inf)[ -~]*", text)}
        return numbers, claims
    except Exception as error:  # the bytes of a file may cause anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{path}: cannot be read: {reason}") from None


def _parse(data: bytes, suffix: str) -> object:
    match suffix:
        case ".json":
            return json.loads(data)
        case ".npy":
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False).tolist()
        case ".csv":
            lines = [re.findall(r"[^,;\s]+", line) for line in data.decode("utf-8-sig").splitlines()]
            rows = [
                [int(cell) if cell.lstrip("+-").isdecimal() else float(cell) for cell in line] for line in lines if line
            ]
            is_vector = len(rows) == 1 or all(len(row) == 1 for row in rows)
            return [number for row in rows for number in row] if is_vector else rows
        case _:
            raise ValueError("it must be a .json, .npy or .csv file")


def _find_values(fields: Mapping[str, object], keys: Sequence[str]) -> tuple[object, int | None]:
    """Return a list of values, and the exponent of the power of two by which they are divided, if any."""
    solution = fields.get("solution")
    if isinstance(solution, dict):
        return _find_values(cast("dict[str, object]", solution), keys)
    if "D_log2" in fields and isinstance(fields.get("a"), list):
        exponent = fields["D_log2"]
        if type(exponent) is not int or not 0 <= exponent <= _MAX_EXPONENT:
            raise ValueError(f"D_log2 must be an integer from 0 to {_MAX_EXPONENT}")
        return fields["a"], exponent
    for name in (*keys, "solution"):
        if isinstance(fields.get(name), list):
            return fields[name], None
    raise ValueError(f"it has no list of numbers, alone or as {', '.join(dict.fromkeys(keys))}, or a with D_log2")


def _check_number(item: object, exponent: int | None) -> int | float | Fraction:
    if type(item) is int:
        return item if exponent is None else Fraction(item, 1 << exponent)
    if type(item) is float and exponent is None:
        return item
    raise ValueError(f"it has {str(item)[:40]!r} among its {'numbers' if exponent is None else 'integers'}")
