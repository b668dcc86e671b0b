"""From a text to a typed value: what is a list, an interval, an equation, a unit, a word.

Invariant: time in proportion to length times depth, both limited; whatever the text is, there is a value or a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from rlkit.envs.math.answers.expressions import MAX_DEPTH
from rlkit.envs.math.answers.labels import holds_application, label
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.cleaning import cleaned
from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous, NotAnAnswer, Unreadable
from rlkit.envs.math.answers.lexing.lexemes import MAX_CHARS
from rlkit.envs.math.answers.lexing.lexer import Token, tokens
from rlkit.envs.math.answers.nodes import Builder, Call, Expression
from rlkit.envs.math.answers.phrases import MAX_WORDS, is_altered, is_clock, is_text, read_text
from rlkit.envs.math.answers.quantities import read_quantity
from rlkit.envs.math.answers.relations import are_far, expanded, is_name, listed, related
from rlkit.envs.math.answers.sets import REALS, as_union, interval, without
from rlkit.envs.math.answers.values import Based, Group, Matrix, Ratio, Relation, Scalar, Text, Union, Value

MAX_ITEMS = 100
"""In a list, a union, a chain of relations."""

_COMMAS = frozenset({",", ";"})
_COLON = frozenset({":"})
_JOINING = frozenset({"and", "or"})
_SEPARATORS = _COMMAS | _JOINING
_RELATIONS = frozenset({"=", "<", ">", "≤", "≥", "≠", "≈", "∈"})
_OPENING = frozenset({"(", "[", r"\{", "{", "begin", "⌊", "⌈"})
_CLOSING = {")": "([", "]": "([", r"\}": (r"\{",), "}": "{", "end": ("begin",), "⌋": "⌊", "⌉": "⌈"}
_BEFORE_INTERVALS = frozenset({"∪", "∈", "=", "∖"})
_AROUND_BASE = frozenset("{}()")


class Answer(NamedTuple):
    """A text that was read.

    Args:
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
        return _Reader(tokens(cleaned(text), thousands=thousands)).answer()
    except NotAnAnswer as fault:
        return fault
    except RecursionError:  # the caller is deep already
        return Monstrous("nested too deep")


