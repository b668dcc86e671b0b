"""Exact arithmetic on floats and fractions.

Invariant: only `format_decimals` rounds, in the direction of its argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


def to_integers(values: NDArray[np.float64] | Sequence[Fraction]) -> tuple[list[int], int]:
    """Return integers a and a denominator d with values[i] = a[i] / d exactly."""
    numbers: Sequence[float | Fraction] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
    pairs = [number.as_integer_ratio() for number in numbers]
    denominator = math.lcm(*(bottom for _, bottom in pairs))
    return [top * (denominator // bottom) for top, bottom in pairs], denominator


def convolve(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Return Σ_i a[i] · b[m − i] of two sequences of n integers, for m from 0 to 2n−2.

    Kronecker substitution (1882): pack each sequence into one integer with enough bits per sum, then multiply.
    """
    count = len(a)
    width = max(map(abs, a)).bit_length() + max(map(abs, b)).bit_length() + count.bit_length() + 1
    room = -(-width // 8)
    packed = _pack(a, room)
    half = 1 << (8 * room - 1)  # added to each sum, so that none is negative
    product = packed * (packed if b is a else _pack(b, room)) + _pack([half] * (2 * count - 1), room)
    raw = product.to_bytes(room * (2 * count - 1), "little")
    return [int.from_bytes(raw[at : at + room], "little") - half for at in range(0, len(raw), room)]


def _pack(values: Sequence[int], room: int) -> int:
    parts = ((max(sign * value, 0).to_bytes(room, "little") for value in values) for sign in (1, -1))
    positive, negative = (int.from_bytes(b"".join(part), "little") for part in parts)
    return positive - negative


def format_decimals(value: Fraction, *, places: int, up: bool) -> str:
    """Return a fraction as a decimal number, rounded up or down."""
    rounded = (math.ceil if up else math.floor)(value * 10**places)
    return f"{Fraction(rounded, 10**places):.{places}f}"
