r"""Labels of values: `P(X=2)` in `P(X=2)=\frac12`, `|AB|` in `|AB|=5`, `f'(2)`, `\gcd(4,6)`, `[ABC]`.

Invariant: a label is recognised by its tokens alone, in linear time. A label is not certain if it may be a product or
an expression with an unknown to solve for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.lexemes import Token
from rlkit.envs.math.answers.lexing.notation import FUNCTIONS, NAMES
from rlkit.envs.math.answers.numeric import CONSTANTS

_BRACKETS = {"(": ")", "[": "]"}
_KINDS_WITH_TEXT = frozenset({"symbol", "word", "text", "number", "function", "name", "set"})
"""Kinds of tokens that differ by their texts; all others differ by the kind alone."""

_NO_ARITHMETIC = frozenset("= < > ≤ ≥ ≠ ≈ ∈ , ; : ∪ ∩ ∖ not and or text".split())  # noqa: SIM905  reads better
"""Kinds of tokens that a factor in brackets never contains."""

_ALWAYS_FUNCTIONS = frozenset("fgFG")
_FUNCTIONS = frozenset("hpqr") | frozenset({"phi", "varphi", "sigma", "tau", "zeta", "Gamma"})
_COUNTING_FUNCTIONS = frozenset("nd")  # functions that count a set in capitals: `n(A)`
_SIZED_SYMBOLS = frozenset("zwuv")
"""Complex numbers and vectors; `x` is not among them, because `|x|=5` means that `x` is 5 or -5."""

_NOTATION = re.compile(r"\\frac\{d\w\}\{d\w\}|d\w/d\w|(?:\{\})?[\^_](?:\d+|\{\d+\})[CP]_(?:\d+|\{\d+\})")
r"""`\frac{dy}{dx}`, `dy/dx`, `{}^5C_2`."""

_FUNCTION_OF_VARIABLE = re.compile(r"[A-Za-z]\(([a-z])\)")
MAX_TOKENS = 20
"""Limit of a label in `_NOTATION`."""

_CONSTANT_KINDS = frozenset({"number", r"\frac", r"\sqrt", "{", "}", "/", "-", "π"})
_COMPLEMENTS = (["^", "c"], ["^", "C"])
_MIN_VERTICES = 3


class Label(NamedTuple):
    """Name before a value."""

    text: str  # source text without spaces
    certain: bool  # whether the text cannot be anything but a label


def find_label(tokens: Sequence[Token]) -> Label | None:
    """Return the label on one side of an equation; None if the side is not a label, or is a single symbol."""
    text = "".join(map(_to_text, tokens[:MAX_TOKENS]))
    if _NOTATION.fullmatch(text):
        return Label(text, True)
    certain = _check_size_label(tokens) if tokens[0].kind in ("|", "‖", "[") else _check_application(tokens)
    return None if certain is None else Label("".join(map(_to_text, tokens)), certain)


def may_name_the_same(first: str, second: str) -> bool:
    """Tell whether two labels may have one meaning: `AB` and `|BA|`, `p(x=2)` and `P(X=2)`, `y` and `f(x)`."""
    for name, call in ((first, second), (second, first)):
        if (function := _FUNCTION_OF_VARIABLE.fullmatch(call)) and len(name) == 1 and name != function[1]:
            return True
    return _comparison_key(first) == _comparison_key(second)


def _comparison_key(text: str) -> tuple[list[str], str, str]:
    """Return the letters without order and case, the digits, and the signs except those of a length."""
    letters = sorted(filter(str.isalpha, text.lower()))
    signs = "".join(char for char in text if not char.isalnum() and char not in "|‖")
    return letters, "".join(filter(str.isdecimal, text)), signs


def has_function_application(tokens: Sequence[Token]) -> bool:
    """Tell whether an expression contains a function with a common name: `f(1)+f(2)`."""
    return any(
        token.kind == "symbol" and token.text in _ALWAYS_FUNCTIONS and following.kind == "("
        for token, following in pairwise(tokens)
    )


def _to_text(token: Token) -> str:
    return token.text.strip() if token.kind in _KINDS_WITH_TEXT else token.kind


def _check_size_label(tokens: Sequence[Token]) -> bool | None:
    """Tell whether `|AB|`, `‖v‖` or `[ABC]` is certainly a length, size or area; None if it is not a label."""
    opening, inside, closing = tokens[0], _without_braces(tokens[1:-1]), tokens[-1]
    kinds = {token.kind for token in inside}
    if closing.kind != _BRACKETS.get(opening.kind, opening.kind) or not inside:
        return None
    if opening.kind == "[":
        return True if _is_capitals(inside, _MIN_VERTICES) else None
    if opening.kind in kinds:
        return None
    if opening.kind == "‖" or kinds & {"∪", "∩", "∖"} or _is_capitals(inside, 1):
        return True
    return False if inside[0].text in _SIZED_SYMBOLS and kinds <= {"symbol", "_", "number", "{", "}"} else None


def _without_braces(tokens: Sequence[Token]) -> Sequence[Token]:
    r"""Strip the braces of `\vec{v}`."""
    return tokens[1:-1] if tokens[:1] and (tokens[0].kind, tokens[-1].kind) == ("{", "}") else tokens


def _is_capitals(tokens: Sequence[Token], min_length: int) -> bool:
    """Tell whether tokens are at least `min_length` capitals and nothing else."""
    text = "".join(token.text for token in tokens)
    return len(text) >= min_length and text.isalpha() and text.isupper()


def _check_application(tokens: Sequence[Token]) -> bool | None:  # noqa: PLR0911  one for each kind of name
    """Tell whether `f(x)` is certainly not a product; None if it is not a label."""
    start = _find_head_end(tokens)
    if start == 0 or start >= len(tokens) or tokens[start].kind not in _BRACKETS:
        return None
    if _find_closing(tokens, start) != len(tokens) - 1 or len(tokens) < start + 3:
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
    return _is_certain_head(head.text, inside)


def _is_certain_head(head: str, inside: Sequence[Token]) -> bool | None:
    if head in _ALWAYS_FUNCTIONS:
        return True
    names = {letter for token in inside if token.kind in ("symbol", "word") for letter in (token.text, *token.text)}
    if head in names:
        return None
    signed = inside[1:] if inside[0].kind in ("-", "+") else inside
    simple = _is_one_name(signed) or all(token.kind in _CONSTANT_KINDS or token.text == "π" for token in signed)
    if head in _FUNCTIONS or (len(head) == 1 and head.isupper()):
        return simple
    if head in _COUNTING_FUNCTIONS and _is_capitals(inside, 1):
        return True
    return False if simple else None


def _is_one_name(tokens: Sequence[Token]) -> bool:
    """Tell whether tokens are a number or a symbol, also with a subscript, a prime or a complement mark."""
    marks = [token.kind for token in tokens[1:2]]
    if marks == ["_"]:
        return _find_group_end(tokens, 2) == len(tokens)
    return (
        len(tokens) == 1 or (len(tokens) == 2 and marks == ["'"]) or _texts_without_braces(tokens[1:]) in _COMPLEMENTS
    )


def _find_head_end(tokens: Sequence[Token]) -> int:
    r"""Return the end of a function's name, such as `f`, `f_1'`, `f^{-1}`, `\gcd`, `(f \circ g)`; 0 for none."""
    first = tokens[0]
    if first.kind == "(":
        end = _find_closing(tokens, 0)
        return end + 1 if any(token.kind == r"\circ" for token in tokens[1:end]) else 0
    if first.kind == "word" and first.text not in NAMES | {"Area", "Pr", "Prob"}:
        return 0
    if first.kind not in ("symbol", "word", "text", "name", "set") or first.text.strip() in FUNCTIONS:
        return 0
    end = 1
    while end < len(tokens) and tokens[end].kind in ("'", "_", "^"):
        is_prime = tokens[end].kind == "'"
        is_power = tokens[end].kind == "^"
        end += 1
        if is_prime:
            continue
        start, end = end, _find_group_end(tokens, end)
        if is_power and _texts_without_braces(tokens[start:end]) != ["-", "1"]:
            return 0
    return end


def _texts_without_braces(tokens: Sequence[Token]) -> list[str]:
    return [token.text for token in tokens if token.kind not in ("{", "}")]


def _find_group_end(tokens: Sequence[Token], at: int) -> int:
    if at < len(tokens) and tokens[at].kind == "{":
        while at < len(tokens) and tokens[at].kind != "}":
            at += 1
    return at + 1


def _find_closing(tokens: Sequence[Token], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`; the length if there is none."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at].kind in ("(", "[")) - (tokens[at].kind in (")", "]"))
        if depth == 0:
            return at
    return len(tokens)
