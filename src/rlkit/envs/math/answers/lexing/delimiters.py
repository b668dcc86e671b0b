r"""Delimiters that TeX sizes: `\left`, `\right`, `\bigl` and their like, and the empty ones, `\left.` and `\right.`.

Invariant: an empty delimiter leaves nothing behind, least of all its point; what stands between two is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers.lexing.faults import Malformed, Unreadable
from rlkit.envs.math.answers.lexing.lexemes import after_blanks
from rlkit.envs.math.answers.lexing.notation import SIZES

_BARS = frozenset({"|", r"\vert", r"\rvert", r"\mid", r"\|"})
_BRACES = frozenset({r"\{", r"\lbrace"})
_EMPTY = "."


def without_empty_delimiters(lexemes: Sequence[str]) -> list[str]:
    r"""The lexemes without the sizes of delimiters, and without delimiters that are only a point.

    Raises:
        Malformed: a `\left.` without its `\right`, or the other way round.
        Unreadable: a value at a place, `\left. x^2 \right|_{x=3}`, or a system of equations, `\left\{ … \right.`.
    """
    if SIZES.isdisjoint(lexemes):
        return list(lexemes)
    waiting: list[str] = []
    remaining: list[str] = []
    rest = list(lexemes)
    at = 0
    while at < len(rest):
        lexeme = rest[at]
        at += 1
        if lexeme not in SIZES:
            remaining.append(lexeme)
            continue
        at = after_blanks(rest, at)
        delimiter = rest[at][0] if at < len(rest) and rest[at][0] == _EMPTY else "".join(rest[at : at + 1])
        if delimiter in ("", _EMPTY):
            at = _drop_point(rest, at)
        if lexeme == r"\left":
            waiting.append(delimiter)
        elif lexeme == r"\right" and waiting:
            _match(waiting.pop(), delimiter)
        elif lexeme == r"\right" and delimiter in ("", _EMPTY):
            raise Malformed(r"a \right. without its \left")
    if not {"", _EMPTY}.isdisjoint(waiting):
        raise Malformed(r"a \left. without its \right")
    return remaining


def _drop_point(lexemes: list[str], at: int) -> int:
    """Take the point off the lexeme at a place, and give the place of what is read next: of `.3`, `.5` it is `3.5`."""
    if at >= len(lexemes):
        return at
    after = lexemes[at][1:]
    if not after:
        return at + 1
    following = "".join(lexemes[at + 1 : at + 2])
    if after.isdecimal() and following[:1] == _EMPTY and following[1:].isdecimal():
        lexemes[at + 1] = after + following
        return at + 1
    lexemes[at] = after
    return at


def _match(opening: str, closing: str) -> None:
    empty = closing in ("", _EMPTY)  # a full stop at the end of an answer is taken off before
    if opening == _EMPTY and closing in _BARS:
        raise Unreadable("a value at a place")
    if opening in _BRACES and empty:
        raise Unreadable("a system of equations")
