"""Notations of one answer: periods, empty delimiters, names before values, currencies, marks, braces, vectors."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.math.answers.comparison import Policies, judge

CASES = Path(__file__).parents[3] / "data" / "math" / "notation_cases.jsonl"

DIGITS = st.text("0123456789", min_size=1, max_size=6)
COLUMN = r"\begin{pmatrix}1\\2\end{pmatrix}"


def test_notations_are_judged_as_labelled_by_hand() -> None:
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    judged = [(case, judge(case["answer"], case["gold"]).verdict) for case in cases]
    assert [(case, verdict) for case, verdict in judged if verdict != case["verdict"]] == []


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{3}", r"0.\bar{3}"),
        (r"\frac{1}{3}", r"0.\overline{3}"),
        (r"\frac{1}{3}", r"0.\dot{3}"),
        (r"\frac{1}{3}", "0.3\N{COMBINING OVERLINE}"),
        (r"\frac{1}{3}", "0.(3)"),
        (r"\frac{1}{7}", r"0.\dot{1}4285\dot{7}"),
        ("0.75", r"\left.\frac{3}{4}\right."),
        ("5", r"\left.5\right."),
        ("3.5", r"\left.3.5\right."),
        ("5", "P(X=2)=5"),
        ("5", "|AB| = 5"),
        ("5", "USD 5"),
        ("5", r"\text{EUR } 5"),
        ("30", r"m\angle ABC = 30^\circ"),
        (".5", "The answer is .5"),
        ("12", r"\text{The area is } 12"),
        ("1011_2", r"1011_{\text{two}}"),
        ("1011_2", "1011 (base 2)"),
    ],
)
def test_an_answer_is_right_in_every_notation(gold: str, answer: str) -> None:
    assert judge(answer, gold).verdict == "yes"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "7*"),
        ("7", "7**"),
        ("7", "7..."),
        ("7", "7…"),
        ("7", r"7\ldots"),
        ("{1,2}", "{1},{2}"),
        (r"\{1,2\}", r"\{1\},\{2\}"),
        (r"\{1,2\}", r"\{\{1\},\{2\}\}"),
        ("0.5", r"\left.5\right."),
        ("0.6", r"0.1\bar{6}"),
        ("2", "P(X=2)"),
        ("5", "pq=6"),
        ("5", "|x|=5"),
        (r"\$5", "£5"),
        (r"\$5", "EUR 5"),
        ("5", "The answer is .5"),
        ("4,000", "4,,000"),
        ("7", "7 or"),
        ("7", r"7\right."),
    ],
)
def test_an_answer_that_only_resembles_the_gold_answer_is_wrong(gold: str, answer: str) -> None:
    assert judge(answer, gold).verdict == "no"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("9", r"\left.x^2\right|_{x=3}"),
        ("x^2", r"\left.x^2\right|_{x=3}"),
        (r"\frac{1}{3}", "0.333..."),
        (r"\frac{1}{6}", "0.1(6)"),
        ("7", "+-7"),
        ("5", "|z|=5"),
        ("33", "m+n=33"),
        ("1,2", "{1},{2}"),
        ("3", r"\bar{3}"),
        ("(7,2)", r"\left\{\begin{array}{l}x=7\\y=2\end{array}\right."),
        ("(2,3)", "]2,3["),
        (r"\$5", "CAD 5"),
    ],
)
def test_an_ambiguous_answer_is_undecided(gold: str, answer: str) -> None:
    assert judge(answer, gold).verdict == "unknown"


@given(st.integers(0, 999), st.text("0123456789", max_size=4), DIGITS)
def test_a_decimal_with_a_period_is_a_fraction(whole: int, before: str, period: str) -> None:
    places = 10 ** len(before)
    value = whole + Fraction(int(before or 0), places) + Fraction(int(period), (10 ** len(period) - 1) * places)
    gold = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    digits = f"{whole}.{before}"
    dotted = rf"\dot{{{period[0]}}}" + (rf"{period[1:-1]}\dot{{{period[-1]}}}" if len(period) > 1 else "")
    overlined = "".join(f"{digit}\N{COMBINING OVERLINE}" for digit in period)
    written = [rf"{digits}\overline{{{period}}}", rf"{digits}\bar{{{period}}}", digits + dotted, digits + overlined]
    for text in written:
        assert judge(text, gold) == ("yes", "exact", True)
        assert judge(f"-{text}", gold).verdict == ("yes" if value == 0 else "no")
        assert judge(rf"\left.x = {text}\right.", gold).verdict == "yes"
        assert judge(text, f"{value.numerator + 1}/{value.denominator}").verdict == "no"
    if int(period):
        assert judge(digits + period * 3, gold).verdict == "no"


@given(st.fractions(max_denominator=999, min_value=-999, max_value=999))
def test_empty_delimiters_change_nothing(value: Fraction) -> None:
    decimal = f"{float(value):.4f}"
    for text in (rf"\frac{{{value.numerator}}}{{{value.denominator}}}", f"{value.numerator}", decimal, f"x={decimal}"):
        assert judge(rf"\left.{text}\right.", text).verdict == "yes"
        assert judge(rf"\bigl. {text} \bigr.", text).verdict == "yes"
        assert judge(rf"\left.{text}\right|_{{x=1}}", text).verdict == "unknown"


NAMES = ["P(X=2)", r"P(A\mid B)", "|AB|", "f(3)", "f'(3)", r"(f\circ g)(3)", "E[X]", r"\gcd(4,6)", "[ABC]", "n(A)"]


@given(st.sampled_from(NAMES), st.fractions(max_denominator=99, min_value=-99, max_value=99))
def test_a_name_before_a_value_is_ignored(name: str, value: Fraction) -> None:
    gold, other = f"{value.numerator}/{value.denominator}", f"{value.numerator + 1}/{value.denominator}"
    assert judge(f"{name} = {gold}", gold).verdict == judge(f"{gold} = {name}", gold).verdict == "yes"
    assert judge(f"{name} = {gold}", other).verdict == "no"
    assert judge(name, gold).verdict != "yes"
    assert judge(f"{name} = {gold}", f"{name} = {gold}.").verdict == "yes"
    assert judge(f"{name} = {gold}", f"h(7) = {gold}").verdict == "no"


@given(st.integers(-(10**6), 10**6), st.sampled_from(["*", "**", "...", " ...", "…", r"\ldots", "^", "_", "="]))
def test_a_number_with_a_trailing_mark_differs_from_the_number(value: int, mark: str) -> None:
    assert judge(f"{value}{mark}", str(value)).verdict != "yes"
    assert judge(f"{mark}{value}", str(value)).verdict != "yes" or mark == "="
    assert judge(f"**{value}**", str(value)).verdict == "yes"


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True))
def test_several_sets_of_one_differ_from_a_set(items: list[int]) -> None:
    written = [str(item) for item in items]
    for gold in (rf"\{{{','.join(written)}\}}", f"{{{','.join(written)}}}"):
        assert judge(",".join(rf"\{{{item}\}}" for item in written), gold).verdict == "no"
        assert judge(",".join(f"{{{item}}}" for item in written), gold).verdict == "no"
        assert judge(rf"\{{{','.join(reversed(written))}\}}", gold).verdict == "yes"


def test_a_column_is_a_point_unless_the_policy_is_strict() -> None:
    strict = Policies(vector="strict")
    row = r"\begin{pmatrix}1&2\end{pmatrix}"
    for other in ("(1,2)", "[1,2]", r"\langle 1,2\rangle"):
        assert [judge(other, COLUMN, policies).verdict for policies in (Policies(), strict)] == ["yes", "no"]
        assert [judge(COLUMN, other, policies).verdict for policies in (Policies(), strict)] == ["yes", "no"]
        assert judge(other, row, strict).verdict == "no"
    for policies in (Policies(), strict):
        assert judge(r"\begin{bmatrix}1\\2\end{bmatrix}", COLUMN, policies).verdict == "yes"
        assert judge("[[1],[2]]", COLUMN, policies).verdict == "yes"
        assert judge(row, COLUMN, policies).verdict == "no"
        assert judge("(2,1)", COLUMN, policies).verdict == "no"
