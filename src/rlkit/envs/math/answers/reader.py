"""Reader of answers: parses a text into a typed value such as a list, an interval, an equation or a word.

Invariant: time is proportional to length times depth, both limited; every text gives a value or a `ParseError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from rlkit.envs.math.answers.expressions import MAX_DEPTH
from rlkit.envs.math.answers.labels import find_label, has_function_application
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.cleaning import clean
from rlkit.envs.math.answers.lexing.lexemes import MAX_CHARS, Token
from rlkit.envs.math.answers.lexing.lexer import tokenize
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, ParseError, UnsupportedError
from rlkit.envs.math.answers.nodes import Builder, Expression
from rlkit.envs.math.answers.phrases import MAX_WORDS, has_altering_words, is_clock_part, is_text, read_text
from rlkit.envs.math.answers.quantities import read_quantity
from rlkit.envs.math.answers.relations import differ_widely, expand_plus_minus, is_name, make_list, make_relation
from rlkit.envs.math.answers.sets import REALS, as_union, make_interval, subtract_points
from rlkit.envs.math.answers.values import Based, Group, Matrix, Ratio, Relation, Scalar, Text, Union, Value

MAX_ITEMS = 100  # limit of items in a list, a union, a chain of relations
_COMMAS = frozenset({",", ";"})
_COLON = frozenset({":"})
_LINKS = frozenset({"and", "or"})
_SEPARATORS = _COMMAS | _LINKS
_RELATIONS = frozenset({"=", "<", ">", "≤", "≥", "≠", "≈", "∈"})
_OPENING = frozenset({"(", "[", r"\{", "{", "begin", "⌊", "⌈"})
_CLOSING = {")": "([", "]": "([", r"\}": (r"\{",), "}": "{", "end": ("begin",), "⌋": "⌊", "⌉": "⌈"}
_BEFORE_INTERVALS = frozenset({"∪", "∈", "=", "∖"})
_AROUND_BASE = frozenset("{}()")


class Answer(NamedTuple):
    """Value of a text."""

    value: Value
    computed: bool = False  # whether it contains unevaluated arithmetic on literals
    grouped: bool = False  # whether it contains a number with commas, which may also be a list
    bare_log: bool = False  # whether it contains a logarithm without a base


def parse_answer(text: str, *, thousands: bool = True) -> Answer:
    """Read the answer in a text.

    Args:
        thousands: read `1,234` as one number, not two.

    Raises:
        ParseError: the text is malformed, over a limit, or in an unsupported notation.
    """
    result = _parse_cached(text, thousands)
    if isinstance(result, ParseError):
        raise result.with_traceback(None)
    return result


@lru_cache(maxsize=4096)
def _parse_cached(text: str, thousands: bool) -> Answer | ParseError:
    try:
        if len(text) > MAX_CHARS:
            raise LimitError(f"more than {MAX_CHARS} characters")
        return _Reader(tokenize(clean(text), thousands=thousands)).read_answer()
    except ParseError as fault:
        return fault
    except RecursionError:  # the caller's stack is deep already
        return LimitError("nested too deep")


class _Reader:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._match = _match_brackets(tokens)
        self._computed = False
        self._bare_log = False
        self._builder = Builder()
        self._depth = 0

    def read_answer(self) -> Answer:
        if sum(token.kind == "word" for token in self._tokens) > MAX_WORDS:
            raise MalformedError("a sentence")
        kinds = [token.kind for token in self._tokens]
        if not _LINKS.isdisjoint((*kinds[:1], *kinds[-1:])) or any({*pair} <= _COMMAS for pair in pairwise(kinds)):
            raise MalformedError("an item is missing")
        grouped = any(token.grouped for token in self._tokens)
        value = self._read_value(0, len(self._tokens))
        return Answer(value, self._computed, grouped, self._bare_log)

    def _read_value(self, low: int, high: int) -> Value:
        """Read a list, or one item."""
        if low >= high:
            raise MalformedError("nothing")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise LimitError(f"nested more than {MAX_DEPTH} deep")
        try:
            ranges = self._split(low, high, _SEPARATORS)
            if len(ranges) == 1:
                values = expand_plus_minus(self._read_item(*ranges[0]))
                return values[0] if len(values) == 1 else Group("list", values)
            if is_text(self._tokens[low:high]):
                return read_text(self._tokens[low:high])
            items = _flatten(self._read_list_item(*bounds) for bounds in ranges)
            joining = {token.kind for token in self._tokens[low:high]} & {"or", "and"}
            return make_list(items, alternatives="or" in joining, conditions=joining == {"and"})
        finally:
            self._depth -= 1

    def _read_list_item(self, low: int, high: int) -> Value:
        """Read an item of a list; an item in braces is a set of one, unless TeX needs the braces for grouping."""
        item = self._read_item(low, high)
        braced = self._tokens[low].kind == "{" and self._match[low] == high - 1
        tex = braced and any(token.kind in ("over", "choose") for token in self._tokens[low:high])
        return Group("braces", (item,)) if braced and not tex else item

    def _strip_braces(self, low: int, high: int) -> tuple[int, int]:
        """Strip braces around the whole range, which are TeX grouping."""
        while high - low > 1 and self._tokens[low].kind == "{" and self._match[low] == high - 1:
            low, high = low + 1, high - 1
        return low, high

    def _split(self, low: int, high: int, kinds: frozenset[str]) -> list[tuple[int, int]]:
        """Return the non-empty ranges between separators outside of brackets."""
        ends = [*self._find_kinds(low, high, kinds), high]
        starts = [low, *(end + 1 for end in ends[:-1])]
        ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
        if len(ranges) > MAX_ITEMS:
            raise LimitError(f"more than {MAX_ITEMS} items")
        return ranges

    def _list_kinds(self, low: int, high: int, kinds: frozenset[str]) -> list[str]:
        return [self._tokens[at].kind for at in self._find_kinds(low, high, kinds)]

    def _find_kinds(self, at: int, high: int, kinds: frozenset[str]) -> Iterator[int]:
        while at < high:
            if self._tokens[at].kind in kinds:
                yield at
            at = self._match.get(at, at) + 1

    def _read_item(self, low: int, high: int) -> Value:
        try:
            return self._read_mathematics(low, high)
        except ParseError as fault:
            if isinstance(fault, LimitError) or not is_text(self._tokens[low:high]):
                raise
            return read_text(self._tokens[low:high])

    def _read_mathematics(self, low: int, high: int) -> Value:
        start = low
        low, high = self._strip_braces(low, high)
        if low >= high:
            raise MalformedError("nothing")
        if start < low and self._list_kinds(low, high, _SEPARATORS):
            return self._read_set(low, high)
        relations = self._list_kinds(low, high, _RELATIONS)
        if relations:
            return self._read_relation(low, high, relations)
        if self._list_kinds(low, high, _COLON):
            if any(token.kind in ("text", "word") or is_clock_part(token) for token in self._tokens[low:high]):
                return read_text(self._tokens[low:high])
            return Ratio(tuple(self._read_expression(*bounds) for bounds in self._split(low, high, _COLON)))
        operators = self._list_kinds(low, high, frozenset("∪∩∖"))
        if operators and not is_text(self._tokens[low:high]):
            return self._read_set_operation(low, high, operators)
        return self._read_operand(low, high)

    def _read_relation(self, low: int, high: int, signs: list[str]) -> Value:
        ranges = self._split(low, high, _RELATIONS)
        if len(ranges) == len(signs) == 1 and signs[0] == "≈":
            return self._read_mathematics(*ranges[0])
        if len(ranges) != len(signs) + 1:
            raise MalformedError("a relation without a side")
        if "≈" in signs:
            return self._read_approximation(ranges, signs)
        if signs == ["∈"]:
            return self._read_mathematics(*ranges[1])
        if "∈" in signs:
            raise UnsupportedError("a relation with ∈")
        relation = make_relation(tuple(signs), tuple(self._read_sides(ranges, signs)))
        return self._with_label(relation, ranges[0]) if isinstance(relation, Relation) else relation

    def _with_label(self, relation: Relation, bounds: tuple[int, int]) -> Relation:
        """Mark an equation whose first side may be a label."""
        first = self._tokens[slice(*bounds)]
        return relation._replace(named=find_label(first) is not None or has_function_application(first))

    def _read_sides(self, ranges: list[tuple[int, int]], signs: list[str]) -> Iterator[Value]:
        """Read the sides of a chain; for equal values, `x = 17 + 25 = 42`, one evaluated side suffices."""
        before, computed_flags = self._computed, list[bool]()
        for bounds in ranges:
            self._computed = False
            side = self._read_side(*bounds) if set(signs) == {"="} else self._read_mathematics(*bounds)
            if not is_name(side):
                computed_flags.append(self._computed)
            yield side
        self._computed = before or (all(computed_flags) if set(signs) == {"="} else any(computed_flags))

    def _read_side(self, low: int, high: int) -> Value:
        """Read one side of an equation, which may be a label."""
        name = find_label(self._tokens[low:high])
        return Text(name.text) if name is not None and name.certain else self._read_mathematics(low, high)

    def _read_approximation(self, ranges: list[tuple[int, int]], signs: list[str]) -> Value:
        """Read a chain with `≈`: after a value stands a rounded value, after a name the value itself."""
        cut = signs.index("≈")
        exact, rough = (self._read_side(*ranges[at]) for at in (cut, cut + 1))
        if cut == 0 and is_name(exact):
            return make_relation(("=",), (exact, rough))
        if differ_widely(exact, rough):
            raise MalformedError("two values that are not near each other")
        return self._read_mathematics(ranges[0][0], ranges[cut][1])

    def _read_set_operation(self, low: int, high: int, signs: list[str]) -> Value:
        operands = [self._read_mathematics(*bounds) for bounds in self._split(low, high, frozenset("∪∩∖"))]
        if len(operands) != len(signs) + 1 or "∩" in signs:
            raise UnsupportedError("a set operation")
        result, *others = map(as_union, operands)
        for sign, other in zip(signs, others, strict=True):
            if result is not None and other is not None:
                result = Union(result.parts + other.parts) if sign == "∪" else subtract_points(result, other)
            else:
                result = None
        if result is None:
            raise UnsupportedError("a set operation")
        return result

    def _read_operand(self, low: int, high: int) -> Value:  # noqa: PLR0911  one for each kind of value
        first = self._tokens[low]
        if first.kind == "∅" and high - low == 1:
            return Union(())
        if first.kind == "set" and high - low == 1:
            return Union((REALS,)) if first.text == "R" else Text(first.text)
        if is_text(self._tokens[low:high]):
            return read_text(self._tokens[low:high])
        if self._match.get(low) == high - 1:
            if first.kind == "begin":
                return self._read_matrix(low + 1, high - 1)
            if first.kind == r"\{":
                return self._read_set(low + 1, high - 1)
            if first.kind in ("(", "[") and self._tokens[low + 1].kind == "begin" and self._match[low + 1] == high - 2:
                return self._read_matrix(low + 2, high - 2)
            if first.kind == "[" and (rows := self._split_rows(low + 1, high - 1)):
                return self._make_matrix(rows)
            if first.kind in ("(", "[") and self._list_kinds(low + 1, high - 1, _COMMAS):
                return self._read_tuple(low, high)
            if first.kind == "(" and self._list_kinds(low + 1, high - 1, _RELATIONS):
                return self._read_mathematics(low + 1, high - 1)
        if has_altering_words(self._tokens[low:high]):
            return read_text(self._tokens[low:high])
        return self._read_based(low, high) or self._read_scalar(low, high)

    def _read_set(self, low: int, high: int) -> Value:
        if low == high:
            return Union(())
        if self._tokens[low].kind == "symbol" and (bars := self._list_kinds(low, high, frozenset({"|", ":"}))):
            condition = self._split(low, high, frozenset(bars[0]))[1:]
            if len(condition) == 1:
                return self._read_value(*condition[0])
        inside = self._read_value(low, high)
        if isinstance(inside, Group) and inside.kind == "list":
            return Group("set", inside.items)
        is_union = isinstance(inside, Union) and bool(self._list_kinds(low, high, _SEPARATORS))
        return inside if is_union else Group("set", (inside,))

    def _read_tuple(self, low: int, high: int) -> Value:
        opening, closing = self._tokens[low].kind, self._tokens[high - 1].kind
        ranges = self._split(low + 1, high - 1, _COMMAS)
        items = tuple(self._read_item(*bounds) for bounds in ranges)
        if (opening == "(") != (closing == ")"):
            ends = [item.expression for item in items if isinstance(item, Scalar)]
            if len(ends) != 2 or len(items) != 2:
                raise MalformedError("a bracket that does not match")
            return make_interval(ends[0], opening == "[", ends[1], closing == "]")
        return Group("tuple" if opening == "(" else "square", items)

    def _read_matrix(self, low: int, high: int) -> Value:
        rows = self._split(low, high, frozenset({"row"}))
        return self._make_matrix([self._split(*row, frozenset({"cell"})) for row in rows])

    def _split_rows(self, low: int, high: int) -> list[list[tuple[int, int]]]:
        """Return the cells of each row of `[[1,2],[3,4]]`; empty if the items are not rows."""
        rows = self._split(low, high, frozenset({","}))
        if not all(self._tokens[start].kind == "[" and self._match[start] == end - 1 for start, end in rows):
            return []
        cells = [self._split(start + 1, end - 1, frozenset({","})) for start, end in rows]
        return cells if len({len(row) for row in cells}) == 1 and cells[0] else []

    def _make_matrix(self, rows: list[list[tuple[int, int]]]) -> Matrix:
        if not rows or len({len(row) for row in rows}) != 1:
            raise MalformedError("a matrix whose rows differ in length")
        return Matrix(tuple(tuple(self._read_expression(*cell) for cell in row) for row in rows))

    def _read_based(self, low: int, high: int) -> Based | None:
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
        base = name if name.isdecimal() else str(words.parse_number(name) or "")
        if not base:
            return None
        sign = "-" if negative else ""
        return Based(sign + digits.upper(), int(base[:4]), _to_int(digits, int(base[:4]), negative=negative))

    def _read_expression(self, low: int, high: int) -> Expression:
        value = self._read_scalar(low, high)
        if value.suffix == "°":
            return self._builder.call("degrees", (value.expression,))
        return value.expression

    def _read_scalar(self, low: int, high: int) -> Scalar:
        scalar, parser = read_quantity(self._tokens[low:high], self._builder)
        self._computed = self._computed or parser.computed
        self._bare_log = self._bare_log or parser.bare_log
        return scalar


def _match_brackets(tokens: list[Token]) -> dict[int, int]:
    """Return the index of the closing bracket by that of the opening one; `[0,1)` is one pair."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for at, token in enumerate(tokens):
        if token.kind in _OPENING:
            opened.append(at)
        elif token.kind in _CLOSING:
            if token.kind == "]" and (at == 0 or tokens[at - 1].kind in _BEFORE_INTERVALS):
                raise UnsupportedError("an interval with its brackets turned round")
            if not opened or tokens[opened[-1]].kind not in _CLOSING[token.kind]:
                raise MalformedError("a closing bracket without an opening one")
            pairs[opened.pop()] = at
    if opened and tokens[-1].kind == "[":
        raise UnsupportedError("an interval with its brackets turned round")
    if opened:
        raise MalformedError("a bracket that is not closed")
    return pairs


def _to_int(digits: str, base: int, *, negative: bool) -> int | None:
    if not 2 <= base <= 36 or "." in digits:
        return None
    try:
        return int(digits, base) * (-1 if negative else 1)
    except ValueError:
        raise MalformedError(f"a digit that base {base} does not have") from None


def _flatten(items: Iterator[Value]) -> list[Value]:
    flat: list[Value] = []
    for item in items:
        flat += item.items if isinstance(item, Group) and item.kind == "list" else expand_plus_minus(item)
    return flat
