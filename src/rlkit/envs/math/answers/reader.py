"""From a text to a typed value: what is a list, an interval, an equation, a unit, a word.

Invariant: time in proportion to length times depth, both limited; whatever the text is, there is a value or a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from rlkit.envs.math.answers import words
from rlkit.envs.math.answers.expressions import MAX_DEPTH, MAX_LETTERS
from rlkit.envs.math.answers.faults import Malformed, Monstrous, NotAnAnswer, Unreadable
from rlkit.envs.math.answers.lexer import MAX_CHARS, Token, tokens
from rlkit.envs.math.answers.nodes import Builder, Call, Expression, number
from rlkit.envs.math.answers.quantities import quantity
from rlkit.envs.math.answers.relations import are_far, expanded, is_name, listed, related
from rlkit.envs.math.answers.sets import REALS, as_union, interval, without
from rlkit.envs.math.answers.values import Based, Group, Matrix, Ratio, Scalar, Text, Union, Value

MAX_WORDS = 12
"""A text of more words is a sentence, and no answer."""

MAX_LEAD_INS = 3

MAX_ITEMS = 100
"""In a list, a union, a chain of relations."""

_SEPARATORS = frozenset({",", ";", "and", "or"})
_RELATIONS = frozenset({"=", "<", ">", "≤", "≥", "≠", "≈", "∈"})
_OPENING = frozenset({"(", "[", r"\{", "{", "begin", "⌊", "⌈"})
_CLOSING = {")": "([", "]": "([", r"\}": (r"\{",), "}": "{", "end": ("begin",), "⌋": "⌊", "⌉": "⌈"}
_WORDY = frozenset({"word", "text", "symbol", "and", "or", "(", ")", ",", "'", "mod", "∪", "number", ":", "-", "not"})
_ENDS = ".,;: \t\r\n"


class Answer(NamedTuple):
    """A text that was read.

    Args:
        value: what it is.
        computed: arithmetic on literals is written out in it.
        grouped: it holds a number with commas, which may also be a list.
        bare_log: it holds a logarithm without a base.
    """

    value: Value
    computed: bool = False
    grouped: bool = False
    bare_log: bool = False


def read(text: str, *, thousands: bool = True) -> Answer:
    """The answer that a text is.

    Args:
        thousands: `1,234` is a number; otherwise it is two.

    Raises:
        NotAnAnswer: it is none, or one that is over a limit, or written in an unknown way.
    """
    found = _read(text, thousands)
    if isinstance(found, NotAnAnswer):
        raise found.with_traceback(None)
    return found


@lru_cache(maxsize=4096)
def _read(text: str, thousands: bool) -> Answer | NotAnAnswer:
    try:
        if len(text) > MAX_CHARS:
            raise Monstrous(f"more than {MAX_CHARS} characters")
        return _Reader(tokens(_cleaned(text), thousands=thousands)).answer()
    except NotAnAnswer as fault:
        return fault
    except RecursionError:  # the caller is deep already
        return Monstrous("nested too deep")


def _cleaned(text: str) -> str:
    """Without what stands around an answer: a lead-in, a full stop."""
    text = _without_end(text.strip().strip("*`"))
    for _ in range(MAX_LEAD_INS):
        lower = text.lower()
        lead = next((lead for lead in words.LEAD_INS if lower.startswith(lead)), "")
        if not lead or len(text) == len(lead) or text[len(lead)].isalnum():
            break
        text = text[len(lead) :].lstrip(_ENDS + "*")
    text = text.removeprefix("=").lstrip()
    return text[0] if len(text) == 2 and text[0].isalpha() and text[1] == ")" else text


def _without_end(text: str) -> str:
    r"""Without full stops and commas at the end; that of `\,` is part of a command."""
    stripped = text.rstrip(_ENDS)
    if stripped.endswith("\\") and stripped == text:  # of a space after a backslash
        return text[:-1]
    return text[: len(stripped) + 1] if stripped.endswith("\\") else stripped


class _Reader:
    """Reads values from ranges of tokens."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._match = _matching(found)
        self._computed = False
        self._bare_log = False
        self._builder = Builder()
        self._depth = 0

    def answer(self) -> Answer:
        if sum(token.kind == "word" for token in self._tokens) > MAX_WORDS:
            raise Malformed("a sentence")
        grouped = any(token.grouped for token in self._tokens)
        value = self._value(0, len(self._tokens))
        return Answer(value, self._computed, grouped, self._bare_log)

    def _value(self, low: int, high: int) -> Value:
        """A list, or one item."""
        low, high = self._peeled(low, high)
        if low >= high:
            raise Malformed("nothing")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Monstrous(f"nested more than {MAX_DEPTH} deep")
        try:
            ranges = self._split(low, high, _SEPARATORS)
            if len(ranges) == 1:
                values = expanded(self._item(*ranges[0]))
                return values[0] if len(values) == 1 else Group("list", values)
            if self._is_text(low, high):
                return self._text(low, high)
            items = _flat(self._item(*bounds) for bounds in ranges)
            joining = {token.kind for token in self._tokens[low:high]} & {"or", "and"}
            return listed(items, alternatives="or" in joining, conditions=joining == {"and"})
        finally:
            self._depth -= 1

    def _peeled(self, low: int, high: int) -> tuple[int, int]:
        """Without braces around the whole, which are TeX's own."""
        while high - low > 1 and self._tokens[low].kind == "{" and self._match[low] == high - 1:
            low, high = low + 1, high - 1
        return low, high

    def _split(self, low: int, high: int, kinds: frozenset[str]) -> list[tuple[int, int]]:
        """The ranges between signs that no bracket holds; empty ones are left out."""
        found: list[tuple[int, int]] = []
        start = at = low
        while at < high:
            if self._tokens[at].kind in kinds:
                if at > start:
                    found.append((start, at))
                start = at + 1
            at = self._match.get(at, at) + 1
        if high > start:
            found.append((start, high))
        if len(found) > MAX_ITEMS:
            raise Monstrous(f"more than {MAX_ITEMS} items")
        return found

    def _signs(self, low: int, high: int, kinds: frozenset[str]) -> list[str]:
        found: list[str] = []
        at = low
        while at < high:
            if self._tokens[at].kind in kinds:
                found.append(self._tokens[at].kind)
            at = self._match.get(at, at) + 1
        return found

    def _item(self, low: int, high: int) -> Value:
        try:
            return self._mathematical(low, high)
        except NotAnAnswer as fault:
            if isinstance(fault, Monstrous) or not self._is_text(low, high):
                raise
            return self._text(low, high)

    def _mathematical(self, low: int, high: int) -> Value:
        low, high = self._peeled(low, high)
        if low >= high:
            raise Malformed("nothing")
        relations = self._signs(low, high, _RELATIONS)
        if relations:
            return self._relation(low, high, relations)
        if ":" in self._signs(low, high, frozenset(":")):
            if any(token.kind in ("text", "word") or _is_clock(token) for token in self._tokens[low:high]):
                return self._text(low, high)
            return Ratio(tuple(self._expression(*bounds) for bounds in self._split(low, high, frozenset(":"))))
        operators = self._signs(low, high, frozenset("∪∩∖"))
        if operators and not self._is_text(low, high):
            return self._set_operation(low, high, operators)
        return self._operand(low, high)

    def _relation(self, low: int, high: int, signs: list[str]) -> Value:
        ranges = self._split(low, high, _RELATIONS)
        if len(ranges) == len(signs) == 1 and signs[0] == "≈":
            return self._mathematical(*ranges[0])
        if len(ranges) != len(signs) + 1:
            raise Malformed("a relation without a side")
        if "≈" in signs:
            return self._approximated(ranges, signs)
        if signs == ["∈"]:
            return self._mathematical(*ranges[1])
        if "∈" in signs:
            raise Unreadable("a relation with ∈")
        return related(tuple(signs), tuple(self._sides(ranges, signs)))

    def _sides(self, ranges: list[tuple[int, int]], signs: list[str]) -> Iterator[Value]:
        """Of equal values, as in `x = 17 + 25 = 42`, it is enough that one is worked out."""
        before, computed = self._computed, list[bool]()
        for bounds in ranges:
            self._computed = False
            side = self._mathematical(*bounds)
            if not is_name(side):
                computed.append(self._computed)
            yield side
        self._computed = before or (all(computed) if set(signs) == {"="} else any(computed))

    def _approximated(self, ranges: list[tuple[int, int]], signs: list[str]) -> Value:
        """What follows a value is a reminder of its size; what follows a name is the value."""
        cut = signs.index("≈")
        exact, rough = (self._mathematical(*ranges[at]) for at in (cut, cut + 1))
        if cut == 0 and is_name(exact):
            return related(("=",), (exact, rough))
        if are_far(exact, rough):
            raise Malformed("two values that are not near each other")
        return self._mathematical(ranges[0][0], ranges[cut][1])

    def _set_operation(self, low: int, high: int, signs: list[str]) -> Value:
        operands = [self._mathematical(*bounds) for bounds in self._split(low, high, frozenset("∪∩∖"))]
        if len(operands) != len(signs) + 1 or "∩" in signs:
            raise Unreadable("a set operation")
        result = as_union(operands[0])
        for sign, operand in zip(signs, operands[1:], strict=True):
            right = as_union(operand)
            if result is None or right is None:
                raise Unreadable("a set operation")
            result = Union(result.parts + right.parts) if sign == "∪" else without(result, right)
        if result is None:
            raise Unreadable("a set operation")
        return result

    def _operand(self, low: int, high: int) -> Value:  # noqa: PLR0911  one for each kind of value
        first = self._tokens[low]
        if first.kind == "∅" and high - low == 1:
            return Union(())
        if first.kind == "set" and high - low == 1:
            return Union((REALS,)) if first.text == "R" else Text(first.text)
        if self._is_text(low, high):
            return self._text(low, high)
        if self._match.get(low) == high - 1:
            if first.kind == "begin":
                return self._matrix(low + 1, high - 1)
            if first.kind == r"\{":
                return self._set(low + 1, high - 1)
            if first.kind in ("(", "[") and self._tokens[low + 1].kind == "begin" and self._match[low + 1] == high - 2:
                return self._matrix(low + 2, high - 2)
            if first.kind in ("(", "[") and self._signs(low + 1, high - 1, frozenset({",", ";"})):
                return self._tuple(low, high)
            if first.kind == "(" and self._signs(low + 1, high - 1, _RELATIONS):
                return self._mathematical(low + 1, high - 1)
        if self._is_altered(low, high):
            return self._text(low, high)
        return self._based(low, high) or self._scalar(low, high)

    def _set(self, low: int, high: int) -> Value:
        if low == high:
            return Union(())
        if self._tokens[low].kind == "symbol" and (bars := self._signs(low, high, frozenset({"|", ":"}))):
            condition = self._split(low, high, frozenset(bars[0]))[1:]
            if len(condition) == 1:
                return self._value(*condition[0])
        inside = self._value(low, high)
        if isinstance(inside, Group) and inside.kind == "list":
            return Group("set", inside.items)
        return Group("set", (inside,))

    def _tuple(self, low: int, high: int) -> Value:
        opening, closing = self._tokens[low].kind, self._tokens[high - 1].kind
        ranges = self._split(low + 1, high - 1, frozenset({",", ";"}))
        items = tuple(self._item(*bounds) for bounds in ranges)
        if (opening == "(") != (closing == ")"):
            ends = [item.expression for item in items if isinstance(item, Scalar)]
            if len(ends) != 2 or len(items) != 2:
                raise Malformed("a bracket that does not match")
            return interval(ends[0], opening == "[", ends[1], closing == "]")
        return Group("tuple" if opening == "(" else "square", items)

    def _matrix(self, low: int, high: int) -> Value:
        rows = [
            tuple(self._expression(*cell) for cell in self._split(*row, frozenset({"cell"})))
            for row in self._split(low, high, frozenset({"row"}))
        ]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Malformed("a matrix whose rows differ in length")
        return Matrix(tuple(rows))

    def _based(self, low: int, high: int) -> Based | None:
        negative = self._tokens[low].kind == "-"
        at = low + negative
        end = self._match.get(at) if self._tokens[min(at, high - 1)].kind == "(" else None
        at += end is not None
        digits = ""
        while at < high and self._tokens[at].kind in ("number", "symbol", "word"):
            digits += self._tokens[at].text
            at += 1
        at += at == end
        if not digits or not digits[0].isdecimal() or at >= high - 1 or self._tokens[at].kind != "_":
            return None
        base_low, base_high = self._peeled(at + 1, high)
        if base_high - base_low != 1 or not (base := self._tokens[base_low].text.strip()).isdecimal():
            return None
        sign = "-" if negative else ""
        return Based(sign + digits.upper(), int(base[:4]), _in_base(digits, int(base[:4]), negative=negative))

    def _expression(self, low: int, high: int) -> Expression:
        value = self._scalar(low, high)
        if value.suffix == "°":
            return Call("degrees", (value.expression,))
        return value.expression

    def _scalar(self, low: int, high: int) -> Scalar:
        found = quantity(self._tokens[low:high], self._builder)
        self._computed = self._computed or found.computed
        self._bare_log = self._bare_log or found.bare_log
        return found.scalar

    def _is_altered(self, low: int, high: int) -> bool:
        """Whether words beside a value make something else of it: `at least 5`, `6 hours and 20 minutes`."""
        found = self._tokens[low:high]
        start = next((at for at, token in enumerate(found) if _is_phrase(token)), None)
        if start is None or not all(token.kind in _WORDY for token in found[start:]):
            return False
        return words.alters(" ".join(token.text for token in found[start:]), leading=start == 0)

    def _is_text(self, low: int, high: int) -> bool:
        """Words and nothing to compute: `even`, `Monday`, `June 20`, `(B)` in a text."""
        found = self._tokens[low:high]
        if not all(token.kind in _WORDY for token in found):
            return False
        first = next((token for token in found if token.kind != "("), found[0])
        if first.kind == "text":
            return True
        if first.kind in ("word", "not") and (len(first.text) > 3 or not first.text.islower()):
            return True
        return all(token.kind in ("word", "symbol") for token in found) and any(len(token.text) > 4 for token in found)

    def _text(self, low: int, high: int) -> Value:
        found = self._tokens[low:high]
        written = " ".join(token.text for token in found)
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


