"""Expression trees, with exact arithmetic while they are built.

Invariant: building an expression takes bounded work for any text; a rational value is a `Number`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError

type Expression = Number | Symbol | Call

EXACT_BITS = 24_576  # limit of a number that is computed exactly
MAX_WORK = 400_000
"""Limit on the work for one text; a product of numbers of a and b bits counts as a·b / 4096, and a factorial of b bits
as b² / 4096."""

MAX_FACTORIAL = 2_500
MAX_BINOMIAL = 1_000_000
MAX_BINOMIAL_LOWER = 1_000
MAX_ROOT_BITS = 512
MAX_ROOT = 64


class Number(NamedTuple):
    """Exact rational number."""

    value: Fraction


class Symbol(NamedTuple):
    """Variable, one of the constants `π`, `e`, `i`, or one of the signs `∞` and `±`."""

    name: str


class Call(NamedTuple):
    """Operation or function: `+` and `*` of at least two arguments, `^` of a base and an exponent, or by its name.

    `1/x` is `x` to the power of −1. `numeric` defines the functions, which have one or two arguments.
    """

    name: str
    arguments: tuple[Expression, ...]


ZERO, ONE, MINUS_ONE, HALF = Number(Fraction(0)), Number(Fraction(1)), Number(Fraction(-1)), Number(Fraction(1, 2))
INFINITY, PI, PLUS_MINUS = Symbol("∞"), Symbol("π"), Symbol("±")


def make_integer(value: int) -> Number:
    """Return an integer as an expression."""
    return Number(Fraction(value))


class Builder:
    """Builder of expressions, which computes exactly and limits the work.

    Raises:
        LimitError: from any method, after more work than `MAX_WORK`.
    """

    def __init__(self) -> None:
        self._work_left = MAX_WORK

    def add(self, terms: Iterable[Expression]) -> Expression:
        """Return the sum, with its rational terms added up."""
        total: Fraction | None = None
        rest: list[Expression] = []
        for term in terms:
            if isinstance(term, Number):
                total = term.value if total is None else self._apply(total, term.value, Fraction.__add__)
            elif isinstance(term, Call) and term.name == "+":
                rest.extend(term.arguments)
            else:
                rest.append(term)
        if total is not None and (total or not rest):
            rest.append(Number(total))
        return rest[0] if len(rest) == 1 else Call("+", tuple(rest))

    def multiply(self, factors: Iterable[Expression]) -> Expression:
        """Return the product, with its rational factors multiplied into the first one."""
        total = Fraction(1)
        rest: list[Expression] = []
        for factor in factors:
            if isinstance(factor, Number):
                total = factor.value if total == 1 else self._apply(total, factor.value, Fraction.__mul__)
            elif isinstance(factor, Call) and factor.name == "*":
                inner = factor.arguments
                if isinstance(inner[0], Number):
                    total = self._apply(total, inner[0].value, Fraction.__mul__)
                    inner = inner[1:]
                rest.extend(inner)
            else:
                rest.append(factor)
        if not rest:
            return Number(total)
        if total != 1:
            rest.insert(0, Number(total))
        return rest[0] if len(rest) == 1 else Call("*", tuple(rest))

    def negate(self, value: Expression) -> Expression:
        """Return the value times −1."""
        return Number(-value.value) if isinstance(value, Number) else self.multiply((MINUS_ONE, value))

    def divide(self, numerator: Expression, denominator: Expression) -> Expression:
        """Return the quotient, or raise `MalformedError` if the denominator is zero."""
        return self.multiply((numerator, self.power(denominator, MINUS_ONE)))

    def power(self, base: Expression, exponent: Expression) -> Expression:
        """Return the power, computed if rational and not too large; MalformedError for zero to a power ≤ 0."""
        if exponent == ONE:
            return base
        if isinstance(base, Number) and isinstance(exponent, Number):
            return self._power_of_numbers(base.value, exponent.value)
        return Call("^", (base, exponent))

    def call(self, name: str, arguments: tuple[Expression, ...]) -> Expression:
        """Return a function's value if it is exact, otherwise the call; raise `MalformedError` if it is undefined."""
        exact: Fraction | None = None
        match arguments:
            case (Number(value),) if name in _EXACT_UNARY:
                exact = _EXACT_UNARY[name](value)
            case (Number(first), Number(second)) if name in _EXACT_BINARY:
                exact = _EXACT_BINARY[name](first, second)
            case _:
                pass
        if exact is not None:
            self._spend(_bits(exact) ** 2 // 4096)
            return Number(exact)
        return Call(name, arguments)

    def _power_of_numbers(self, base: Fraction, exponent: Fraction) -> Expression:
        if base == 0 and exponent <= 0:
            raise MalformedError("a division by zero")
        if base in (0, 1):
            return Number(base)
        if exponent.denominator != 1:
            root = _rational_root(base, exponent.denominator)
            if root is None:
                return Call("^", (Number(base), Number(exponent)))
            base, exponent = root, Fraction(exponent.numerator)
            if base in (0, 1):
                return Number(base)
        if base == -1:
            return Number(Fraction(-1 if exponent.numerator % 2 else 1))
        bits = _bits(base) * abs(exponent.numerator)
        if bits > EXACT_BITS:
            return Call("^", (Number(base), Number(exponent)))
        self._spend(bits if abs(exponent.numerator) == 1 else bits * bits // 4096)
        return Number(base**exponent.numerator)

    def _apply(self, left: Fraction, right: Fraction, operation: Callable[[Fraction, Fraction], Fraction]) -> Fraction:
        self._spend(_bits(left) * _bits(right) // 4096)
        return operation(left, right)

    def _spend(self, work: int) -> None:
        self._work_left -= work + 1
        if self._work_left < 0:
            raise LimitError("more exact arithmetic than one answer may need")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _rational_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the rational root of a degree, or None; negative numbers have one for odd degrees only."""
    if _bits(value) > MAX_ROOT_BITS or degree > MAX_ROOT or (value < 0 and degree % 2 == 0):
        return None
    numerator, denominator = _integer_root(abs(value.numerator), degree), _integer_root(value.denominator, degree)
    if numerator is None or denominator is None:
        return None
    return Fraction(numerator if value >= 0 else -numerator, denominator)


def _integer_root(value: int, degree: int) -> int | None:
    root = 1 << -(-value.bit_length() // degree)
    while (lower := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:  # Newton, from above
        root = lower
    return root if root**degree == value else None


def _factorial(value: Fraction, *, step: int) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        raise MalformedError("a factorial of a number that is not natural")
    return Fraction(math.prod(range(int(value), 0, -step))) if value <= MAX_FACTORIAL else None


def _binomial(n: Fraction, k: Fraction) -> Fraction | None:
    if n.denominator != 1 or k.denominator != 1 or min(n, k) < 0:
        raise MalformedError("a binomial of numbers that are not natural")
    if n > MAX_BINOMIAL or min(k, abs(n - k)) > MAX_BINOMIAL_LOWER:
        return None
    return Fraction(math.comb(int(n), int(k)))


def _mod(value: Fraction, modulus: Fraction) -> Fraction:
    if modulus == 0:
        raise MalformedError("a division by zero")
    return value % modulus


_EXACT_UNARY: dict[str, Callable[[Fraction], Fraction | None]] = {
    "factorial": partial(_factorial, step=1),
    "double factorial": partial(_factorial, step=2),
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}
_EXACT_BINARY: dict[str, Callable[[Fraction, Fraction], Fraction | None]] = {"binomial": _binomial, "mod": _mod}
