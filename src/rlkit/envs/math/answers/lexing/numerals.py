r"""Numbers as they are written: thousands, powers of ten, and the periods of decimals that never end.

Invariant: a value is exact; what may be a number as well as something else is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.faults import Monstrous, Unreadable
from rlkit.envs.math.answers.lexing.lexemes import group

MAX_DIGITS = 1_000
MAX_EXPONENT = 1_000

OVERLINES = (r"\overline", r"\bar")
_MARKED = (*OVERLINES, r"\dot")
_THOUSANDS = re.compile(r"[0-9]{3}(?:\.[0-9]+)?")


class Numeral(NamedTuple):
    """A number that was read.

    Args:
        text: its digits, those of a period in parentheses.
        grouped: commas stand between its thousands, which may also make it a list.
        whole: no point is in it.
        end: the place behind it.
    """

    text: str
    value: Fraction
    grouped: bool
    whole: bool
    end: int


def starts_period(lexemes: Sequence[str], at: int) -> bool:
    r"""Whether a period may stand at a place right after a decimal point: `\overline{3}`, `\dot{3}`, `(3)`."""
    return lexemes[at : at + 1] != [] and (lexemes[at] in _MARKED or _parenthesised(lexemes, at) != "")


def numeral(lexemes: Sequence[str], at: int, *, thousands: bool, opened: bool) -> Numeral:
    """Read a number.

    Args:
        at: the place of its digits, or of the point that a period follows.
        thousands: `1,234` is one number; otherwise only `1` is read.
        opened: a bracket stands right before it: `(12,345)` is a pair of numbers.

    Raises:
        Monstrous: it has too many digits, or too large a power of ten.
        Unreadable: it is a product or has a period in parentheses: `0.1(6)`.
    """
    digits, at = lexemes[at], at + 1
    grouped = False
    if digits == ".":
        digits = "0."
    elif thousands and "." not in digits and len(digits) <= 3 and digits != "0":
        digits, at, grouped = _with_thousands(lexemes, digits, at, opened=opened)
    if "." not in digits and lexemes[at : at + 1] == ["."] and starts_period(lexemes, at + 1):
        digits, at = digits + ".", at + 1
    before, period, at = _period(lexemes, at, pointed=digits.endswith(".")) if "." in digits else ("", "", at)
    digits += before
    if len(digits) + len(period) > MAX_DIGITS:
        raise Monstrous(f"a number of more than {MAX_DIGITS} digits")
    value = Fraction(digits)
    if period:
        places = len(digits) - digits.index(".") - 1
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    exponent, at = _power_of_ten(lexemes, at)
    text = f"{digits}({period})" if period else digits
    return Numeral(text, value * Fraction(10) ** exponent, grouped, "." not in digits, at)


def _period(lexemes: Sequence[str], at: int, *, pointed: bool) -> tuple[str, str, int]:
    """The digits before the period, the period, and the place behind it; empty texts where there is none."""
    none = "", "", at
    if at >= len(lexemes):
        return none
    if inside := _parenthesised(lexemes, at):
        if not pointed:
            raise Unreadable("a period in parentheses, or a product")
        return "", inside, at + 3
    if lexemes[at] in OVERLINES:
        period, end = group(lexemes, at + 1)
        return ("", period.strip(), end) if _is_digits(period.strip()) else none
    return _dotted(lexemes, at)


def _parenthesised(lexemes: Sequence[str], at: int) -> str:
    opening, digits, closing = (*lexemes[at : at + 3], "", "", "")[:3]
    return digits if opening == "(" and closing == ")" and _is_digits(digits) else ""


def _dotted(lexemes: Sequence[str], at: int) -> tuple[str, str, int]:
    r"""The period from the first digit with a dot to the last: `\dot{1}4285\dot{7}`."""
    period, end = "", at
    while True:
        between = ""
        if period and at < len(lexemes) and _is_digits(lexemes[at]):
            between, at = lexemes[at], at + 1
        if lexemes[at : at + 1] != [r"\dot"]:
            return "", period, end
        digit, at = group(lexemes, at + 1)
        if not _is_digits(digit.strip()):
            return "", period, end
        period, end = period + between + digit.strip(), at


def _is_digits(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def _with_thousands(lexemes: Sequence[str], digits: str, at: int, *, opened: bool) -> tuple[str, int, bool]:
    whole, end, grouped = digits, at, False
    while "." not in whole and (more := _more_thousands(lexemes, end)) is not None:
        thousands, end, comma = more
        whole += thousands
        grouped = grouped or comma
    if grouped and opened and lexemes[end : end + 1] in ([")"], ["]"]):
        return digits, at, False
    return whole, end, grouped


def _more_thousands(lexemes: Sequence[str], at: int) -> tuple[str, int, bool] | None:
    """Three more digits, the place behind them, and whether a comma stands before them."""
    rest = lexemes[at : at + 5]
    if rest[:1] and rest[0][0].isspace():
        return _spaced_thousands(rest, at)
    for separator in ([","], [r"\,"], [r"\!"], [",", r"\!"], [",", r"\!", " "], ["{", ",", "}"], ["{", r"\,", "}"]):
        size = len(separator)
        if rest[:size] == separator and len(rest) > size and _THOUSANDS.fullmatch(rest[size]):
            return rest[size], at + size + 1, separator == [","]
    return None


def _spaced_thousands(rest: Sequence[str], at: int) -> tuple[str, int, bool] | None:
    """Of `10 000`; in `3 125/1000` the second is no part of the first."""
    following = [lexeme for lexeme in rest[2:4] if not lexeme[0].isspace()]
    if len(rest) < 2 or not _THOUSANDS.fullmatch(rest[1]) or following[:1] == ["/"]:
        return None
    return rest[1], at + 2, False


def _power_of_ten(lexemes: Sequence[str], at: int) -> tuple[int, int]:
    """Of `e5`, `E-5`, `e+5` right after a number, and the place behind it."""
    if at >= len(lexemes) or lexemes[at] not in ("e", "E"):
        return 0, at
    signed = at + 1 < len(lexemes) and lexemes[at + 1] in ("+", "-")
    last = at + 1 + signed
    if last >= len(lexemes) or not _is_digits(lexemes[last]):
        return 0, at
    if len(lexemes[last]) > 4 or int(lexemes[last]) > MAX_EXPONENT:
        raise Monstrous("a power of ten that is too large")
    return -int(lexemes[last]) if signed and lexemes[at + 1] == "-" else int(lexemes[last]), last + 1
