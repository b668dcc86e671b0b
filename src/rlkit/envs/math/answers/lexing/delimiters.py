r"""Removal of TeX's sizes of delimiters (`\left`, `\right`, `\bigl`) and of empty delimiters (`\left.`, `\right.`).

Invariant: an empty delimiter is removed together with its dot; the text between two delimiters is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers.lexing.lexemes import skip_blanks
from rlkit.envs.math.answers.lexing.notation import SIZES
from rlkit.envs.math.answers.lexing.parse_errors import MalformedError, UnsupportedError

_BARS = frozenset({"|", r"\vert", r"\rvert", r"\mid", r"\|"})
_BRACES = frozenset({r"\{", r"\lbrace"})
_DOT = "."


def remove_empty_delimiters(lexemes: Sequence[str]) -> list[str]:
    r"""Return the lexemes without sizes of delimiters and without empty delimiters.

    Raises:
        MalformedError: a `\left.` without its `\right`, or the other way round.
        UnsupportedError: an evaluation, `\left. x^2 \right|_{x=3}`, or a system of equations, `\left\{ … \right.`.
    """
    if SIZES.isdisjoint(lexemes):
        return list(lexemes)
    open_delimiters: list[str] = []
    output: list[str] = []
    pending = list(lexemes)
    at = 0
    while at < len(pending):
        lexeme = pending[at]
        at += 1
        if lexeme not in SIZES:
            output.append(lexeme)
            continue
        at = skip_blanks(pending, at)
        delimiter = pending[at][0] if at < len(pending) and pending[at][0] == _DOT else "".join(pending[at : at + 1])
        if delimiter in ("", _DOT):
            at = _drop_dot(pending, at)
        if lexeme == r"\left":
            open_delimiters.append(delimiter)
        elif lexeme == r"\right" and open_delimiters:
            _check_pair(open_delimiters.pop(), delimiter)
        elif lexeme == r"\right" and delimiter in ("", _DOT):
            raise MalformedError(r"a \right. without its \left")
    if not {"", _DOT}.isdisjoint(open_delimiters):
        raise MalformedError(r"a \left. without its \right")
    return output


def _drop_dot(lexemes: list[str], at: int) -> int:
    """Remove the leading dot of a lexeme and return the next index; `.3`, `.5` of `\\left.3.5` become `3.5`."""
    if at >= len(lexemes):
        return at
    after = lexemes[at][1:]
    if not after:
        return at + 1
    following = "".join(lexemes[at + 1 : at + 2])
    if after.isdecimal() and following[:1] == _DOT and following[1:].isdecimal():
        lexemes[at + 1] = after + following
        return at + 1
    lexemes[at] = after
    return at


def _check_pair(opening: str, closing: str) -> None:
    is_empty = closing in ("", _DOT)  # the answer's final dot is stripped before
    if opening == _DOT and closing in _BARS:
        raise UnsupportedError("an evaluation at a point")
    if opening in _BRACES and is_empty:
        raise UnsupportedError("a system of equations")
