"""Answers in words: telling them from formulas, and reading them.

Invariant: words that make another value of a number are never left out; a sentence is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers.expressions import MAX_LETTERS
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.faults import Malformed
from rlkit.envs.math.answers.lexing.lexer import Token
from rlkit.envs.math.answers.nodes import number
from rlkit.envs.math.answers.sets import REALS
from rlkit.envs.math.answers.values import Group, Scalar, Text, Union, Value

MAX_WORDS = 12
"""A text of more words is a sentence, and no answer."""

_WORDY = frozenset({"word", "text", "symbol", "and", "or", "(", ")", ",", "'", "mod", "∪", "number", ":", "-", "not"})


def is_altered(tokens: Sequence[Token]) -> bool:
    """Whether words beside a value make something else of it: `at least 5`, `6 hours and 20 minutes`."""
    start = next((at for at, token in enumerate(tokens) if _is_phrase(token)), None)
    if start is None or not all(token.kind in _WORDY for token in tokens[start:]):
        return False
    return words.alters(" ".join(token.text for token in tokens[start:]), leading=start == 0)


def is_text(tokens: Sequence[Token]) -> bool:
    """Words and nothing to compute: `even`, `Monday`, `June 20`, `(B)` in a text."""
    if not all(token.kind in _WORDY for token in tokens):
        return False
    first = next((token for token in tokens if token.kind != "("), tokens[0])
    if first.kind == "text":
        return True
    if first.kind in ("word", "not") and (len(first.text) > 3 or not first.text.islower()):
        return True
    return all(token.kind in ("word", "symbol") for token in tokens) and any(len(token.text) > 4 for token in tokens)


def is_clock(token: Token) -> bool:
    """Whether it is the `05` of a time of day."""
    return token.kind == "number" and len(token.text) > 1 and token.text.isdecimal() and token.text[0] == "0"


def read_text(tokens: Sequence[Token]) -> Value:
    """The value of words: a number that they spell, a set, a few letters, or the words themselves.

    Raises:
        Malformed: they are a sentence, or none.
    """
    written = " ".join(token.text for token in tokens)
    if len(written.split()) > MAX_WORDS or "\\" in written or "$" in written:
        raise Malformed("a sentence")
    raw = words.squeezed(written)
    if raw in words.EMPTY:
        return Union(())
    if raw in words.REALS:
        return Union((REALS,))
    if (spelled := words.number(written)) is not None:
        return Scalar(number(spelled), raw=raw)
    pieces = [words.squeezed(piece) for piece in written.replace(" and ", ",").split(",")]
    if len(pieces) > 1 and all(0 < len(piece) <= 3 for piece in pieces):
        return Group("list", tuple(Text(piece) for piece in pieces))
    if not raw:
        raise Malformed("nothing")
    return Text(raw)


def _is_phrase(token: Token) -> bool:
    """Whether it is a word, and no product of variables."""
    return token.kind == "text" or (
        token.kind == "word" and (len(token.text) > MAX_LETTERS or words.alters(token.text))
    )
