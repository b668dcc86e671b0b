r"""Removal of TeX's sizes of delimiters (`\left`, `\right`, `\bigl`) and of empty delimiters (`\left.`, `\right.`).

Invariant: an empty delimiter is removed together with its dot; the text between two delimiters is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

from rlkit.envs.math.answers.lexing.lexemes import SIZE
from rlkit.envs.math.answers.lexing.parse_errors import MalformedError, UnsupportedError

_SIZE = re.compile(SIZE)
_BARS = frozenset({"|", r"\vert", r"\rvert", r"\mid", r"\|"})
_BRACES = frozenset({r"\{", r"\lbrace"})
_DOT = "."


def remove_empty_delimiters(lexemes: Sequence[str]) -> list[str]:
    r"""Return the lexemes without sizes of delimiters and without empty delimiters.

    Raises:
        MalformedError: a `\left.` without its `\right`, or the other way round.
        UnsupportedError: an evaluation, `\left. x^2 \right|_{x=3}`, or a system of equations, `\left\{ … \right.`.
    """
    open_delimiters: list[str] = []
    output: list[str] = []
    for lexeme, following in zip_longest(lexemes, lexemes[1:], fillvalue=_DOT):  # the text's final dot may be stripped
        if not _SIZE.fullmatch(lexeme):
            output.append(lexeme)
            continue
        delimiter = _DOT if lexeme.endswith(_DOT) else following
        if lexeme.startswith(r"\left"):
            open_delimiters.append(delimiter)
        elif lexeme.startswith(r"\right") and open_delimiters:
            opening = open_delimiters.pop()
            if opening == _DOT and delimiter in _BARS:
                raise UnsupportedError("an evaluation at a point")
            if opening in _BRACES and delimiter == _DOT:
                raise UnsupportedError("a system of equations")
        elif lexeme.startswith(r"\right") and delimiter == _DOT:
            raise MalformedError(r"a \right. without its \left")
    if _DOT in open_delimiters:
        raise MalformedError(r"a \left. without its \right")
    return output
