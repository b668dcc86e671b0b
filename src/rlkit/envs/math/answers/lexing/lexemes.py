r"""Splitting of a text into lexemes, from which tokens are built: `\frac`, `12.5`, `abc`, `{`, blanks.

Invariant: the joined lexemes are the text with Unicode symbols replaced by LaTeX; the length of both is limited. An
empty delimiter is removed together with its dot; the text between two delimiters is unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.notation import UNICODE
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, UnsupportedError

MAX_CHARS = 4_000
MAX_ASCII_CHARS = 16_000

_SIZE = re.compile(r"\\(?:left|right|middle|[bB]igg?[lr]?|[bB]igm)(?![A-Za-z])\s*\.?")
"""Command before a delimiter, together with the dot of an empty delimiter."""
_BARS = frozenset({"|", r"\vert", r"\rvert", r"\mid", r"\|"})
_BRACES = frozenset({r"\{", r"\lbrace"})
_DOT = "."

_LEXEME = re.compile(
    _SIZE.pattern + r"|\s+|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.{2,}|\.[0-9]+|[A-Za-z]+|\*\*|<=|>=|!=|==|\+/-|.",
    re.DOTALL,
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_OVERLINED = re.compile("(?:[0-9][\N{COMBINING OVERLINE}\N{COMBINING MACRON}])+")
_DOTTED = re.compile("([0-9])\N{COMBINING DOT ABOVE}")
_NOT_A_DIGIT = re.compile(r"[^0-9]")

_DOLLARS = re.compile(r"(?<![A-Za-z\\])U\.?S\.?~?\s?\\?\$")
_RUPEES = re.compile(r"(?<![A-Za-z\\])Rs\.?(?=[\s~]*[0-9])")


class Token(NamedTuple):
    """Token of an answer."""

    kind: str  # `number`, `symbol`, `word`, `text`, `function`, `name`, `set`, `currency`, or the sign itself
    text: str  # source text; for the kind `text`, its content; for a number its digits, with the period in parentheses
    value: Fraction | None = None
    spaced: bool = False  # whether a blank precedes it
    grouped: bool = False  # whether it is a number with commas between thousands, which may also be a list


def split_lexemes(text: str) -> list[str]:
    r"""Split a text into lexemes, without sizes of delimiters and without empty delimiters.

    Raises:
        LimitError: the text is too long.
        MalformedError: a `\left.` without its `\right`, or the other way round.
        UnsupportedError: an evaluation, `\left. x^2 \right|_{x=3}`, or a system of equations, `\left\{ … \right.`.
    """
    if len(text) > MAX_CHARS:
        raise LimitError(f"more than {MAX_CHARS} characters")
    return _remove_empty_delimiters(split_ascii_lexemes(_ascii(text)))


def split_ascii_lexemes(text: str) -> list[str]:
    """Split a text without Unicode symbols into lexemes."""
    return _LEXEME.findall(text)


def read_group(lexemes: Sequence[str], at: int) -> tuple[str, int]:
    """Read a group at an index: the content of braces, or else one lexeme. Return its text and the next index.

    Raises:
        MalformedError: a brace is not closed, or nothing follows.
    """
    at = start = skip_blanks(lexemes, at)
    depth = 0
    while at < len(lexemes):
        lexeme = lexemes[at]
        at += 1
        depth += (lexeme == "{") - (lexeme == "}")
        if depth <= 0:
            content = lexemes[start:at]
            return "".join(content[1:-1] if content[0] == "{" else content), at
    raise MalformedError("a brace that is not closed")


def skip_blanks(lexemes: Sequence[str], at: int) -> int:
    """Return the index of the next lexeme that is not blank."""
    while at < len(lexemes) and lexemes[at][0].isspace():
        at += 1
    return at


def _ascii(text: str) -> str:
    """Replace Unicode symbols that have an equivalent in LaTeX."""
    text = _RUPEES.sub("₹", _DOLLARS.sub(r"\\$", text))
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda run: rf"\overline{{{_NOT_A_DIGIT.sub('', run[0])}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text)
    text = text.translate(UNICODE)
    text = _SUPERSCRIPTS.sub(lambda run: f"^{run[0]} " if len(run[0]) == 1 else f"^{{{run[0]}}}", text)
    text = _SUBSCRIPTS.sub(r"_{\g<0>}", text)
    text = unicodedata.normalize("NFKC", text)  # raised, full-width and other variants of digits and letters
    if len(text) > MAX_ASCII_CHARS:
        raise LimitError(f"more than {MAX_ASCII_CHARS} characters after Unicode symbols are replaced by LaTeX")
    return text.translate(UNICODE)


def _remove_empty_delimiters(lexemes: Sequence[str]) -> list[str]:
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
