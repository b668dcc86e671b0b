"""Numeric comparison of expressions, as functions or as numbers.

Invariant: time is linear in the size of the expressions; a long decimal never equals an irrational number.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from zlib import crc32

from rlkit.envs.math.answers.lexing.parse_errors import LimitError
from rlkit.envs.math.answers.nodes import ZERO, Call, Expression, Number, Symbol

SCALES = (1.7, -0.83, 0.37, 6.1, -2.9, 0.071, 13.3, -0.29)
"""Scales of the evaluation points; the domain of each root, logarithm and arcsine contains some."""

MIN_POINTS = 3
"""Number of points with real values that suffices; if there are fewer, points with complex values count too."""

IDENTITY_TOLERANCE = 1e-9
CONSTANT_TOLERANCE = 1e-11
REAL_TOLERANCE = 1e-9  # relative size of an imaginary part that is a rounding error
MAX_DENOMINATOR = 10**5
"""A fraction in lowest terms with a larger denominator may approximate an irrational number to `CONSTANT_TOLERANCE`."""

MAX_DIGITS = 11
"""Digits of numerator and denominator without trailing zeros, above which a number may be rounded."""

MAX_LONG_BITS = 512

CONSTANTS: Mapping[str, complex] = {"π": cmath.pi, "e": cmath.e, "i": 1j}

MAX_SMALL_POWER = 1_000
TINY = 1e-13  # rounding error of an expression that is zero
MAX_EVALUATIONS = 25_000  # limit of evaluated nodes for one comparison of two answers; about a microsecond each
_NO_VALUE = (ArithmeticError, ValueError)

type Verdict = bool | None


class Evaluator:
    r"""Evaluator of expressions with the work limit of one comparison.

    Args:
        natural: read `\log` without a base as natural, not to base ten.

    Attributes:
        imaginary: whether an even root of a negative number was evaluated since it was set to False.
        scale: largest value since it was set to 0 that may cancel: a term of a sum, and 1 for a function.
    """

    def __init__(self, *, natural: bool = False) -> None:
        self.imaginary = False
        self.scale = 0.0
        self._natural = natural
        self._evaluations_left = MAX_EVALUATIONS

    def __call__(self, expression: Expression, values: Mapping[str, complex]) -> complex:  # noqa: PLR0911  one for each kind of node
        """Return the value of an expression for values of its symbols.

        Raises:
            ArithmeticError: the expression has no value there, or none that fits into a float.
            ValueError: the same, from other functions.
            LimitError: the work limit is reached.
        """
        self._evaluations_left -= 1
        if self._evaluations_left < 0:
            raise LimitError("more to compute than one comparison may need")
        match expression:
            case Number(value):
                return complex(value)
            case Symbol(name):
                return values[name]
            case Call("+", terms):
                values_of_terms = [self(term, values) for term in terms]
                self.scale = max(self.scale, *map(abs, values_of_terms))
                return sum(values_of_terms, 0j)
            case Call("*", factors):
                product = 1 + 0j
                for factor in factors:
                    product *= self(factor, values)
                return product
            case Call("^", (base, Number(exponent))):
                value = self(base, values)
                if value.real < 0 and exponent.denominator % 2 == 0:
                    self.imaginary = True
                return _rational_power(value, exponent)
            case Call("^", (base, exponent)):
                return self(base, values) ** self(exponent, values)
            case Call("log", (argument,)):
                self.scale = max(self.scale, 1.0)
                return cmath.log(self(argument, values)) / (1 if self._natural else math.log(10))
            case Call(name, arguments):
                first, *rest = [self(argument, values) for argument in arguments]
                self.scale = max(self.scale, 1.0)
                return _BINARY[name](first, rest[0]) if rest else _UNARY[name](first)


def compare_expressions(left: Expression, right: Expression, evaluate: Evaluator) -> Verdict:
    """Compare two expressions wherever both are defined, or None; LimitError if a number or the work is too large."""
    if left == right:
        return True
    if isinstance(left, Number) and isinstance(right, Number):
        return False
    names = sorted(find_variables(left) | find_variables(right))
    if not names:
        return _compare_constants(left, right, evaluate)
    if any(isinstance(side, Number) and to_float(side) is None for side in (left, right)):
        return False  # a number beyond the range of floats does not equal a function
    return _compare_functions(left, right, names, evaluate)


def find_constant_ratio(left: Expression, right: Expression, evaluate: Evaluator) -> float | None:
    """Return the constant, non-zero quotient of two expressions; None if there is none, or no variable."""
    names = sorted(find_variables(left) | find_variables(right))
    ratios: list[complex] = []
    for point in _make_points(names) if names else ():
        try:
            ratios.append(evaluate(left, point) / evaluate(right, point))
        except _NO_VALUE:
            continue
    if len(ratios) < MIN_POINTS:
        return None
    first = ratios[0]
    try:
        constant = (
            abs(first) > TINY
            and _is_real(first)
            and all(_is_near(first, value, IDENTITY_TOLERANCE) for value in ratios)
        )
    except OverflowError:
        return None
    return first.real if constant else None


def find_variables(expression: Expression) -> set[str]:
    """Return the names of the variables in an expression."""
    return {part.name for part in walk(expression) if isinstance(part, Symbol) and part.name not in CONSTANTS}


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all its parts."""
    pending = [expression]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, Call):
            pending.extend(part.arguments)


