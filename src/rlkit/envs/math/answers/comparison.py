"""Whether two answers are the same: decided by their types, then by exact and numeric comparison.

Invariant: `judge` never raises, and its work is bounded by the lengths of the texts; a type never equals another by
accident, so that a list earns nothing where one value is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from rlkit.envs.math.answers import numeric, sets
from rlkit.envs.math.answers.labels import may_be_one
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous, NotAnAnswer
from rlkit.envs.math.answers.nodes import PI, Builder, Expression, Number
from rlkit.envs.math.answers.policies import DEFAULT, Policies
from rlkit.envs.math.answers.predicates import (
    by_coordinate,
    difference,
    has_labels,
    in_order,
    is_collection,
    is_letters,
    is_set,
    is_unsolved,
    lists_braces,
    named_value,
    raw_text,
)
from rlkit.envs.math.answers.reader import Answer, read
from rlkit.envs.math.answers.relations import flipped, labelled
from rlkit.envs.math.answers.values import Based, Group, Matrix, Ratio, Relation, Scalar, Text, Value

type Verdict = Literal["yes", "no", "unknown"]
type Truth = bool | None

DEGREE, PERCENT = Number(Fraction(1, 180)), Number(Fraction(1, 100))

MAX_UNORDERED = 24
"""More items than this are compared in the order of their values only, which must then be real numbers."""


class Judgement(NamedTuple):
    """A verdict, and what it rests on.

    Args:
        how: `exact` for the same text, words or rational numbers; `numeric` where values were compared at points or as
            floats; `monstrous` for an answer over a limit; `unparsed` for one that has no meaning, or none known here.
    """

    verdict: Verdict
    how: Literal["exact", "numeric", "monstrous", "unparsed"]
    gold_read: bool = True


def judge(answer: str, gold: str, policies: Policies = DEFAULT) -> Judgement:  # noqa: PLR0911  one for each way to fail
    """Whether an answer is the gold one, without another process; it never raises."""
    try:
        wanted = read(gold)
    except NotAnAnswer:
        same = bool(gold.strip()) and answer.strip() == gold.strip()
        return Judgement("yes" if same else "unknown", "exact" if same else "unparsed", gold_read=False)
    try:
        given = read(answer)
    except Monstrous:
        return Judgement("no", "monstrous")
    except Malformed:
        return Judgement("no", "unparsed")
    except NotAnAnswer:
        return Judgement("unknown", "unparsed")
    if answer.strip() == gold.strip():
        return Judgement("yes", "exact")
    if policies.unevaluated == "reject" and given.computed and not wanted.computed:
        return Judgement("no", "exact")
    try:
        return _judged(given, wanted, answer, gold, policies)
    except (Monstrous, RecursionError):
        return Judgement("no", "monstrous")


def equals_itself(gold: str, policies: Policies = DEFAULT) -> bool:
    """Whether an answer can be read, and what was read is found equal to itself: by comparing, not by its text."""
    try:
        wanted = read(gold)
        return _judged(wanted, wanted, gold, gold, policies).verdict == "yes"
    except (NotAnAnswer, RecursionError):  # what is monstrous or malformed is none either
        return False


def _judged(given: Answer, wanted: Answer, answer: str, gold: str, policies: Policies) -> Judgement:
    comparison = _Comparison(policies, natural=policies.logarithm == "natural")
    truth = comparison.same(given.value, wanted.value)
    if truth is not True and policies.logarithm == "either" and given.bare_log != wanted.bare_log:
        truth = _Comparison(policies, natural=True).same(given.value, wanted.value)
    if truth is not True and given.grouped != wanted.grouped:
        truth = comparison.same(_as_list(given, answer), _as_list(wanted, gold)) or truth
    how = "numeric" if comparison.numeric else "exact"
    return Judgement("unknown" if truth is None else "yes" if truth else "no", how)


def _as_list(found: Answer, text: str) -> Value:
    """The value with `1,234` read as two numbers."""
    if not found.grouped:
        return found.value
    try:
        return read(text, thousands=False).value
    except NotAnAnswer:
        return found.value


def _all(truths: Iterable[Truth]) -> Truth:
    result: Truth = True
    for truth in truths:
        if truth is False:
            return False
        result = result and truth
    return result


class _Comparison:
    """The comparison of two values under policies; remembers whether it needed floats."""

    def __init__(self, policies: Policies, *, natural: bool) -> None:
        self.numeric = False
        self._policies = policies
        self._evaluate = numeric.Evaluator(natural=natural)

    def same(self, given: Value, wanted: Value) -> Truth:
        """Whether two answers are the same; None where that cannot be told. A set of one is that one, as an answer."""
        for one, other in ((given, wanted), (wanted, given)):
            if isinstance(one, Group) and one.kind == "set" and len(one.items) == 1 and not is_collection(other):
                return self._same(one.items[0], other) if one is given else self._same(other, one.items[0])
        if is_unsolved(given) and not isinstance(wanted, Relation) and sets.as_union(wanted) is not None:
            return None
        side = named_value(given) if isinstance(given, Relation) and not isinstance(wanted, Relation) else None
        if side is not None:
            return None if self._same(side, wanted) is not False else False
        return self._same(given, wanted)

    def _same(self, given: Value, wanted: Value) -> Truth:  # noqa: PLR0911, PLR0912  one for each pair of types
        """Whether two values are the same, also within others."""
        if isinstance(given, Relation) and isinstance(wanted, Relation):
            one, other = labelled(given), labelled(wanted)
            if one is None or other is None or not may_be_one(one.label, other.label):
                return self._relations(given, wanted)
            truth = self.same(one.value, other.value)
            return truth if one.label == other.label or truth is False else None
        for one, other in ((given, wanted), (wanted, given)):
            if (found := labelled(one)) is not None and not isinstance(other, Relation):
                return self.same(found.value, other)
        if isinstance(given, Text) or isinstance(wanted, Text):
            return raw_text(given) == raw_text(wanted) != ""
        if any(is_set(value) for value in (given, wanted)):
            return self._sets(given, wanted)
        match given, wanted:
            case Scalar(), Scalar():
                return self._scalars(given, wanted)
            case Group(first), Group(second) if first == second == "braces" or {first, second} == {"braces", "set"}:
                return self._groups(given._replace(kind="set"), wanted._replace(kind="set"))
            case Group(first), Group(second) if "braces" not in (first, second):
                return self._groups(given, wanted)
            case (Group("braces", (item,)), other) | (other, Group("braces", (item,))):
                return None if self._same(item, other) is not False else False
            case Matrix(rows), Matrix(others):
                return [len(row) for row in rows] == [len(row) for row in others] and _all(
                    self._equal(one, other)
                    for row, other_row in zip(rows, others, strict=True)
                    for one, other in zip(row, other_row, strict=True)
                )
            case (Matrix(rows), Group("tuple" | "square", items)) | (Group("tuple" | "square", items), Matrix(rows)):
                return self._vector(rows, items)
            case Ratio(terms), Ratio(others):
                return self._proportional(terms, others)
            case (Ratio((above, below)), Scalar(value, "", None)) | (Scalar(value, "", None), Ratio((above, below))):
                return self._equal(above, Builder().multiply((value, below)))
            case Based(), Based():
                return given == wanted or (given.value is not None and given.value == wanted.value)
            case Scalar(), Based():
                return self._based(given, wanted)
            case _:
                return False

    def _equal(self, left: Expression, right: Expression) -> Truth:
        if left == right:
            return True
        if not (isinstance(left, Number) and isinstance(right, Number)):
            self.numeric = True
        return numeric.equal(left, right, self._evaluate)

    def _scalars(self, given: Scalar, wanted: Scalar) -> Truth:
        if given.raw and given.raw == wanted.raw and is_letters(given) and is_letters(wanted):
            return True
        truth = self._measured(given, wanted)
        if truth is True:
            return True
        for one, other in ((given, wanted), (wanted, given)):
            if one.loose is not None and not numeric.variables(other.expression):
                return self._measured(one.loose, other)
        return truth

    def _measured(self, given: Scalar, wanted: Scalar) -> Truth:  # noqa: PLR0911  one for each way to measure
        """By their units, percent and degree signs."""
        left, right = given.expression, wanted.expression
        builder = Builder()
        one, other = (None, None) if words.are_pounds(given.unit, wanted.unit) else (given.unit, wanted.unit)
        if one is not None and other is not None and one != other:
            if (alike := words.alike(one, other)) is not True:
                return alike if alike is False or self._equal(left, right) is not False else False
            left = builder.multiply((left, Number(one.factor / other.factor)))
        if given.suffix == wanted.suffix:
            return self._equal(left, right)
        for measure, suffix in ((one, wanted.suffix), (other, given.suffix)):
            if measure is not None and measure.dimension == "radians" and suffix == "°":
                return self._in_degrees(given, wanted)
        if (given.suffix or given.unit) and (wanted.suffix or wanted.unit):
            return False
        suffix = given.suffix or wanted.suffix
        lenient = self._policies.percent if suffix == "%" else self._policies.degrees
        if lenient == "either" and (truth := self._equal(left, right)) is not False:
            return truth
        meant = PERCENT if suffix == "%" else builder.multiply((DEGREE, PI))
        if given.suffix:
            return self._equal(builder.multiply((left, meant)), right)
        return self._equal(left, builder.multiply((right, meant)))

    def _in_degrees(self, given: Scalar, wanted: Scalar) -> Truth:
        """Two angles of which one is in degrees and the other in radians."""
        builder = Builder()
        left, right = (
            builder.multiply((angle.expression, DEGREE, PI)) if angle.suffix else angle.expression
            for angle in (given, wanted)
        )
        return self._equal(left, right)

    def _groups(self, given: Group, wanted: Group) -> Truth:
        """Order matters where one is in brackets; a set has each item once, and is no tuple; nor is a bare list, unless
        it says `x=1, y=2`; two numbers in square brackets are an interval."""
        kinds = {given.kind, wanted.kind}
        ones, others = given.items, wanted.items
        if kinds == {"list", "tuple"}:
            ones, others = by_coordinate(given), by_coordinate(wanted)
        if "set" in kinds:
            if kinds & {"tuple", "square"} or lists_braces(given) or lists_braces(wanted):
                return False
            return self._unordered(self._distinct(ones), self._distinct(others))
        if kinds == {"list"}:
            return self._unordered(ones, others)
        if "list" in kinds and "tuple" in kinds and not (has_labels(given) or has_labels(wanted)):
            return False
        if len(ones) != len(others) or (len(kinds) > 1 and "square" in kinds and len(ones) == 2):
            return False
        return _all(self._same(one, other) for one, other in zip(ones, others, strict=True))

    def _distinct(self, items: Sequence[Value]) -> Sequence[Value]:
        found: list[Value] = []
        for item in items[:MAX_UNORDERED]:
            if not any(self._same(item, other) for other in found):
                found.append(item)
        return [*found, *items[MAX_UNORDERED:]]

    def _unordered(self, ones: Sequence[Value], others: Sequence[Value]) -> Truth:
        """Real numbers are put in order first; other values are looked for one by one."""
        if len(ones) != len(others):
            return False
        left, right = in_order(ones), in_order(others)
        if left is not None and right is not None:
            return _all(self._same(one, other) for one, other in zip(left, right, strict=True))
        if len(ones) > MAX_UNORDERED:
            return None
        remaining = list(others)
        unsure = False
        for one in ones:
            truths = [self._same(one, other) for other in remaining]
            if True in truths:
                remaining.pop(truths.index(True))
            elif None in truths:
                unsure = True
            else:
                return False
        return None if unsure else True

    def _vector(self, rows: Sequence[Sequence[Expression]], items: Sequence[Value]) -> Truth:
        """A matrix and the brackets of its rows; or, where the policy allows it, one row or column and a tuple."""
        parts = [item.items for item in items if isinstance(item, Group) and item.kind in ("tuple", "square")]
        if len(parts) == len(items):
            return len(parts) == len(rows) and _all(map(self._cells, rows, parts))
        if self._policies.vector == "strict" or (len(rows) > 1 and len(rows[0]) > 1):
            return False
        return self._cells([cell for row in rows for cell in row], items)

    def _cells(self, cells: Sequence[Expression], items: Sequence[Value]) -> Truth:
        if len(cells) != len(items):
            return False
        return _all(self._same(Scalar(cell), item) for cell, item in zip(cells, items, strict=True))

    def _proportional(self, terms: Sequence[Expression], others: Sequence[Expression]) -> Truth:
        builder = Builder()
        return len(terms) == len(others) and _all(
            self._equal(builder.multiply((term, others[0])), builder.multiply((other, terms[0])))
            for term, other in zip(terms[1:], others[1:], strict=True)
        )

    def _based(self, given: Scalar, wanted: Based) -> Truth:
        """The question names the base, so that an answer need not; without a question to name it, `40_9` is not 40."""
        if self._policies.base == "digits":
            return given.raw.upper() == wanted.digits
        return wanted.value is not None and given.expression == Number(Fraction(wanted.value))

    def _sets(self, given: Value, wanted: Value) -> Truth:
        one, other = sets.as_union(given), sets.as_union(wanted)
        if one is None or other is None:
            return False
        self.numeric = True
        return sets.same(one, other, self._evaluate)

    def _relations(self, given: Relation, wanted: Relation) -> Truth:
        one, other = sets.solutions(given), sets.solutions(wanted)
        if one is not None and other is not None:
            return sets.variable(given) == sets.variable(wanted) and sets.same(one, other, self._evaluate)
        left, right = difference(given), difference(wanted)
        if left is not None and right is not None and left[0] == right[0]:
            self.numeric = True
            ratio = numeric.ratio(left[1], right[1], self._evaluate)
            return ratio is not None and (ratio > 0 or left[0] in ("=", "≠"))
        if len(given.sides) != len(wanted.sides):
            return False
        return any(
            read_so.signs == wanted.signs
            and _all(self._same(one, other) for one, other in zip(read_so.sides, wanted.sides, strict=True))
            for read_so in (given, flipped(given))
        )