class _Reader:
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
        kinds = [token.kind for token in self._tokens]
        if not _JOINING.isdisjoint((*kinds[:1], *kinds[-1:])) or any({*pair} <= _COMMAS for pair in pairwise(kinds)):
            raise Malformed("an item is missing")
        grouped = any(token.grouped for token in self._tokens)
        value = self._value(0, len(self._tokens))
        return Answer(value, self._computed, grouped, self._bare_log)

    def _value(self, low: int, high: int) -> Value:
        """A list, or one item."""
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
            if is_text(self._tokens[low:high]):
                return read_text(self._tokens[low:high])
            items = _flat(self._listed(*bounds) for bounds in ranges)
            joining = {token.kind for token in self._tokens[low:high]} & {"or", "and"}
            return listed(items, alternatives="or" in joining, conditions=joining == {"and"})
        finally:
            self._depth -= 1

    def _listed(self, low: int, high: int) -> Value:
        """An item of a list; in braces it is a set of one, unless they are TeX's own."""
        item = self._item(low, high)
        braced = self._tokens[low].kind == "{" and self._match[low] == high - 1
        tex = braced and any(token.kind in ("over", "choose") for token in self._tokens[low:high])
        return Group("braces", (item,)) if braced and not tex else item

    def _peeled(self, low: int, high: int) -> tuple[int, int]:
        """Without braces around the whole, which are TeX's own."""
        while high - low > 1 and self._tokens[low].kind == "{" and self._match[low] == high - 1:
            low, high = low + 1, high - 1
        return low, high

    def _split(self, low: int, high: int, kinds: frozenset[str]) -> list[tuple[int, int]]:
        """The ranges between signs that no bracket holds; empty ones are left out."""
        ends = [*self._places(low, high, kinds), high]
        starts = [low, *(end + 1 for end in ends[:-1])]
        ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
        if len(ranges) > MAX_ITEMS:
            raise Monstrous(f"more than {MAX_ITEMS} items")
        return ranges

    def _signs(self, low: int, high: int, kinds: frozenset[str]) -> list[str]:
        return [self._tokens[at].kind for at in self._places(low, high, kinds)]

    def _places(self, at: int, high: int, kinds: frozenset[str]) -> Iterator[int]:
        while at < high:
            if self._tokens[at].kind in kinds:
                yield at
            at = self._match.get(at, at) + 1

    def _item(self, low: int, high: int) -> Value:
        try:
            return self._mathematical(low, high)
        except NotAnAnswer as fault:
            if isinstance(fault, Monstrous) or not is_text(self._tokens[low:high]):
                raise
            return read_text(self._tokens[low:high])

    def _mathematical(self, low: int, high: int) -> Value:
        outer = low
        low, high = self._peeled(low, high)
        if low >= high:
            raise Malformed("nothing")
        if outer < low and self._signs(low, high, _SEPARATORS):
            return self._set(low, high)
        relations = self._signs(low, high, _RELATIONS)
        if relations:
            return self._relation(low, high, relations)
        if self._signs(low, high, _COLON):
            if any(token.kind in ("text", "word") or is_clock(token) for token in self._tokens[low:high]):
                return read_text(self._tokens[low:high])
            return Ratio(tuple(self._expression(*bounds) for bounds in self._split(low, high, _COLON)))
        operators = self._signs(low, high, frozenset("∪∩∖"))
        if operators and not is_text(self._tokens[low:high]):
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
        relation = related(tuple(signs), tuple(self._sides(ranges, signs)))
        return self._with_label(relation, ranges[0]) if isinstance(relation, Relation) else relation

    def _with_label(self, relation: Relation, bounds: tuple[int, int]) -> Relation:
        """An equation that remembers what its first side may be called, beside what it may mean."""
        first = self._tokens[slice(*bounds)]
        return relation._replace(named=label(first) is not None or holds_application(first))

    def _sides(self, ranges: list[tuple[int, int]], signs: list[str]) -> Iterator[Value]:
        """Of equal values, as in `x = 17 + 25 = 42`, it is enough that one is worked out."""
        before, computed = self._computed, list[bool]()
        for bounds in ranges:
            self._computed = False
            side = self._side(*bounds) if set(signs) == {"="} else self._mathematical(*bounds)
            if not is_name(side):
                computed.append(self._computed)
            yield side
        self._computed = before or (all(computed) if set(signs) == {"="} else any(computed))

    def _side(self, low: int, high: int) -> Value:
        """One side of an equation, which may be a label."""
        name = label(self._tokens[low:high])
        return Text(name.text) if name is not None and name.certain else self._mathematical(low, high)

    def _approximated(self, ranges: list[tuple[int, int]], signs: list[str]) -> Value:
        """What follows a value is a reminder of its size; what follows a name is the value."""
        cut = signs.index("≈")
        exact, rough = (self._side(*ranges[at]) for at in (cut, cut + 1))
        if cut == 0 and is_name(exact):
            return related(("=",), (exact, rough))
        if are_far(exact, rough):
            raise Malformed("two values that are not near each other")
        return self._mathematical(ranges[0][0], ranges[cut][1])

    def _set_operation(self, low: int, high: int, signs: list[str]) -> Value:
        operands = [self._mathematical(*bounds) for bounds in self._split(low, high, frozenset("∪∩∖"))]
        if len(operands) != len(signs) + 1 or "∩" in signs:
            raise Unreadable("a set operation")
        result, *others = map(as_union, operands)
        for sign, other in zip(signs, others, strict=True):
            if result is not None and other is not None:
                result = Union(result.parts + other.parts) if sign == "∪" else without(result, other)
            else:
                result = None
        if result is None:
            raise Unreadable("a set operation")
        return result

    def _operand(self, low: int, high: int) -> Value:  # noqa: PLR0911  one for each kind of value
        first = self._tokens[low]
        if first.kind == "∅" and high - low == 1:
            return Union(())
        if first.kind == "set" and high - low == 1:
            return Union((REALS,)) if first.text == "R" else Text(first.text)
        if is_text(self._tokens[low:high]):
            return read_text(self._tokens[low:high])
        if self._match.get(low) == high - 1:
            if first.kind == "begin":
                return self._matrix(low + 1, high - 1)
            if first.kind == r"\{":
                return self._set(low + 1, high - 1)
            if first.kind in ("(", "[") and self._tokens[low + 1].kind == "begin" and self._match[low + 1] == high - 2:
                return self._matrix(low + 2, high - 2)
            if first.kind == "[" and (rows := self._rows(low + 1, high - 1)):
                return self._matrix_of(rows)
            if first.kind in ("(", "[") and self._signs(low + 1, high - 1, _COMMAS):
                return self._tuple(low, high)
            if first.kind == "(" and self._signs(low + 1, high - 1, _RELATIONS):
                return self._mathematical(low + 1, high - 1)
        if is_altered(self._tokens[low:high]):
            return read_text(self._tokens[low:high])
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
        return inside if isinstance(inside, Union) and self._signs(low, high, _SEPARATORS) else Group("set", (inside,))

    def _tuple(self, low: int, high: int) -> Value:
        opening, closing = self._tokens[low].kind, self._tokens[high - 1].kind
        ranges = self._split(low + 1, high - 1, _COMMAS)
        items = tuple(self._item(*bounds) for bounds in ranges)
        if (opening == "(") != (closing == ")"):
            ends = [item.expression for item in items if isinstance(item, Scalar)]
            if len(ends) != 2 or len(items) != 2:
                raise Malformed("a bracket that does not match")
            return interval(ends[0], opening == "[", ends[1], closing == "]")
        return Group("tuple" if opening == "(" else "square", items)

    def _matrix(self, low: int, high: int) -> Value:
        rows = self._split(low, high, frozenset({"row"}))
        return self._matrix_of([self._split(*row, frozenset({"cell"})) for row in rows])

    def _rows(self, low: int, high: int) -> list[list[tuple[int, int]]]:
        """The cells of each row of `[[1,2],[3,4]]`; none where the items are no rows."""
        rows = self._split(low, high, frozenset({","}))
        if not all(self._tokens[start].kind == "[" and self._match[start] == end - 1 for start, end in rows):
            return []
        cells = [self._split(start + 1, end - 1, frozenset({","})) for start, end in rows]
        return cells if len({len(row) for row in cells}) == 1 and cells[0] else []

    def _matrix_of(self, rows: list[list[tuple[int, int]]]) -> Matrix:
        if not rows or len({len(row) for row in rows}) != 1:
            raise Malformed("a matrix whose rows differ in length")
        return Matrix(tuple(tuple(self._expression(*cell) for cell in row) for row in rows))

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
        subscript = [token.text.strip() for token in self._tokens[at + 1 : high] if token.kind not in _AROUND_BASE]
        if [name.lower() for name in subscript[:1]] == ["base"]:
            subscript = subscript[1:]
        if len(subscript) != 1:
            return None
        name = subscript[0]
        base = name if name.isdecimal() else str(words.number(name) or "")
        if not base:
            return None
        sign = "-" if negative else ""
        return Based(sign + digits.upper(), int(base[:4]), _in_base(digits, int(base[:4]), negative=negative))

    def _expression(self, low: int, high: int) -> Expression:
        value = self._scalar(low, high)
        if value.suffix == "°":
            return Call("degrees", (value.expression,))
        return value.expression

    def _scalar(self, low: int, high: int) -> Scalar:
        scalar, parser = read_quantity(self._tokens[low:high], self._builder)
        self._computed = self._computed or parser.computed
        self._bare_log = self._bare_log or parser.bare_log
        return scalar


def _matching(found: list[Token]) -> dict[int, int]:
    """For each opening bracket, where it is closed; `[0,1)` is one pair."""
    match: dict[int, int] = {}
    waiting: list[int] = []
    for at, token in enumerate(found):
        if token.kind in _OPENING:
            waiting.append(at)
        elif token.kind in _CLOSING:
            if token.kind == "]" and (at == 0 or found[at - 1].kind in _BEFORE_INTERVALS):
                raise Unreadable("an interval with its brackets turned round")
            if not waiting or found[waiting[-1]].kind not in _CLOSING[token.kind]:
                raise Malformed("a bracket that was not opened")
            match[waiting.pop()] = at
    if waiting and found[-1].kind == "[":
        raise Unreadable("an interval with its brackets turned round")
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
    flat: list[Value] = []
    for item in items:
        flat += item.items if isinstance(item, Group) and item.kind == "list" else expanded(item)
    return flat
