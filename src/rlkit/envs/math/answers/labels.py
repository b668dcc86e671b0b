r"""Names before a value: `P(X=2)` in `P(X=2)=\frac12`, `|AB|` in `|AB|=5`, `f'(2)`, `\gcd(4,6)`, `[ABC]`.

Invariant: a label is told from its tokens alone, and time is in proportion to their number; what may be a product, an
unknown's size or another expression to solve for is no certain label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.lexer import Token
from rlkit.envs.math.answers.lexing.notation import FUNCTIONS, NAMES
from rlkit.envs.math.answers.numeric import CONSTANTS

_BRACKETS = {"(": ")", "[": "]"}
_WRITTEN = frozenset({"symbol", "word", "text", "number", "function", "name", "set"})
"""Kinds of tokens that differ by their texts; all others are told apart by the kind alone."""

_NO_ARITHMETIC = frozenset("= < > ≤ ≥ ≠ ≈ ∈ , ; : ∪ ∩ ∖ not and or text".split())  # noqa: SIM905  reads better
"""A bracket that holds one of these is no factor."""

_ALWAYS_FUNCTIONS = frozenset("fgFG")
_FUNCTIONS = frozenset("hpqr") | frozenset({"phi", "varphi", "sigma", "tau", "zeta", "Gamma"})
_COUNTING = frozenset("nd")
"""Of a set in capitals: `n(A)`."""

_MAY_HAVE_A_SIZE = frozenset("zwuv")
"""Complex numbers and vectors; `|x|=5` says that `x` is 5 or -5."""

_NOTATION = re.compile(r"\\frac\{d\w\}\{d\w\}|d\w/d\w|(?:\{\})?[\^_](?:\d+|\{\d+\})[CP]_(?:\d+|\{\d+\})")
r"""`\frac{dy}{dx}`, `dy/dx`, `{}^5C_2`."""

_OF_A_VARIABLE = re.compile(r"[A-Za-z]\(([a-z])\)")
MAX_TOKENS = 20
"""More are no label in a notation of its own."""

_CONSTANT = frozenset({"number", r"\frac", r"\sqrt", "{", "}", "/", "-", "π"})
_COMPLEMENTS = (["^", "c"], ["^", "C"])
_MIN_WORD = 3


class Label(NamedTuple):
    """A name as it is written.

    Args:
        text: the same however it is spaced.
        certain: it is nothing else.
    """

    text: str
    certain: bool


def label(tokens: Sequence[Token]) -> Label | None:
    """The label that one side of an equation is; None where it is none, or a single symbol."""
    text = "".join(map(_written, tokens[:MAX_TOKENS]))
    if _NOTATION.fullmatch(text):
        return Label(text, True)
    certain = _of_size(tokens) if tokens[0].kind in ("|", "‖", "[") else _of_application(tokens)
    return None if certain is None else Label("".join(map(_written, tokens)), certain)


def may_be_one(first: str, second: str) -> bool:
    """Whether two labels that differ may name one thing: `AB` and `|BA|`, `p(x=2)` and `P(X=2)`, `y` and `f(x)`."""
    for one, other in ((first, second), (second, first)):
        if (function := _OF_A_VARIABLE.fullmatch(other)) and len(one) == 1 and one != function[1]:
            return True
    return _likeness(first) == _likeness(second)


def _likeness(text: str) -> tuple[list[str], str, str]:
    """Its letters without their order and case, its digits, and its signs but those of a length."""
    letters = sorted(filter(str.isalpha, text.lower()))
    signs = "".join(char for char in text if not char.isalnum() and char not in "|‖")
    return letters, "".join(filter(str.isdecimal, text)), signs


def holds_application(tokens: Sequence[Token]) -> bool:
    """Whether a function of a known letter stands somewhere in an expression: `f(1)+f(2)`."""
    return any(
        token.kind == "symbol" and token.text in _ALWAYS_FUNCTIONS and following.kind == "("
        for token, following in pairwise(tokens)
    )


def _written(token: Token) -> str:
    return token.text.strip() if token.kind in _WRITTEN else token.kind


def _of_size(tokens: Sequence[Token]) -> bool | None:
    """Of `|AB|`, `‖v‖`, `[ABC]`: whether it is surely the length, size or area of what it names."""
    opening, inside, closing = tokens[0], _without_braces(tokens[1:-1]), tokens[-1]
    kinds = {token.kind for token in inside}
    if closing.kind != _BRACKETS.get(opening.kind, opening.kind) or not inside:
        return None
    if opening.kind == "[":
        return True if _is_points(inside, _MIN_WORD) else None
    if opening.kind in kinds:
        return None
    if opening.kind == "‖" or kinds & {"∪", "∩", "∖"} or _is_points(inside, 1):
        return True
    return False if inside[0].text in _MAY_HAVE_A_SIZE and kinds <= {"symbol", "_", "number", "{", "}"} else None


def _without_braces(tokens: Sequence[Token]) -> Sequence[Token]:
    r"""Without those of `\vec{v}`."""
    return tokens[1:-1] if tokens[:1] and (tokens[0].kind, tokens[-1].kind) == ("{", "}") else tokens


def _is_points(tokens: Sequence[Token], least: int) -> bool:
    """Whether it is capitals alone."""
    written = "".join(token.text for token in tokens)
    return len(written) >= least and written.isalpha() and written.isupper()


def _of_application(tokens: Sequence[Token]) -> bool | None:  # noqa: PLR0911  one for each kind of name
    """Of `f(x)`: whether it is surely no product."""
    start = _head_end(tokens)
    if start == 0 or start >= len(tokens) or tokens[start].kind not in _BRACKETS:
        return None
    if _closed_at(tokens, start) != len(tokens) - 1 or len(tokens) < start + 3:
        return None
    head, marks, inside = tokens[0], tokens[1:start], tokens[start + 1 : -1]
    if head.kind != "symbol":
        return True
    if any(token.kind == "^" for token in marks):
        return True if head.text in _ALWAYS_FUNCTIONS or head.text in "hH" else None
    if head.text in CONSTANTS:
        return None
    if any(token.kind == "'" for token in marks) or any(token.kind in _NO_ARITHMETIC for token in inside):
        return True
    if sum(token.kind == "|" for token in inside) == 1:
        return True
    return _is_certain(head.text, inside)


def _is_certain(head: str, inside: Sequence[Token]) -> bool | None:
    if head in _ALWAYS_FUNCTIONS:
        return True
    named = {letter for token in inside if token.kind in ("symbol", "word") for letter in (token.text, *token.text)}
    if head in named:
        return None
    signed = inside[1:] if inside[0].kind in ("-", "+") else inside
    simple = _is_one_name(signed) or all(token.kind in _CONSTANT or token.text == "π" for token in signed)
    if head in _FUNCTIONS or (len(head) == 1 and head.isupper()):
        return simple
    if head in _COUNTING and _is_points(inside, 1):
        return True
    return False if simple else None


def _is_one_name(tokens: Sequence[Token]) -> bool:
    """Whether it is a number or a symbol, which may have a subscript, a prime or the mark of a complement."""
    marks = [token.kind for token in tokens[1:2]]
    if marks == ["_"]:
        return _group_end(tokens, 2) == len(tokens)
    return len(tokens) == 1 or (len(tokens) == 2 and marks == ["'"]) or _bare_texts(tokens[1:]) in _COMPLEMENTS


def _head_end(tokens: Sequence[Token]) -> int:
    r"""Where the name of a function ends, such as `f`, `f_1'`, `f^{-1}`, `\gcd`, `(f \circ g)`; 0 for none."""
    first = tokens[0]
    if first.kind == "(":
        end = _closed_at(tokens, 0)
        return end + 1 if any(token.kind == r"\circ" for token in tokens[1:end]) else 0
    if first.kind == "word" and first.text not in NAMES | {"Area", "Pr", "Prob"}:
        return 0
    if first.kind not in ("symbol", "word", "text", "name", "set") or first.text.strip() in FUNCTIONS:
        return 0
    end = 1
    while end < len(tokens) and tokens[end].kind in ("'", "_", "^"):
        bare = tokens[end].kind == "'"
        inverse = tokens[end].kind == "^"
        end += 1
        if bare:
            continue
        start, end = end, _group_end(tokens, end)
        if inverse and _bare_texts(tokens[start:end]) != ["-", "1"]:
            return 0
    return end


def _bare_texts(tokens: Sequence[Token]) -> list[str]:
    return [token.text for token in tokens if token.kind not in ("{", "}")]


def _group_end(tokens: Sequence[Token], at: int) -> int:
    if at < len(tokens) and tokens[at].kind == "{":
        while at < len(tokens) and tokens[at].kind != "}":
            at += 1
    return at + 1


def _closed_at(tokens: Sequence[Token], start: int) -> int:
    """Where the bracket at a place is closed; the length where it is not."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at].kind in ("(", "[")) - (tokens[at].kind in (")", "]"))
        if depth == 0:
            return at
    return len(tokens)