def to_float(expression: Expression) -> float | None:
    """Return the value of a real constant, including `∞` and `−∞`, or None."""
    match expression:
        case Symbol("∞"):
            return math.inf
        case Call("*", (Number(value), Symbol("∞"))):
            return math.copysign(math.inf, value)
        case _:
            pass
    if find_variables(expression):
        return None
    try:
        value = Evaluator()(expression, CONSTANTS)
    except _NO_VALUE:
        return None
    return value.real if _is_real(value) else None


def _rational_power(base: complex, exponent: Fraction) -> complex:
    """Return a power; an odd root of a negative number is the real one."""
    if exponent.denominator == 1 and abs(exponent) < MAX_SMALL_POWER:
        return base ** int(exponent)
    if exponent.denominator % 2 and exponent.denominator > 1 and base.imag == 0 and base.real < 0:
        root = (-base.real) ** float(exponent)
        return complex(-root if exponent.numerator % 2 else root)
    return base ** float(exponent)


def _compare_constants(left: Expression, right: Expression, evaluate: Evaluator) -> Verdict:
    """Compare constants; rational terms are subtracted exactly, because a large float absorbs small ones."""
    left_part, left_rest = _rational_part(left)
    right_part, right_rest = _rational_part(right)
    if left_rest == right_rest:
        return left_part == right_part
    evaluate.scale = 0.0
    try:
        left_value, right_value = (evaluate(rest, CONSTANTS) for rest in (left_rest, right_rest))
        difference = float(left_part - right_part)
        is_near = _is_near(
            left_value + difference, right_value, CONSTANT_TOLERANCE, scale=max(evaluate.scale, abs(difference))
        )
    except OverflowError:
        raise LimitError("a number too large to compute with") from None
    except _NO_VALUE:
        return None
    if not is_near or _is_approximation(left) != _is_approximation(right):
        return False
    return None if _is_long(left) or _is_long(right) else True


def _rational_part(expression: Expression) -> tuple[Fraction, Expression]:
    match expression:
        case Number(value):
            return value, ZERO
        case Call("+", (*terms, Number(value))):
            return value, terms[0] if len(terms) == 1 else Call("+", tuple(terms))
        case _:
            return Fraction(0), expression


def _compare_functions(left: Expression, right: Expression, names: list[str], evaluate: Evaluator) -> Verdict:
    complex_points: list[bool] = []
    real_points = 0
    for point in _make_points(names):
        evaluate.scale, evaluate.imaginary = 0.0, False
        try:
            left_value, right_value = (evaluate(side, point) for side in (left, right))
            is_near = _is_near(left_value, right_value, IDENTITY_TOLERANCE, scale=evaluate.scale)
        except _NO_VALUE:
            continue
        if evaluate.imaginary or not (_is_real(left_value) and _is_real(right_value)):
            complex_points.append(is_near)
        elif is_near:
            real_points += 1
        else:
            return False
    if real_points < MIN_POINTS and not all(complex_points):
        return False
    if real_points == 0 and not complex_points:
        return None
    return _is_approximation(left) == _is_approximation(right)


def _make_points(names: list[str]) -> Iterator[dict[str, complex]]:
    """Yield fixed pseudo-random points; in every second one all variables are positive."""
    hashes = [crc32(name.encode()) for name in names]
    for number in range(len(SCALES)):
        point = dict(CONSTANTS)
        for name, code in zip(names, hashes, strict=True):
            value = SCALES[(number + code) % len(SCALES)] * (0.7 + (code >> 8) % 1009 / 1500)
            point[name] = complex(abs(value) if number % 2 else value)
        yield point


def _is_near(left: complex, right: complex, tolerance: float, *, scale: float = 1.0) -> bool:
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        raise OverflowError
    return abs(left - right) <= tolerance * max(abs(left), abs(right)) + TINY * min(1.0, scale)


def _is_real(value: complex) -> bool:
    return abs(value.imag) <= REAL_TOLERANCE * abs(value)


def _is_approximation(expression: Expression) -> bool:
    """Tell whether an expression contains a rounded number such as 3.14159265."""
    return any(
        isinstance(part, Number) and min(abs(part.value.numerator), part.value.denominator) > MAX_DENOMINATOR
        for part in walk(expression)
    )


def _is_long(expression: Expression) -> bool:
    """Tell whether an expression is a number with so many digits that it may equal an irrational one as a float."""
    if not isinstance(expression, Number):
        return False
    numerator, denominator = abs(expression.value.numerator), expression.value.denominator
    if max(numerator, denominator).bit_length() > MAX_LONG_BITS:
        return True
    return len(str(numerator).rstrip("0")) + len(str(denominator).rstrip("0")) > MAX_DIGITS


def _on_reals(function: Callable[[float], float]) -> Callable[[complex], complex]:
    def apply(value: complex) -> complex:
        if not _is_real(value):
            raise ValueError("not a real number")
        return complex(function(value.real))

    return apply


def _mod(value: complex, modulus: complex) -> complex:
    if not (_is_real(value) and _is_real(modulus)):
        raise ValueError("not a real number")
    return complex(value.real % modulus.real)


def _no_value(value: complex) -> complex:
    raise ValueError(f"unknown at {value}")


_factorial = _on_reals(lambda value: math.gamma(value + 1))

_UNARY: Mapping[str, Callable[[complex], complex]] = {
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
    "floor": _on_reals(math.floor),
    "ceil": _on_reals(math.ceil),
    "factorial": _factorial,
    "double factorial": _no_value,
}
_BINARY: Mapping[str, Callable[[complex, complex], complex]] = {
    "logarithm": lambda value, base: cmath.log(value) / cmath.log(base),
    "binomial": lambda above, below: _factorial(above) / (_factorial(below) * _factorial(above - below)),
    "mod": _mod,
}
