r"""From text to tokens: LaTeX, ASCII and Unicode alike.

Invariant: time in proportion to the length, which is limited; every token but a text's is one of the known `kind`s.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from rlkit.envs.math.answers.faults import Malformed, Monstrous, Unreadable
from rlkit.envs.math.answers.notation import (
    ALIASES,
    DROPPED,
    ENVIRONMENTS,
    FRACTIONS,
    FUNCTIONS,
    GREEK,
    LOWERED,
    MARKS,
    PLAIN,
    RAISED,
    SKIPPED,
    TEXTS,
    UNICODE,
    WORDS,
)
from rlkit.envs.math.answers.words import CURRENCIES, LEAD_INS

MAX_CHARS = 4_000
MAX_ASCII_CHARS = 16_000
MAX_TOKENS = 1_500
MAX_DIGITS = 1_000
MAX_EXPONENT = 1_000


class Token(NamedTuple):
    """One token.

    Args:
        kind: `number`, `symbol`, `word`, `text`, `function`, `command`, `set`, `currency`, or the sign itself.
        text: as it is written; of a `text`, its content.
        value: of a number.
        spaced: something blank stands before it.
        grouped: a number with commas between its thousands, which may also be a list.
        whole: a number without a point.
    """

    kind: str
    text: str
    value: Fraction | None = None
    spaced: bool = False
    grouped: bool = False
    whole: bool = True


_LEXEME = re.compile(r"\s+|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|\*\*|<=|>=|!=|==|.", re.DOTALL)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_NUMERAL = re.compile(r"(?:[+-]|\\?\$)*\.?[0-9]")
"""A text that begins so is a number with what may stand behind one."""

_UNIT_LETTERS = frozenset("msghl")
_THOUSANDS = re.compile(r"[0-9]{3}(?:\.[0-9]+)?")


def tokens(text: str, *, thousands: bool = True) -> list[Token]:
    """The tokens of a text.

    Args:
        thousands: `1,234` is one number; otherwise it is two.

    Raises:
        Malformed: a brace is missing.
        Monstrous: it is too long, or a number in it is.
        Unreadable: a command is not known.
    """
    if len(text) > MAX_CHARS:
        raise Monstrous(f"more than {MAX_CHARS} characters")
    return _Reader(_LEXEME.findall(_ascii(text)), thousands=thousands).read()


def _ascii(text: str) -> str:
    """The text with LaTeX in the place of other signs, as far as there is any for them."""
    if text.isascii():
        return text
    text = _RAISED.sub(_raised, text.translate(UNICODE))
    text = _LOWERED.sub(lambda run: f"_{{{run[0].translate(LOWERED)}}}", text)
    text = unicodedata.normalize("NFKC", text)  # digits and letters in other forms
    if len(text) > MAX_ASCII_CHARS:
        raise Monstrous(f"more than {MAX_ASCII_CHARS} characters, written out")
    return text.translate(UNICODE)


def _raised(run: re.Match[str]) -> str:
    written = run[0].translate(RAISED)
    return f"^{written} " if len(written) == 1 else f"^{{{written}}}"


class _Reader:
    def __init__(self, lexemes: list[str], *, thousands: bool) -> None:
        self._lexemes = lexemes
        self._at = 0
        self._thousands = thousands
        self._spaced = False
        self._found: list[Token] = []

    def read(self) -> list[Token]:
        while self._at < len(self._lexemes):
            lexeme = self._lexemes[self._at]
            self._at += 1
            if lexeme[0].isspace():
                self._spaced = True
                continue
            self._take(lexeme)
            if len(self._found) > MAX_TOKENS:
                raise Monstrous(f"more than {MAX_TOKENS} tokens")
        return self._found

    def _take(self, lexeme: str) -> None:
        first = lexeme[0]
        if first.isdecimal() or (first == "." and len(lexeme) > 1):
            self._number(lexeme)
        elif lexeme in FRACTIONS:
            self._push(FRACTIONS[lexeme], lexeme)
            self._split()
        elif lexeme in ALIASES:
            self._push(ALIASES[lexeme], lexeme)
        elif first == "\\":
            self._command(lexeme)
        elif first.isascii() and first.isalpha():
            self._letters(lexeme)
        elif lexeme in PLAIN:
            self._push(lexeme, lexeme)
        elif first != "$" and unicodedata.category(first) == "Sc":
            self._push("currency", CURRENCIES.get(first, first))
        elif first in "$~":
            self._spaced = True
        elif first.isalpha():
            self._push("word", lexeme)
        elif lexeme == "." and self._lexemes[self._at : self._at + 1] in ([r"\overline"], [r"\dot"]):
            self._number("0.")
        elif lexeme != "." or self._lexemes[self._at :] != []:
            raise Malformed(f"the sign {lexeme!r}")

    def _push(self, kind: str, text: str) -> None:
        self._found.append(Token(kind, text, spaced=self._spaced))
        self._spaced = False

    def _command(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of command
        name = lexeme[1:]
        if lexeme in (r"\overline", r"\dot") and self._found and self._found[-1].kind == "number" and self._repeat():
            return
        if lexeme in (r"\overline", r"\bar"):
            return self._barred()
        if lexeme in DROPPED:
            self._spaced = self._spaced or lexeme in (r"\ ", r"\quad", r"\qquad")
        elif lexeme in SKIPPED:
            self._group()
        elif lexeme in TEXTS:
            self._text(self._group())
        elif lexeme == r"\$":
            self._push("currency", CURRENCIES["$"])
        elif lexeme == r"\not":
            negated = self._lexemes[self._at : self._at + 1] == ["="]
            self._at += negated
            self._push("≠" if negated else "not", lexeme)
        elif lexeme in (r"\mathbb", r"\Bbb"):
            self._push("set", self._group().strip())
        elif name in FUNCTIONS:
            self._push("function", FUNCTIONS[name])
        elif name in ("pi", "varpi"):
            self._push("symbol", "π")
        elif name in GREEK:
            self._push("symbol", name)
        elif lexeme in (r"\begin", r"\end"):
            self._environment(lexeme, self._group().strip())
        elif lexeme in (r"\sqrt", r"\pmod", r"\{", r"\}", r"\circ"):
            self._push(lexeme, lexeme)
        elif lexeme in MARKS and self._found and self._found[-1].kind == "number" and not self._found[-1].whole:
            raise Unreadable("a decimal that goes on")
        else:
            raise Unreadable(f"the command {lexeme}")

    def _split(self) -> None:
        r"""The first of what follows `\frac` is the numerator, as TeX has it: `\frac12`, `\frac1{20}`, `\frac ab`."""
        while self._at < len(self._lexemes) and self._lexemes[self._at][0].isspace():
            self._at += 1
        if self._at < len(self._lexemes) and len(lexeme := self._lexemes[self._at]) > 1 and lexeme[0].isalnum():
            self._lexemes[self._at : self._at + 1] = [lexeme[0], lexeme[1:]]

    def _environment(self, lexeme: str, name: str) -> None:
        if name not in ENVIRONMENTS:
            raise Unreadable(f"the environment {name}")
        self._push("begin" if lexeme == r"\begin" else "end", name)
        if name == "array" and lexeme == r"\begin":
            self._group()

    def _group(self) -> str:
        """The text of the braces that follow, or the one lexeme that does."""
        while self._at < len(self._lexemes) and self._lexemes[self._at][0].isspace():
            self._at += 1
        start = self._at
        depth = 0
        while self._at < len(self._lexemes):
            lexeme = self._lexemes[self._at]
            self._at += 1
            depth += (lexeme == "{") - (lexeme == "}")
            if depth <= 0:
                inside = self._lexemes[start : self._at]
                return "".join(inside[1:-1] if inside[0] == "{" else inside)
        raise Malformed("a brace that is not closed")

    def _barred(self) -> None:
        """A letter with a bar is another letter; a bar over anything else says nothing."""
        start = self._at
        barred = self._group().strip()
        if len(barred) == 1 and barred.isalpha():
            self._push("symbol", barred + "bar")
        else:
            self._at = start

    def _text(self, content: str) -> None:
        """A text that begins with a number, or is a letter, stands for it; any other is kept whole."""
        stripped = content.strip()
        if stripped in FUNCTIONS:
            self._push("function", FUNCTIONS[stripped])
        elif stripped in ("and", "or", ", and", ", or", "and/or"):
            self._push("or" if stripped.endswith("or") else "and", stripped)
        elif stripped.startswith("$") and stripped.endswith("$"):
            self._lexemes[self._at : self._at] = _LEXEME.findall(stripped.strip("$"))
        elif stripped == r"\$":
            self._push("currency", CURRENCIES["$"])
        elif stripped == "to":
            self._push(":", stripped)
        elif stripped in ("%", r"\%", "percent"):
            self._push("%", stripped)
        elif not self._found and stripped.lower().rstrip(" :,") in LEAD_INS:
            self._spaced = True
        elif _NUMERAL.match(stripped) or (len(stripped) == 1 and stripped.islower() and stripped not in _UNIT_LETTERS):
            self._lexemes[self._at : self._at] = _LEXEME.findall(stripped)
        elif stripped and stripped != ".":
            self._found.append(Token("text", content, spaced=self._spaced))
            self._spaced = False

    def _letters(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of word
        while self._lexemes[self._at : self._at + 1] == ["."] and self._abbreviated():
            lexeme += self._lexemes[self._at + 1]
            self._at += 2
        lower = lexeme.lower()
        if lower in ("th", "st", "nd", "rd") and not self._spaced and self._found and self._found[-1].kind == "number":
            return  # `12th`
        if lexeme in FUNCTIONS:
            self._push("function", FUNCTIONS[lexeme])
        elif lexeme[:-1] in FUNCTIONS and lexeme[-1] in "xyz":
            self._push("function", FUNCTIONS[lexeme[:-1]])
            self._push("symbol", lexeme[-1])
        elif lower == "sqrt":
            self._push(r"\sqrt", lexeme)
        elif lower == "pi":
            self._push("symbol", "π")
        elif lexeme in WORDS:
            self._push(WORDS[lexeme], lexeme)
        elif lexeme in GREEK:
            self._push("symbol", lexeme)
        elif lower in ("percent", "degrees", "degree"):
            self._push("%" if lower == "percent" else "°", lexeme)
        elif lexeme == "x" and self._between_factors():
            self._push("*", lexeme)
        elif lower == "union" or (lexeme == "U" and self._between_intervals()):
            self._push("∪", lexeme)
        elif lower == "to":
            self._push(":", lexeme)
        elif len(lexeme) == 1:
            self._push("symbol", lexeme)
        else:
            self._push("word", lexeme)

    def _between_factors(self) -> bool:
        """Whether an `x` is a sign: `1.5 x 10^8`."""
        following = [lexeme for lexeme in self._lexemes[self._at : self._at + 2] if not lexeme[0].isspace()]
        return self._found != [] and self._found[-1].kind == "number" and following[:1] == ["10"]

    def _between_intervals(self) -> bool:
        following = [lexeme for lexeme in self._lexemes[self._at : self._at + 2] if not lexeme[0].isspace()]
        return self._found != [] and self._found[-1].kind in (")", "]") and following[:1] in (["("], ["["])

    def _abbreviated(self) -> bool:
        """Whether a letter follows the point, as in `p.m.`."""
        following = "".join(self._lexemes[self._at + 1 : self._at + 2])
        return len(following) == 1 and following.isascii() and following.isalpha()

    def _number(self, lexeme: str) -> None:
        """A number with its thousands and its power of ten."""
        digits, grouped = lexeme, False
        if self._thousands and "." not in lexeme and len(lexeme) <= 3 and lexeme != "0":
            start = self._at
            while "." not in digits and (found := self._more_thousands()):
                digits += found[0]
                grouped = grouped or found[1]
            if grouped and self._in_brackets():
                digits, grouped, self._at = lexeme, False, start
        if "." not in digits and self._lexemes[self._at : self._at + 2] in ([".", r"\overline"], [".", r"\dot"]):
            self._at += 1
            digits += "."
        if len(digits) > MAX_DIGITS:
            raise Monstrous(f"a number of more than {MAX_DIGITS} digits")
        value = Fraction(digits)
        value *= Fraction(10) ** self._power_of_ten()
        token = Token("number", digits, value, self._spaced, grouped, "." not in digits)
        self._spaced = False
        self._found.append(token)

    def _more_thousands(self) -> tuple[str, bool] | None:
        at = self._at
        rest = self._lexemes[at : at + 5]
        if rest[:1] and rest[0][0].isspace():
            return self._spaced_thousands(rest)
        for separator in ([","], [r"\,"], [r"\!"], [",", r"\!"], [",", r"\!", " "], ["{", ",", "}"], ["{", r"\,", "}"]):
            size = len(separator)
            if rest[:size] == separator and len(rest) > size and _THOUSANDS.fullmatch(rest[size]):
                self._at += size + 1
                return rest[size], separator == [","]
        return None

    def _spaced_thousands(self, rest: list[str]) -> tuple[str, bool] | None:
        """Of `10 000`; in `3 125/1000` the second is no part of the first."""
        following = [lexeme for lexeme in rest[2:4] if not lexeme[0].isspace()]
        if len(rest) < 2 or not _THOUSANDS.fullmatch(rest[1]) or following[:1] == ["/"]:
            return None
        self._at += 2
        return rest[1], False

    def _in_brackets(self) -> bool:
        """Whether the number fills a pair of brackets: `(12,345)` is a pair of numbers."""
        opened = bool(self._found) and self._found[-1].kind in ("(", "[")
        return opened and self._at < len(self._lexemes) and self._lexemes[self._at] in (")", "]")

    def _power_of_ten(self) -> int:
        """Of `e5`, `E-5`, `e+5` right after a number."""
        lexemes, at = self._lexemes, self._at
        if at >= len(lexemes) or lexemes[at] not in ("e", "E"):
            return 0
        signed = at + 1 < len(lexemes) and lexemes[at + 1] in ("+", "-")
        end = at + 1 + signed
        if end >= len(lexemes) or not lexemes[end].isdecimal() or not lexemes[end].isascii():
            return 0
        self._at = end + 1
        if len(lexemes[end]) > 4 or int(lexemes[end]) > MAX_EXPONENT:
            raise Monstrous("a power of ten that is too large")
        return -int(lexemes[end]) if signed and lexemes[at + 1] == "-" else int(lexemes[end])

    def _repeat(self) -> bool:
        r"""The period of a decimal, as in `0.1\overline{6}`, joined to the number before it."""
        start = self._at
        period = self._group().strip()
        before = self._found[-1]
        digits = before.text
        if (
            "." not in digits
            or not (period.isdecimal() and period.isascii())
            or len(period) + len(digits) > MAX_DIGITS
            or before.value is None
        ):
            self._at = start
            return False
        places = len(digits) - digits.index(".") - 1
        value = before.value + Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        self._found[-1] = before._replace(value=value, whole=False)
        return True
