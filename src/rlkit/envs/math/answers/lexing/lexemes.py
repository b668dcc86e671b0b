r"""From text to lexemes, the pieces that tokens are made of: `\frac`, `12.5`, `abc`, `{`, blanks.

Invariant: what is joined is the text with LaTeX in the place of Unicode's signs; the length is limited.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous
from rlkit.envs.math.answers.lexing.notation import LOWERED, RAISED, UNICODE

MAX_CHARS = 4_000
MAX_ASCII_CHARS = 16_000

_LEXEME = re.compile(
    r"\s+|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.{2,}|\.[0-9]+|[A-Za-z]+|\*\*|<=|>=|!=|==|\+/-|.", re.DOTALL
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_OVERLINED = re.compile("(?:[0-9][\N{COMBINING OVERLINE}\N{COMBINING MACRON}])+")
_DOTTED = re.compile("([0-9])\N{COMBINING DOT ABOVE}")
_NOT_A_DIGIT = re.compile(r"[^0-9]")

_DOLLARS = re.compile(r"(?<![A-Za-z\\])U\.?S\.?~?\s?\\?\$")
_RUPEES = re.compile(r"(?<![A-Za-z\\])Rs\.?(?=[\s~]*[0-9])")


def lexemes(text: str) -> list[str]:
    """Split a text into lexemes, or raise `Monstrous` where it is too long."""
    if len(text) > MAX_CHARS:
        raise Monstrous(f"more than {MAX_CHARS} characters")
    return split(_ascii(text))


def split(text: str) -> list[str]:
    """The lexemes of a piece of a text whose signs are LaTeX already."""
    return _LEXEME.findall(text)


def group(found: Sequence[str], at: int) -> tuple[str, int]:
    """The text of the braces at a place, or the one lexeme there, and the place behind it.

    Raises:
        Malformed: a brace is not closed, or nothing is there.
    """
    at = start = after_blanks(found, at)
    depth = 0
    while at < len(found):
        lexeme = found[at]
        at += 1
        depth += (lexeme == "{") - (lexeme == "}")
        if depth <= 0:
            inside = found[start:at]
            return "".join(inside[1:-1] if inside[0] == "{" else inside), at
    raise Malformed("a brace that is not closed")


def after_blanks(found: Sequence[str], at: int) -> int:
    """The place of the next lexeme that is not blank."""
    while at < len(found) and found[at][0].isspace():
        at += 1
    return at


def _ascii(text: str) -> str:
    """The text with LaTeX in the place of other signs, as far as there is any for them."""
    text = _RUPEES.sub("₹", _DOLLARS.sub(r"\\$", text))
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda run: rf"\overline{{{_NOT_A_DIGIT.sub('', run[0])}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text)
    text = _RAISED.sub(_raised, text.translate(UNICODE))
    text = _LOWERED.sub(lambda run: f"_{{{run[0].translate(LOWERED)}}}", text)
    text = unicodedata.normalize("NFKC", text)  # digits and letters in other forms
    if len(text) > MAX_ASCII_CHARS:
        raise Monstrous(f"more than {MAX_ASCII_CHARS} characters, written out")
    return text.translate(UNICODE)


def _raised(run: re.Match[str]) -> str:
    written = run[0].translate(RAISED)
    return f"^{written} " if len(written) == 1 else f"^{{{written}}}"
