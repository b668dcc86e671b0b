from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError
from rlkit.envs.math.answers.nodes import Builder, Call, Number, Symbol, make_integer

SMALL = st.fractions(min_value=-50, max_value=50, max_denominator=50)


@given(SMALL, SMALL, st.integers(-6, 6))
def test_rational_arithmetic_is_exact(left: Fraction, right: Fraction, power: int) -> None:
    builder = Builder()
    left_number, right_number = Number(left), Number(right)
    assert builder.add((left_number, right_number)) == Number(left + right)
    assert builder.multiply((left_number, right_number)) == Number(left * right)
    if right:
        assert builder.divide(left_number, right_number) == Number(left / right)
        assert builder.power(right_number, make_integer(power)) == (Number(right**power) if right else left_number)


@given(st.fractions(min_value=0, max_value=1000, max_denominator=1000), st.integers(2, 7))
def test_a_rational_root_is_found(root: Fraction, degree: int) -> None:
    assert Builder().power(Number(root**degree), Number(Fraction(1, degree))) == Number(root)


def test_an_irrational_root_stays_symbolic() -> None:
    half = Number(Fraction(1, 2))
    assert Builder().power(make_integer(2), half) == Call("^", (make_integer(2), half))


def test_a_power_that_is_too_large_stays_symbolic() -> None:
    numbers = make_integer(10), make_integer(10**10)
    assert Builder().power(*numbers) == Call("^", numbers)
    assert Builder().call("factorial", (make_integer(10**6),)) == Call("factorial", (make_integer(10**6),))


def test_an_undefined_expression_is_malformed() -> None:
    for name, arguments in (("factorial", (-1,)), ("binomial", (3, -1)), ("mod", (3, 0))):
        with pytest.raises(MalformedError):
            Builder().call(name, tuple(make_integer(argument) for argument in arguments))
    with pytest.raises(MalformedError):
        Builder().divide(Symbol("x"), make_integer(0))


def test_exact_arithmetic_stops_at_its_limits() -> None:
    builder = Builder()
    with pytest.raises(LimitError):
        for _ in range(100):
            builder.call("factorial", (make_integer(2000),))
