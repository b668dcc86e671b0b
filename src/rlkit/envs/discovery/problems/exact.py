"""Exact arithmetic on floats and fractions whose denominator is a power of two.

Invariant: only `format_decimals` rounds, in the direction of its argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


def to_integers(values: NDArray[np.float64] | Sequence[Fraction]) -> tuple[list[int], int]:
    """Return integers a and an exponent e with values[i] = a[i] / 2^e exactly.

    Args:
        values: floats, or fractions whose denominators are powers of two.
    """
    numbers: Sequence[float | Fraction] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
    pairs = [number.as_integer_ratio() for number in numbers]
    exponent = max((bottom.bit_length() - 1 for _, bottom in pairs), default=0)
    return [top << (exponent - (bottom.bit_length() - 1)) for top, bottom in pairs], exponent


def correlate(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Return Σ_i a[i + m] · b[i] of two sequences of n integers ≥ 0, for shifts m from −(n−1) to n−1.

    Kronecker substitution (1882): pack each sequence into one integer with enough bits per sum, then multiply.
    """
    count = len(a)
    width = max(a).bit_length() + max(b).bit_length() + count.bit_length() + 1
    room = -(-width // 8)
    product = _pack(a, room) * _pack(list(reversed(b)), room)
    raw = product.to_bytes(room * (2 * count), "little")
    return [int.from_bytes(raw[place * room : (place + 1) * room], "little") for place in range(2 * count - 1)]


def _pack(values: Sequence[int], room: int) -> int:
    return int.from_bytes(b"".join(value.to_bytes(room, "little") for value in values), "little")


def format_decimals(value: Fraction, *, places: int, up: bool) -> str:
    """Return a fraction ≥ 0 as a decimal number, rounded up or down."""
    whole = value * 10**places
    rounded = math.ceil(whole) if up else math.floor(whole)
    text = str(rounded).rjust(places + 1, "0")
    return f"{text[:-places]}.{text[-places:]}"
