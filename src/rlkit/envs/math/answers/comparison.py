"""Comparison of two answers by their types, then by exact and numeric comparison.

Invariant: `judge` never raises, and the lengths of the texts bound its work. Values of different types are equal only
by an explicit rule, so a list never equals a single value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from rlkit.envs.math.answers import numeric, sets
from rlkit.envs.math.answers.labels import may_name_the_same
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, ParseError
from rlkit.envs.math.answers.nodes import PI, Builder, Expression, Number
from rlkit.envs.math.answers.predicates import (
    find_named_value,
    has_braced_item,
    has_labels,
    is_collection,
    is_letter_product,
    is_set,
    is_unsolved,
    raw_text,
    sort_by_coordinate,
    sort_by_size,
    subtract_sides,
)
from rlkit.envs.math.answers.reader import Answer, parse_answer
from rlkit.envs.math.answers.relations import split_label
from rlkit.envs.math.answers.values import Based, Group, Matrix, Ratio, Relation, Scalar, Text, Value

type Verdict = Literal["yes", "no", "unknown"]
type Truth = bool | None

DEGREE, PERCENT = Number(Fraction(1, 180)), Number(Fraction(1, 100))

MAX_UNORDERED = 24
"""Limit of items in unordered comparison; longer lists are compared only if all items are real numbers."""


@dataclass(frozen=True)
class Policies:
    r"""Conventions of a grader; the defaults suit competition mathematics.

    Args:
        unevaluated: `accept` allows `2^{10}` and `1000+24` for `1024`; `reject` requires evaluated arithmetic, for
            tasks that test it. A fraction, a mixed number and `1.5\times 10^8` are literals.
        percent: `either` allows `25`, `25\%` and `0.25` for `25\%`, and `20\%` for `20` and for `0.2`; `strict` reads
            `25\%` as 0.25 only.
        degrees: `either` allows `90`, `90^\circ` and `\frac{\pi}{2}` for `90^\circ`; `strict` allows the angle only.
        base: `digits` allows `52` for `52_8`, since the question gives the base; `value` allows its value, 42.
        logarithm: base of `\log` without one: `ten`, `natural`, or `either`, whichever makes the answers equal.
        vector: `either` allows the point `(1,2)` and the list `[1,2]` for a column or a row of these numbers; `strict`
            requires a matrix for a matrix and a point for a point. A column is never a row; `[[1],[2]]` is a column.
    """

    unevaluated: Literal["accept", "reject"] = "accept"
    percent: Literal["either", "strict"] = "either"
    degrees: Literal["either", "strict"] = "either"
    base: Literal["digits", "value"] = "digits"
    logarithm: Literal["either", "ten", "natural"] = "either"
    vector: Literal["either", "strict"] = "either"


DEFAULT_POLICIES = Policies()


class Judgement(NamedTuple):
    """Verdict with its method.

    Args:
        method: `exact` for equal text, words or rational numbers; `numeric` for values compared at points or as floats;
            `monstrous` for an answer over a limit; `unparsed` for one that cannot be parsed.
    """

    verdict: Verdict
    method: Literal["exact", "numeric", "monstrous", "unparsed"]
    gold_read: bool = True


def judge(answer: str, gold: str, policies: Policies = DEFAULT_POLICIES) -> Judgement:  # noqa: PLR0911  one for each way to fail
    """Compare an answer with the gold one in this process; it never raises."""
    try:
        parsed_gold = parse_answer(gold)
    except ParseError:
        is_equal = bool(gold.strip()) and answer.strip() == gold.strip()
        return Judgement("yes" if is_equal else "unknown", "exact" if is_equal else "unparsed", gold_read=False)
    try:
        parsed = parse_answer(answer)
    except LimitError:
        return Judgement("no", "monstrous")
    except MalformedError:
        return Judgement("no", "unparsed")
    except ParseError:
        return Judgement("unknown", "unparsed")
    if answer.strip() == gold.strip():
        return Judgement("yes", "exact")
    if policies.unevaluated == "reject" and parsed.computed and not parsed_gold.computed:
        return Judgement("no", "exact")
    try:
        return _judge_parsed(parsed, parsed_gold, answer, gold, policies)
    except (LimitError, RecursionError):
        return Judgement("no", "monstrous")


def validate(gold: str) -> bool:
    """Tell whether a gold answer can be graded: it can be parsed, and its value, not only its text, equals itself."""
    try:
        parsed = parse_answer(gold)
        return _judge_parsed(parsed, parsed, gold, gold, DEFAULT_POLICIES).verdict == "yes"
    except (ParseError, RecursionError):  # also LimitError and MalformedError
        return False


def _judge_parsed(parsed: Answer, parsed_gold: Answer, answer: str, gold: str, policies: Policies) -> Judgement:
    comparison = _Comparison(policies, natural=policies.logarithm == "natural")
    truth = comparison.compare(parsed.value, parsed_gold.value)
    if truth is not True and policies.logarithm == "either" and parsed.bare_log != parsed_gold.bare_log:
        truth = _Comparison(policies, natural=True).compare(parsed.value, parsed_gold.value)
    if truth is not True and parsed.grouped != parsed_gold.grouped:
        truth = comparison.compare(_read_as_list(parsed, answer), _read_as_list(parsed_gold, gold)) or truth
    how = "numeric" if comparison.numeric else "exact"
    return Judgement("unknown" if truth is None else "yes" if truth else "no", how)


def _read_as_list(parsed: Answer, text: str) -> Value:
    """Return the value with `1,234` read as two numbers."""
    if not parsed.grouped:
        return parsed.value
    try:
        return parse_answer(text, thousands=False).value
    except ParseError:
        return parsed.value


def _conjunction(truths: Iterable[Truth]) -> Truth:
    result: Truth = True
    for truth in truths:
        if truth is False:
            return False
        result = result and truth
    return result


def _at_most_unknown(truth: Truth) -> Truth:
    return False if truth is False else None


class _Comparison:
    """Comparison of two values under policies; `numeric` tells whether it needed floats."""

    def __init__(self, policies: Policies, *, natural: bool) -> None:
        self.numeric = False
        self._policies = policies
        self._evaluate = numeric.Evaluator(natural=natural)

    def compare(self, answer: Value, gold: Value) -> Truth:
        """Compare two whole answers; None if undecided. A whole answer that is a set of one item equals that item."""
        match answer, gold:
            case Group("set", (item,)), _ if not is_collection(gold):
                return self._compare_values(item, gold)
            case _, Group("set", (item,)) if not is_collection(answer):
                return self._compare_values(answer, item)
            case Relation(), _ if not isinstance(gold, Relation):
                if is_unsolved(answer) and sets.as_union(gold) is not None:
                    return None
                if (value := find_named_value(answer)) is not None:
                    return _at_most_unknown(self._compare_values(value, gold))
            case _:
                pass
        return self._compare_values(answer, gold)

    def _compare_values(self, answer: Value, gold: Value) -> Truth:  # noqa: PLR0911, PLR0912  one for each pair of types
        """Compare two values, which may be items of larger ones; None if undecided."""
        if isinstance(answer, Relation) and isinstance(gold, Relation):
            left, right = split_label(answer), split_label(gold)
            if left is None or right is None or not may_name_the_same(left.label, right.label):
                return self._compare_relations(answer, gold)
            truth = self.compare(left.value, right.value)
            return truth if left.label == right.label or truth is False else None
        for left, right in ((answer, gold), (gold, answer)):
            if (named := split_label(left)) is not None and not isinstance(right, Relation):
                return self.compare(named.value, right)
        if isinstance(answer, Text) or isinstance(gold, Text):
            return raw_text(answer) == raw_text(gold) != ""
        if any(is_set(value) for value in (answer, gold)):
            return self._compare_sets(answer, gold)
        match answer, gold:
            case Scalar(), Scalar():
                return self._compare_scalars(answer, gold)
            case Group(first), Group(second) if first == second == "braces" or {first, second} == {"braces", "set"}:
                return self._compare_groups(answer._replace(kind="set"), gold._replace(kind="set"))
            case Group(first), Group(second) if "braces" not in (first, second):
                return self._compare_groups(answer, gold)
            case (Group("braces", (item,)), right) | (right, Group("braces", (item,))):
                return _at_most_unknown(self._compare_values(item, right))
            case Matrix(rows), Matrix(gold_rows):
                return [len(row) for row in rows] == [len(row) for row in gold_rows] and _conjunction(
                    self._compare_expressions(left, right)
                    for row, gold_row in zip(rows, gold_rows, strict=True)
                    for left, right in zip(row, gold_row, strict=True)
                )
            case (Matrix(rows), Group("tuple" | "square", items)) | (Group("tuple" | "square", items), Matrix(rows)):
                return self._compare_vector(rows, items)
            case Ratio(terms), Ratio(gold_terms):
                return self._compare_ratios(terms, gold_terms)
            case (Ratio((first, second)), Scalar(value, "", None)) | (Scalar(value, "", None), Ratio((first, second))):
                return self._compare_expressions(first, Builder().multiply((value, second)))
            case Based(), Based():
                return answer == gold or (answer.value is not None and answer.value == gold.value)
            case Scalar(), Based():
                return self._compare_based(answer, gold)
            case _:
                return False

    def _compare_expressions(self, left: Expression, right: Expression) -> Truth:
        if left == right:
            return True
        if not (isinstance(left, Number) and isinstance(right, Number)):
            self.numeric = True
        return numeric.compare_expressions(left, right, self._evaluate)

    def _compare_scalars(self, answer: Scalar, gold: Scalar) -> Truth:
        if answer.raw and answer.raw == gold.raw and is_letter_product(answer) and is_letter_product(gold):
            return True
        truth = self._compare_measures(answer, gold)
        if truth is True:
            return True
        for scalar, other_scalar in ((answer, gold), (gold, answer)):
            if scalar.loose is not None and not numeric.find_variables(other_scalar.expression):
                return self._compare_measures(scalar.loose, other_scalar)
        return truth

    def _compare_measures(self, answer: Scalar, gold: Scalar) -> Truth:
        """Compare values with their units, percent and degree signs."""
        left, right = answer.expression, gold.expression
        builder = Builder()
        unit, gold_unit = (None, None) if words.are_pounds(answer.unit, gold.unit) else (answer.unit, gold.unit)
        if unit is not None and gold_unit is not None and unit != gold_unit:
            if (dimensions := words.compare_dimensions(unit, gold_unit)) is not True:
                return dimensions if dimensions is False else _at_most_unknown(self._compare_expressions(left, right))
            left = builder.multiply((left, Number(unit.factor / gold_unit.factor)))
        if answer.suffix == gold.suffix:
            return self._compare_expressions(left, right)
        suffix = answer.suffix or gold.suffix
        in_radians = suffix == "°" and words.UNITS["radian"] in (unit, gold_unit)
        if (answer.suffix or answer.unit) and (gold.suffix or gold.unit) and not in_radians:
            return False
        policy = self._policies.percent if suffix == "%" else self._policies.degrees
        if policy == "either" and not in_radians and (truth := self._compare_expressions(left, right)) is not False:
            return truth
        factor = PERCENT if suffix == "%" else builder.multiply((DEGREE, PI))
        if answer.suffix:
            return self._compare_expressions(builder.multiply((left, factor)), right)
        return self._compare_expressions(left, builder.multiply((right, factor)))

    def _compare_groups(self, answer: Group, gold: Group) -> Truth:
        """Compare two groups.

        Order matters if one of them is in brackets. Duplicates in a set are ignored. A set never equals a tuple; a list
        without brackets equals a tuple only with labels: `x=1, y=2`. Two numbers in square brackets are an interval.
        """
        kinds = {answer.kind, gold.kind}
        items, gold_items = answer.items, gold.items
        if kinds == {"list", "tuple"}:
            items, gold_items = sort_by_coordinate(answer), sort_by_coordinate(gold)
        if "set" in kinds:
            if kinds & {"tuple", "square"} or has_braced_item(answer) or has_braced_item(gold):
                return False
            return self._compare_unordered(self._drop_duplicates(items), self._drop_duplicates(gold_items))
        if kinds == {"list"}:
            return self._compare_unordered(items, gold_items)
        if "list" in kinds and "tuple" in kinds and not (has_labels(answer) or has_labels(gold)):
            return False
        if len(items) != len(gold_items) or (len(kinds) > 1 and "square" in kinds and len(items) == 2):
            return False
        return _conjunction(map(self._compare_values, items, gold_items))

    def _drop_duplicates(self, items: Sequence[Value]) -> Sequence[Value]:
        distinct: list[Value] = []
        for item in items[:MAX_UNORDERED]:
            if not any(self._compare_values(item, previous) for previous in distinct):
                distinct.append(item)
        return [*distinct, *items[MAX_UNORDERED:]]

    def _compare_unordered(self, items: Sequence[Value], gold_items: Sequence[Value]) -> Truth:
        """Compare lists without regard to order: real numbers after sorting, other values by search."""
        if len(items) != len(gold_items):
            return False
        ordered, gold_ordered = sort_by_size(items), sort_by_size(gold_items)
        if ordered is not None and gold_ordered is not None:
            return _conjunction(map(self._compare_values, ordered, gold_ordered))
        if len(items) > MAX_UNORDERED:
            return None
        remaining = list(gold_items)
        is_uncertain = False
        for item in items:
            truths = [self._compare_values(item, candidate) for candidate in remaining]
            if True in truths:
                remaining.pop(truths.index(True))
            elif None in truths:
                is_uncertain = True
            else:
                return False
        return None if is_uncertain else True

    def _compare_vector(self, rows: Sequence[Sequence[Expression]], items: Sequence[Value]) -> Truth:
        """Compare a matrix with its rows in brackets or, if the policy allows it, a row or column with a tuple."""
        bracketed = [item.items for item in items if isinstance(item, Group) and item.kind in ("tuple", "square")]
        if len(bracketed) == len(items):
            return len(bracketed) == len(rows) and _conjunction(map(self._compare_cells, rows, bracketed))
        if self._policies.vector == "strict" or (len(rows) > 1 and len(rows[0]) > 1):
            return False
        return self._compare_cells([cell for row in rows for cell in row], items)

    def _compare_cells(self, cells: Sequence[Expression], items: Sequence[Value]) -> Truth:
        return len(cells) == len(items) and _conjunction(map(self._compare_values, map(Scalar, cells), items))

    def _compare_ratios(self, terms: Sequence[Expression], gold_terms: Sequence[Expression]) -> Truth:
        builder = Builder()
        return len(terms) == len(gold_terms) and _conjunction(
            self._compare_expressions(builder.multiply((term, gold_terms[0])), builder.multiply((gold_term, terms[0])))
            for term, gold_term in zip(terms[1:], gold_terms[1:], strict=True)
        )

    def _compare_based(self, answer: Scalar, gold: Based) -> Truth:
        """Compare a number without a base with a gold answer that has one; the question may name the base."""
        if self._policies.base == "digits":
            return answer.raw.upper() == gold.digits
        return gold.value is not None and answer.expression == Number(Fraction(gold.value))

    def _compare_sets(self, answer: Value, gold: Value) -> Truth:
        left, right = sets.as_union(answer), sets.as_union(gold)
        if left is None or right is None:
            return False
        self.numeric = True
        return sets.compare_unions(left, right, self._evaluate)

    def _compare_relations(self, answer: Relation, gold: Relation) -> Truth:
        solutions, gold_solutions = sets.solve(answer), sets.solve(gold)
        if solutions is not None and gold_solutions is not None:
            if sets.find_variable(answer) != sets.find_variable(gold):
                return False
            return sets.compare_unions(solutions, gold_solutions, self._evaluate)
        difference, gold_difference = subtract_sides(answer), subtract_sides(gold)
        if difference is not None and gold_difference is not None and difference[0] == gold_difference[0]:
            self.numeric = True
            ratio = numeric.find_constant_ratio(difference[1], gold_difference[1], self._evaluate)
            return ratio is not None and (ratio > 0 or difference[0] in ("=", "≠"))
        if len(answer.sides) != len(gold.sides):
            return False
        return any(
            reading.signs == gold.signs and _conjunction(map(self._compare_values, reading.sides, gold.sides))
            for reading in (answer, sets.flip(answer))
        )
