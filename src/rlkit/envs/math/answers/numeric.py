"""Whether two expressions are the same function, or the same number.

Invariant: each takes time in proportion to its size; a number that is written as a long decimal equals no irrational
one.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from zlib import crc32

from rlkit.envs.math.answers.lexing.faults import Monstrous
from rlkit.envs.math.answers.nodes import ZERO, Call, Expression, Number, Power, Product, Sum, Symbol

SCALES = (1.7, -0.83, 0.37, 6.1, -2.9, 0.071, 13.3, -0.29)
"""Random points are multiples of these: some in every domain that a root, a logarithm or an arcus sine has."""

ENOUGH = 3
"""So many points with real values are enough; otherwise complex values count too."""

IDENTITY_TOLERANCE = 1e-9
CONSTANT_TOLERANCE = 1e-11
REAL = 1e-9
"""An imaginary part that is smaller than this, relative to the whole, is rounding."""

MAX_DENOMINATOR = 10**5
"""A fraction in lowest terms with a larger denominator may approximate an irrational number to `CONSTANT_TOLERANCE`."""

MAX_DIGITS = 11
"""Numerator and denominator without zeros at their ends have so many digits, or may be rounded."""

MAX_LONG_BITS = 512

CONSTANTS: Mapping[str, complex] = {"π": cmath.pi, "e": cmath.e, "i": 1j}

MAX_SMALL_POWER = 1_000
TINY = 1e-13
"""What rounding leaves of an expression that is zero."""

MAX_EVALUATIONS = 25_000
"""So many nodes are evaluated for one comparison of two answers; about a microsecond each."""

_NO_VALUE = (ArithmeticError, ValueError)

type Verdict = bool | None


class Evaluator:
    r"""Values of expressions, for as much work as one comparison may take.

    Args:
        natural: `\log` without a base is the natural one, not that of base ten.

    Attributes:
        imaginary: whether an even root of a negative number was met since it was set to False.
        scale: the largest value since it was set to 0 that another one may have cancelled: of a sum's terms, and 1 for
            a function.
    """

    def __init__(self, *, natural: bool = False) -> None:
        self.imaginary = False
        self.scale = 0.0
        self._natural = natural
        self._left = MAX_EVALUATIONS

    def __call__(self, expression: Expression, values: Mapping[str, complex]) -> complex:  # noqa: PLR0911  one for each kind of node
        """The value with the variables' values.

        Raises:
            ArithmeticError: it has none there, or none that a float can hold.
            ValueError: likewise.
            Monstrous: too much has been evaluated.
        """
        self._left -= 1
        if self._left < 0:
            raise Monstrous("more to compute than one comparison may need")
        match expression:
            case Number(value):
                return complex(value)
            case Symbol(name):
                return values[name]
            case Sum(terms):
                found = [self(term, values) for term in terms]
                self.scale = max(self.scale, *map(abs, found))
                return sum(found, 0j)
            case Product(factors):
                product = 1 + 0j
                for factor in factors:
                    product *= self(factor, values)
                return product
            case Power(base, Number(exponent)):
                value = self(base, values)
                if value.real < 0 and exponent.denominator % 2 == 0:
                    self.imaginary = True
                return _rational_power(value, exponent)
            case Power(base, exponent):
                return self(base, values) ** self(exponent, values)
            case Call("log", (argument,)):
                self.scale = max(self.scale, 1.0)
                return cmath.log(self(argument, values)) / (1 if self._natural else math.log(10))
            case Call(name, arguments):
                first, *rest = [self(argument, values) for argument in arguments]
                self.scale = max(self.scale, 1.0)
                return _OF_TWO[name](first, rest[0]) if rest else _OF_ONE[name](first)


def equal(left: Expression, right: Expression, evaluate: Evaluator) -> Verdict:
    """Whether two expressions are equal wherever both are defined; None where that cannot be told.

    Raises:
        Monstrous: a number in them is too large to compute with, or they are too much work.
    """
    if left == right:
        return True
    if isinstance(left, Number) and isinstance(right, Number):
        return False
    names = sorted(variables(left) | variables(right))
    if not names:
        return _equal_constants(left, right, evaluate)
    if any(isinstance(side, Number) and real(side) is None for side in (left, right)):
        return False  # a number that no float can hold, beside a function
    return _equal_functions(left, right, names, evaluate)


def ratio(left: Expression, right: Expression, evaluate: Evaluator) -> float | None:
    """The constant that the left one is of the right one, other than zero; None where there is none, or no variable."""
    names = sorted(variables(left) | variables(right))
    found: list[complex] = []
    for point in _points(names) if names else ():
        try:
            found.append(evaluate(left, point) / evaluate(right, point))
        except _NO_VALUE:
            continue
    if len(found) < ENOUGH:
        return None
    first = found[0]
    try:
        constant = abs(first) > TINY and _is_real(first) and all(_near(first, one, IDENTITY_TOLERANCE) for one in found)
    except OverflowError:
        return None
    return first.real if constant else None


def variables(expression: Expression) -> set[str]:
    """The names of its variables."""
    return {part.name for part in parts(expression) if isinstance(part, Symbol) and part.name not in CONSTANTS}


def parts(expression: Expression) -> Iterator[Expression]:
    """The expression and all that it is made of."""
    waiting = [expression]
    while waiting:
        part = waiting.pop()
        yield part
        match part:
            case Sum(inner) | Product(inner) | Call(_, inner):
                waiting.extend(inner)
            case Power(base, exponent):
                waiting += (base, exponent)
            case Number() | Symbol():
                pass


def real(expression: Expression) -> float | None:  # noqa: PLR0911  one for each kind of number
    """The value of a real constant, `∞` and `−∞` among them; None where it is none."""
    match expression:
        case Number(value):
            try:
                return float(value)
            except OverflowError:
                return None
        case Symbol("∞"):
            return math.inf
        case Product((Number(value), Symbol("∞"))):
            return math.copysign(math.inf, value)
        case _:
            pass
    if variables(expression):
        return None
    try:
        value = Evaluator()(expression, CONSTANTS)
    except _NO_VALUE:
        return None
    return value.real if _is_real(value) else None


def _rational_power(base: complex, exponent: Fraction) -> complex:
    """An odd root of a negative number is the real one, which is what is meant."""
    if exponent.denominator == 1 and abs(exponent) < MAX_SMALL_POWER:
        return base ** int(exponent)
    if exponent.denominator % 2 and exponent.denominator > 1 and base.imag == 0 and base.real < 0:
        root = (-base.real) ** float(exponent)
        return complex(-root if exponent.numerator % 2 else root)
    return base ** float(exponent)


def _equal_constants(left: Expression, right: Expression, evaluate: Evaluator) -> Verdict:
    """The rational terms are subtracted exactly: beside a large one, a float would lose the rest."""
    left_part, left_rest = _rational_part(left)
    right_part, right_rest = _rational_part(right)
    if left_rest == right_rest:
        return left_part == right_part
    evaluate.scale = 0.0
    try:
        left_value, right_value = (evaluate(rest, CONSTANTS) for rest in (left_rest, right_rest))
        apart = float(left_part - right_part)
        near = _near(left_value + apart, right_value, CONSTANT_TOLERANCE, scale=max(evaluate.scale, abs(apart)))
    except OverflowError:
        raise Monstrous("a number too large to compute with") from None
    except _NO_VALUE:
        return None
    if not near or _approximates(left) != _approximates(right):
        return False
    return None if _is_long(left) or _is_long(right) else True


def _rational_part(expression: Expression) -> tuple[Fraction, Expression]:
    match expression:
        case Number(value):
            return value, ZERO
        case Sum((*terms, Number(value))):
            return value, terms[0] if len(terms) == 1 else Sum(tuple(terms))
        case _:
            return Fraction(0), expression


def _equal_functions(left: Expression, right: Expression, names: list[str], evaluate: Evaluator) -> Verdict:
    complex_points: list[bool] = []
    real_points = 0
    for point in _points(names):
        evaluate.scale, evaluate.imaginary = 0.0, False
        try:
            one, other = (evaluate(side, point) for side in (left, right))
            near = _near(one, other, IDENTITY_TOLERANCE, scale=evaluate.scale)
        except _NO_VALUE:
            continue
        if evaluate.imaginary or not (_is_real(one) and _is_real(other)):
            complex_points.append(near)
        elif near:
            real_points += 1
        else:
            return False
    if real_points < ENOUGH and not all(complex_points):
        return False
    if real_points == 0 and not complex_points:
        return None
    return _approximates(left) == _approximates(right)


def _points(names: list[str]) -> Iterator[dict[str, complex]]:
    """Fixed points that look random; in every second one all variables are positive."""
    hashes = [crc32(name.encode()) for name in names]
    for number in range(len(SCALES)):
        point = dict(CONSTANTS)
        for name, code in zip(names, hashes, strict=True):
            value = SCALES[(number + code) % len(SCALES)] * (0.7 + (code >> 8) % 1009 / 1500)
            point[name] = complex(abs(value) if number % 2 else value)
        yield point


def _near(left: complex, right: complex, tolerance: float, *, scale: float = 1.0) -> bool:
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        raise OverflowError
    return abs(left - right) <= tolerance * max(abs(left), abs(right)) + TINY * min(1.0, scale)


def _is_real(value: complex) -> bool:
    return abs(value.imag) <= REAL * abs(value)


def _approximates(expression: Expression) -> bool:
    """Whether it holds a number such as 3.14159265, which stands for another one."""
    return any(
        isinstance(part, Number) and min(abs(part.value.numerator), part.value.denominator) > MAX_DENOMINATOR
        for part in parts(expression)
    )


def _is_long(expression: Expression) -> bool:
    """Whether it is a number of so many digits that an irrational one may be as near to it as floats can tell."""
    if not isinstance(expression, Number):
        return False
    above, below = abs(expression.value.numerator), expression.value.denominator
    if max(above, below).bit_length() > MAX_LONG_BITS:
        return True
    return len(str(above).rstrip("0")) + len(str(below).rstrip("0")) > MAX_DIGITS


def _real_function(function: Callable[[float], float]) -> Callable[[complex], complex]:
    def applied(value: complex) -> complex:
        if not _is_real(value):
            raise ValueError("not a real number")
        return complex(function(value.real))

    return applied


def _mod(value: complex, modulus: complex) -> complex:
    if not (_is_real(value) and _is_real(modulus)):
        raise ValueError("not a real number")
    return complex(value.real % modulus.real)


def _no_value(value: complex) -> complex:
    raise ValueError(f"not known at {value}")


_factorial = _real_function(lambda value: math.gamma(value + 1))

_OF_ONE: Mapping[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda value: 1 / cmath.tan(value),
    "sec": lambda value: 1 / cmath.cos(value),
    "csc": lambda value: 1 / cmath.sin(value),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "arccot": lambda value: cmath.atan(1 / value),
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "coth": lambda value: 1 / cmath.tanh(value),
    "ln": cmath.log,
    "abs": lambda value: complex(abs(value)),
    "degrees": lambda value: value * math.pi / 180,
    "floor": _real_function(math.floor),
    "ceil": _real_function(math.ceil),
    "factorial": _factorial,
    "double factorial": _no_value,
}
_OF_TWO: Mapping[str, Callable[[complex, complex], complex]] = {
    "logarithm": lambda value, base: cmath.log(value) / cmath.log(base),
    "binomial": lambda above, below: _factorial(above) / (_factorial(below) * _factorial(above - below)),
    "mod": _mod,
}
