r"""Numerals with thousands, powers of ten, and repeating decimals.

Invariant: a value is exact; ambiguous notation is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlkit.envs.math.answers.lexing.lexemes import Token, read_group
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, UnsupportedError

MAX_DIGITS = 1_000
MAX_EXPONENT = 1_000

OVERLINES = (r"\overline", r"\bar")
_PERIOD_MARKS = (*OVERLINES, r"\dot")
_THOUSANDS = re.compile(r"[0-9]{3}(?:\.[0-9]+)?")
_SEPARATORS = ([","], [r"\,"], [r"\!"], [",", r"\!"], [",", r"\!", " "], ["{", ",", "}"], ["{", r"\,", "}"])
"""Lexemes between thousands, besides blanks."""

_EXPONENT = re.compile(r"[eE]([+-]?[0-9]+)")


def starts_repeating_decimal(lexemes: Sequence[str], at: int) -> bool:
    r"""Tell whether a period may begin at an index after a decimal point: `\overline{3}`, `\dot{3}`, `(3)`."""
    return lexemes[at : at + 1] != [] and (lexemes[at] in _PERIOD_MARKS or _read_parenthesised(lexemes, at) != "")


def read_numeral(lexemes: Sequence[str], at: int, *, thousands: bool, is_opened: bool) -> tuple[Token, int]:
    """Return the token of a number, and the index after it.

    Args:
        at: index of its digits, or of the point before a period.
        thousands: read `1,234` as one number; otherwise read only `1`.
        is_opened: whether a bracket precedes it: `(12,345)` is a pair of numbers.

    Raises:
        LimitError: it has too many digits, or too large a power of ten.
        UnsupportedError: it may be a product or a repeating decimal: `0.1(6)`.
    """
    digits, at = lexemes[at], at + 1
    grouped = False
    if digits == ".":
        digits = "0."
    elif thousands and "." not in digits and len(digits) <= 3 and digits != "0":
        digits, at, grouped = _read_thousands(lexemes, digits, at, is_opened=is_opened)
    if "." not in digits and lexemes[at : at + 1] == ["."] and starts_repeating_decimal(lexemes, at + 1):
        digits, at = digits + ".", at + 1
    before, period, at = _read_period(lexemes, at, pointed=digits.endswith(".")) if "." in digits else ("", "", at)
    digits += before
    if len(digits) + len(period) > MAX_DIGITS:
        raise LimitError(f"a number of more than {MAX_DIGITS} digits")
    value = Fraction(digits)
    if period:
        places = len(digits) - digits.index(".") - 1
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    exponent, at = _read_exponent(lexemes, at)
    text = f"{digits}({period})" if period else digits
    return Token("number", text, value * Fraction(10) ** exponent, grouped=grouped), at


def _read_period(lexemes: Sequence[str], at: int, *, pointed: bool) -> tuple[str, str, int]:
    """Return the digits before the period, the period, and the index after it; both are empty without a period."""
    no_period = "", "", at
    if at >= len(lexemes):
        return no_period
    if digits := _read_parenthesised(lexemes, at):
        if not pointed:
            raise UnsupportedError("a period in parentheses, or a product")
        return "", digits, at + 3
    if lexemes[at] in OVERLINES:
        period, end = read_group(lexemes, at + 1)
        return ("", period.strip(), end) if _is_digits(period.strip()) else no_period
    return _read_dotted(lexemes, at)


def _read_parenthesised(lexemes: Sequence[str], at: int) -> str:
    opening, digits, closing = (*lexemes[at : at + 3], "", "", "")[:3]
    return digits if opening == "(" and closing == ")" and _is_digits(digits) else ""


def _read_dotted(lexemes: Sequence[str], at: int) -> tuple[str, str, int]:
    r"""Read the period from the first digit with a dot to the last: `\dot{1}4285\dot{7}`."""
    period, end = "", at
    while True:
        between = ""
        if period and at < len(lexemes) and _is_digits(lexemes[at]):
            between, at = lexemes[at], at + 1
        if lexemes[at : at + 1] != [r"\dot"]:
            return "", period, end
        digit, at = read_group(lexemes, at + 1)
        if not _is_digits(digit.strip()):
            return "", period, end
        period, end = period + between + digit.strip(), at


def _is_digits(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def _read_thousands(lexemes: Sequence[str], digits: str, at: int, *, is_opened: bool) -> tuple[str, int, bool]:
    whole, end, grouped = digits, at, False
    while "." not in whole and (group := _read_next_thousands(lexemes, end)) is not None:
        thousands, end, comma = group
        whole += thousands
        grouped = grouped or comma
    if grouped and is_opened and lexemes[end : end + 1] in ([")"], ["]"]):
        return digits, at, False
    return whole, end, grouped


def _read_next_thousands(lexemes: Sequence[str], at: int) -> tuple[str, int, bool] | None:
    """Return the next three digits, the index after them, and whether a comma precedes them."""
    rest = lexemes[at : at + 5]
    is_blank = "".join(rest[:1]).isspace()
    if is_blank and "".join(rest[2:4]).lstrip().startswith("/"):  # `3 125/1000`
        return None
    for separator in (rest[:1],) if is_blank else _SEPARATORS:
        size = len(separator)
        if rest[:size] == separator and len(rest) > size and _THOUSANDS.fullmatch(rest[size]):
            return rest[size], at + size + 1, separator == [","]
    return None


def _read_exponent(lexemes: Sequence[str], at: int) -> tuple[int, int]:
    """Return the exponent of `e5`, `E-5` or `e+5` after a number, and the index after it."""
    for end in (at + 2, at + 3):
        if match := _EXPONENT.fullmatch("".join(lexemes[at:end])):
            if len(match[1].lstrip("+-")) > 4 or abs(int(match[1])) > MAX_EXPONENT:
                raise LimitError("a power of ten that is too large")
            return int(match[1]), end
    return 0, at