def _is_clock(token: Token) -> bool:
    """Whether it is the `05` of a time of day."""
    return token.kind == "number" and len(token.text) > 1 and token.text.isdecimal() and token.text[0] == "0"


def _matching(found: list[Token]) -> dict[int, int]:
    """For each opening bracket, where it is closed; `[0,1)` is one pair."""
    match: dict[int, int] = {}
    waiting: list[int] = []
    for at, token in enumerate(found):
        if token.kind in _OPENING:
            waiting.append(at)
        elif token.kind in _CLOSING:
            if not waiting or found[waiting[-1]].kind not in _CLOSING[token.kind]:
                raise Malformed("a bracket that was not opened")
            match[waiting.pop()] = at
    if waiting:
        raise Malformed("a bracket that is not closed")
    return match


def _in_base(digits: str, base: int, *, negative: bool) -> int | None:
    if not 2 <= base <= 36 or "." in digits:
        return None
    try:
        return int(digits, base) * (-1 if negative else 1)
    except ValueError:
        raise Malformed(f"a digit that base {base} does not have") from None


def _flat(items: Iterator[Value]) -> list[Value]:
    """The items; those of a list within are of the list."""
    found: list[Value] = []
    for item in items:
        if isinstance(item, Group) and item.kind == "list":
            found.extend(item.items)
        else:
            found.extend(expanded(item))
    return found
