"""Expressions, and the arithmetic that is done exactly while they are built.

Invariant: building an expression takes a bounded amount of work, whatever is written; a rational value is a `Number`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Literal, NamedTuple

from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous

type Expression = Number | Symbol | Sum | Product | Power | Call

EXACT_BITS = 24_576
"""A number of more bits is not computed."""

WORK = 400_000
"""Limit on the work for one text; a product of numbers of a and b bits counts as a·b / 4096, and a factorial of b bits
as b² / 4096."""

MAX_FACTORIAL = 2_500
MAX_BINOMIAL = 1_000_000
MAX_CHOSEN = 1_000
MAX_ROOT_BITS = 512
MAX_ROOT = 64


class Number(NamedTuple):
    """An exact rational number."""

    value: Fraction


class Symbol(NamedTuple):
    """A variable, or one of the constants `π`, `e`, `i`; `∞` and `±` are symbols as well."""

    name: str


class Sum(NamedTuple):
    """At least two terms."""

    terms: tuple[Expression, ...]


class Product(NamedTuple):
    """At least two factors.

    Args:
        sign: always the same. Named tuples are equal where their items are, so that without it `x+y` would be `xy`.
    """

    factors: tuple[Expression, ...]
    sign: Literal["*"] = "*"


class Power(NamedTuple):
    """A base and an exponent; `1/x` is `x` to the power of −1."""

    base: Expression
    exponent: Expression


class Call(NamedTuple):
    """A function of one or two arguments; `numeric` knows their names."""

    name: str
    arguments: tuple[Expression, ...]


ZERO, ONE, MINUS_ONE, HALF = Number(Fraction(0)), Number(Fraction(1)), Number(Fraction(-1)), Number(Fraction(1, 2))
INFINITY, PI, PLUS_MINUS = Symbol("∞"), Symbol("π"), Symbol("±")


def number(value: int) -> Number:
    """The integer as an expression."""
    return Number(Fraction(value))


class Builder:
    """Builds expressions, does their exact arithmetic, and stops when it is too much.

    Raises:
        Monstrous: more work than `WORK`, from any of the methods.
    """

    def __init__(self) -> None:
        self._left = WORK

    def add(self, terms: Iterable[Expression]) -> Expression:
        """The sum; its rational terms become one."""
        total: Fraction | None = None
        rest: list[Expression] = []
        for term in terms:
            if isinstance(term, Number):
                total = term.value if total is None else self._worth(total, term.value, Fraction.__add__)
            elif isinstance(term, Sum):
                rest.extend(term.terms)
            else:
                rest.append(term)
        if total is not None and (total or not rest):
            rest.append(Number(total))
        return rest[0] if len(rest) == 1 else Sum(tuple(rest))

    def multiply(self, factors: Iterable[Expression]) -> Expression:
        """The product; its rational factors become one, the first."""
        total = Fraction(1)
        rest: list[Expression] = []
        for factor in factors:
            if isinstance(factor, Number):
                total = factor.value if total == 1 else self._worth(total, factor.value, Fraction.__mul__)
            elif isinstance(factor, Product):
                inner = factor.factors
                if isinstance(inner[0], Number):
                    total = self._worth(total, inner[0].value, Fraction.__mul__)
                    inner = inner[1:]
                rest.extend(inner)
            else:
                rest.append(factor)
        if not rest:
            return Number(total)
        if total != 1:
            rest.insert(0, Number(total))
        return rest[0] if len(rest) == 1 else Product(tuple(rest))

    def negate(self, value: Expression) -> Expression:
        """The value times −1."""
        return Number(-value.value) if isinstance(value, Number) else self.multiply((MINUS_ONE, value))

    def divide(self, above: Expression, below: Expression) -> Expression:
        """Return the quotient, or raise `Malformed` where `below` is zero."""
        return self.multiply((above, self.power(below, MINUS_ONE)))

    def power(self, base: Expression, exponent: Expression) -> Expression:
        """The power; a rational one is computed where it is not too large, and stays as it is written where it is.

        Raises:
            Malformed: zero to the power of a number that is not positive.
        """
        if exponent == ONE:
            return base
        if isinstance(base, Number) and isinstance(exponent, Number):
            return self._number_power(base.value, exponent.value)
        return Power(base, exponent)

    def call(self, name: str, arguments: tuple[Expression, ...]) -> Expression:
        """Return a function's value where it is exact, and else the call; raise `Malformed` where it is not defined."""
        exact: Fraction | None = None
        match arguments:
            case (Number(value),) if name in _EXACT_OF_ONE:
                exact = _EXACT_OF_ONE[name](value)
            case (Number(first), Number(second)) if name in _EXACT_OF_TWO:
                exact = _EXACT_OF_TWO[name](first, second)
            case _:
                pass
        if exact is not None:
            self._spend(_bits(exact) ** 2 // 4096)
            return Number(exact)
        return Call(name, arguments)

    def _number_power(self, base: Fraction, exponent: Fraction) -> Expression:
        if base == 0 and exponent <= 0:
            raise Malformed("a division by zero")
        if base in (0, 1):
            return Number(base)
        if exponent.denominator != 1:
            root = _root(base, exponent.denominator)
            if root is None:
                return Power(Number(base), Number(exponent))
            base, exponent = root, Fraction(exponent.numerator)
            if base in (0, 1):
                return Number(base)
        if base == -1:
            return Number(Fraction(-1 if exponent.numerator % 2 else 1))
        bits = _bits(base) * abs(exponent.numerator)
        if bits > EXACT_BITS:
            return Power(Number(base), Number(exponent))
        self._spend(bits if abs(exponent.numerator) == 1 else bits * bits // 4096)
        return Number(base**exponent.numerator)

    def _worth(self, left: Fraction, right: Fraction, operation: Callable[[Fraction, Fraction], Fraction]) -> Fraction:
        self._spend(_bits(left) * _bits(right) // 4096)
        return operation(left, right)

    def _spend(self, work: int) -> None:
        self._left -= work + 1
        if self._left < 0:
            raise Monstrous("more exact arithmetic than one answer may need")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _root(value: Fraction, degree: int) -> Fraction | None:
    """The rational root of the degree, where there is one; that of a negative number only for odd degrees."""
    if _bits(value) > MAX_ROOT_BITS or degree > MAX_ROOT or (value < 0 and degree % 2 == 0):
        return None
    above, below = _integer_root(abs(value.numerator), degree), _integer_root(value.denominator, degree)
    if above is None or below is None:
        return None
    return Fraction(above if value >= 0 else -above, below)


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // degree)
        while (better := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:  # Newton, from above
            root = better
    return root if root**degree == value else None


def _factorial(value: Fraction, *, step: int) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        raise Malformed("a factorial of what is no natural number")
    return Fraction(math.prod(range(int(value), 0, -step))) if value <= MAX_FACTORIAL else None


def _binomial(above: Fraction, below: Fraction) -> Fraction | None:
    if above.denominator != 1 or below.denominator != 1 or min(above, below) < 0:
        raise Malformed("a binomial of what are no natural numbers")
    if above > MAX_BINOMIAL or min(below, abs(above - below)) > MAX_CHOSEN:
        return None
    return Fraction(math.comb(int(above), int(below)))


def _mod(value: Fraction, modulus: Fraction) -> Fraction:
    if modulus == 0:
        raise Malformed("a division by zero")
    return value % modulus


_EXACT_OF_ONE: dict[str, Callable[[Fraction], Fraction | None]] = {
    "factorial": partial(_factorial, step=1),
    "double factorial": partial(_factorial, step=2),
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}
_EXACT_OF_TWO: dict[str, Callable[[Fraction, Fraction], Fraction | None]] = {"binomial": _binomial, "mod": _mod}
