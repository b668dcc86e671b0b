r"""Numbers of several tokens that are literals all the same: `3\frac12`, `3 1/2`, `1.5\cdot 10^8`.

Invariant: a literal is told from its tokens alone; arithmetic that was left undone is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlkit.envs.math.answers.lexing.lexer import Token

MAX_POWER_BITS = 4_000
"""A larger power of ten is no literal."""


def proper_fraction(tokens: Sequence[Token], at: int) -> tuple[Fraction, int] | None:
    """The fraction between 0 and 1 at a place, and the place behind it; None where there is none."""
    if at < len(tokens) and tokens[at].kind == r"\frac":
        above, end = _integer(tokens, at + 1)
        below, end = _integer(tokens, end)
        part = Fraction(above, below) if above is not None and below else None
    else:
        part, end = _slashed(tokens[at : at + 3]), at + 3
    return (part, end) if part is not None and 0 < part < 1 else None


def is_power_of_ten(value: Fraction) -> bool:
    """Whether it is 10, 1/100 or their like, but not 1."""
    large = max(value.numerator, value.denominator)
    if min(value.numerator, value.denominator) != 1 or large.bit_length() > MAX_POWER_BITS:
        return False
    return large > 1 and str(large).rstrip("0") == "1"


def _slashed(tokens: Sequence[Token]) -> Fraction | None:
    """Of ` 1/2`, with a blank before it."""
    match [token.value for token in tokens if token.kind in ("number", "/")]:
        case [above, None, below] if above is not None and below and tokens[0].spaced:
            return above / below
        case _:
            return None


def _integer(tokens: Sequence[Token], at: int) -> tuple[int | None, int]:
    """An integer, in braces or not, at a place, and the place behind it."""
    braced = at + 2 < len(tokens) and tokens[at].kind == "{" and tokens[at + 2].kind == "}"
    at += braced
    if at >= len(tokens) or not tokens[at].text.isdecimal() or tokens[at].kind != "number":
        return None, at
    return int(tokens[at].text), at + 1 + braced
