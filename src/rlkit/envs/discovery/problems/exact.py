"""Exact arithmetic on floats, which are fractions with a power of two below.

Invariant: nothing here rounds, but for what says in which direction it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


def scaled(values: NDArray[np.float64]) -> tuple[list[int], int]:
    """Whole numbers a and an exponent e with values[i] = a[i] / 2^e exactly."""
    pairs = [value.as_integer_ratio() for value in values.ravel().tolist()]
    exponent = max((bottom.bit_length() - 1 for _, bottom in pairs), default=0)
    return [top << (exponent - (bottom.bit_length() - 1)) for top, bottom in pairs], exponent


def correlations(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """For each shift m from −(n−1) to n−1, Σ_i a[i + m] · b[i] of two sequences of n whole numbers that are ≥ 0.

    Both are written as one long number each, with room for every sum, and multiplied (Kronecker 1882).
    """
    count = len(a)
    width = max(a).bit_length() + max(b).bit_length() + count.bit_length() + 1
    room = -(-width // 8)
    product = _packed(a, room) * _packed(list(reversed(b)), room)
    raw = product.to_bytes(room * (2 * count), "little")
    return [int.from_bytes(raw[place * room : (place + 1) * room], "little") for place in range(2 * count - 1)]


def _packed(values: Sequence[int], room: int) -> int:
    return int.from_bytes(b"".join(value.to_bytes(room, "little") for value in values), "little")


def decimals(value: Fraction, *, places: int, up: bool) -> str:
    """A fraction that is ≥ 0, in decimals, rounded up or down."""
    whole = value * 10**places
    rounded = math.ceil(whole) if up else math.floor(whole)
    text = str(rounded).rjust(places + 1, "0")
    return f"{text[:-places]}.{text[-places:]}"
