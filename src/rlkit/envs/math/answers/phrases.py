"""Answers in words, as distinct from formulas.

Invariant: words that change the value of a number are never ignored; a sentence is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.envs.math.answers.expressions import MAX_LETTERS
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.lexemes import Token
from rlkit.envs.math.answers.lexing.parse_errors import MalformedError
from rlkit.envs.math.answers.nodes import make_integer
from rlkit.envs.math.answers.sets import REALS
from rlkit.envs.math.answers.values import Group, Scalar, Text, Union, Value

MAX_WORDS = 12
"""Maximum number of words in an answer; a longer text is a sentence."""

_TEXT_KINDS = frozenset(
    {"word", "text", "symbol", "and", "or", "(", ")", ",", "'", "mod", "∪", "number", ":", "-", "not"}
)


def has_altering_words(tokens: Sequence[Token]) -> bool:
    """Tell whether words beside a value change it: `at least 5`, `6 hours and 20 minutes`."""
    start = next((at for at, token in enumerate(tokens) if _is_phrase(token)), None)
    if start is None or not all(token.kind in _TEXT_KINDS for token in tokens[start:]):
        return False
    return words.alters_value(" ".join(token.text for token in tokens[start:]), leading=start == 0)


def is_text(tokens: Sequence[Token]) -> bool:
    """Tell whether tokens are words with nothing to compute: `even`, `Monday`, `June 20`, `(B)` in a text."""
    if not all(token.kind in _TEXT_KINDS for token in tokens):
        return False
    first = next((token for token in tokens if token.kind != "("), tokens[0])
    if first.kind == "text":
        return True
    if first.kind in ("word", "not") and (len(first.text) > 3 or not first.text.islower()):
        return True
    return all(token.kind in ("word", "symbol") for token in tokens) and any(len(token.text) > 4 for token in tokens)


def is_clock_part(token: Token) -> bool:
    """Tell whether a token is part of a time of day, such as `05`."""
    return token.kind == "number" and len(token.text) > 1 and token.text.isdecimal() and token.text[0] == "0"


def read_text(tokens: Sequence[Token]) -> Value:
    """Return the value of words: a spelled number, a set, a few letters, or the words themselves.

    Raises:
        MalformedError: the words are a sentence, or there are none.
    """
    text = " ".join(token.text for token in tokens)
    if len(text.split()) > MAX_WORDS or "\\" in text or "$" in text:
        raise MalformedError("a sentence")
    raw = words.squeeze(text)
    if raw in words.EMPTY_SETS:
        return Union(())
    if raw in words.ALL_REALS:
        return Union((REALS,))
    if (value := words.parse_number(text)) is not None:
        return Scalar(make_integer(value), raw=raw)
    parts = [words.squeeze(part) for part in text.replace(" and ", ",").split(",")]
    if len(parts) > 1 and all(0 < len(part) <= 3 for part in parts):
        return Group("list", tuple(Text(part) for part in parts))
    if not raw:
        raise MalformedError("nothing")
    return Text(raw)


def _is_phrase(token: Token) -> bool:
    """Tell whether a token is a word and not a product of variables."""
    return token.kind == "text" or (
        token.kind == "word" and (len(token.text) > MAX_LETTERS or words.alters_value(token.text))
    )
