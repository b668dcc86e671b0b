r"""Literals of several tokens: `3\frac12`, `3 1/2`, `1.5\cdot 10^8`.

Invariant: a literal is recognised by its tokens alone; unevaluated arithmetic is no literal.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlkit.envs.math.answers.lexing.lexemes import Token

MAX_POWER_BITS = 4_000  # limit of a power of ten that is a literal


def read_proper_fraction(tokens: Sequence[Token], at: int) -> tuple[Fraction, int] | None:
    """Return the fraction between 0 and 1 at an index, and the index after it; None if there is none."""
    if at < len(tokens) and tokens[at].kind == r"\frac":
        numerator, end = _read_integer(tokens, at + 1)
        denominator, end = _read_integer(tokens, end)
        fraction = Fraction(numerator, denominator) if numerator is not None and denominator else None
    else:
        fraction, end = _read_slash_fraction(tokens[at : at + 3]), at + 3
    return (fraction, end) if fraction is not None and 0 < fraction < 1 else None


def is_power_of_ten(value: Fraction) -> bool:
    """Tell whether a value is a power of ten such as 10 or 1/100, but not 1."""
    large = max(value.numerator, value.denominator)
    if min(value.numerator, value.denominator) != 1 or large.bit_length() > MAX_POWER_BITS:
        return False
    return large > 1 and str(large).rstrip("0") == "1"


def _read_slash_fraction(tokens: Sequence[Token]) -> Fraction | None:
    """Return the fraction of ` 1/2`, with a blank before it."""
    match [token.value for token in tokens if token.kind in ("number", "/")]:
        case [numerator, None, denominator] if numerator is not None and denominator and tokens[0].spaced:
            return numerator / denominator
        case _:
            return None


def _read_integer(tokens: Sequence[Token], at: int) -> tuple[int | None, int]:
    """Return the integer at an index, in braces or not, and the index after it."""
    braced = at + 2 < len(tokens) and tokens[at].kind == "{" and tokens[at + 2].kind == "}"
    at += braced
    if at >= len(tokens) or not tokens[at].text.isdecimal() or tokens[at].kind != "number":
        return None, at
    return int(tokens[at].text), at + 1 + braced
