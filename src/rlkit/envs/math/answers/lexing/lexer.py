r"""From text to tokens: LaTeX, ASCII and Unicode alike.

Invariant: time in proportion to the length, which is limited; every token but a text's is one of the known `kind`s.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from rlkit.envs.math.answers.lexing.cleaning import cleaned, leads_in
from rlkit.envs.math.answers.lexing.delimiters import without_empty_delimiters
from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous, Unreadable
from rlkit.envs.math.answers.lexing.lexemes import after_blanks, group, lexemes, split
from rlkit.envs.math.answers.lexing.notation import (
    ALIASES,
    CURRENCY_COMMANDS,
    DROPPED,
    ELLIPSES,
    ENVIRONMENTS,
    FRACTIONS,
    FUNCTIONS,
    GREEK,
    NAMES,
    PLAIN,
    SKIPPED,
    TEXTS,
    WORDS,
)
from rlkit.envs.math.answers.lexing.numerals import OVERLINES, numeral, starts_period
from rlkit.envs.math.answers.lexing.words import CURRENCIES, CURRENCY_CODES, TEMPERATURES

MAX_TOKENS = 1_500


class Token(NamedTuple):
    """One token.

    Args:
        kind: `number`, `symbol`, `word`, `text`, `function`, `name`, `set`, `currency`, or the sign itself.
        text: as it is written; of a `text`, its content.
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


_NUMERAL = re.compile(rf"(?:[+-]|\\?\$|[€£¥₹]|(?:{'|'.join(sorted(CURRENCY_CODES))})\s*)*\.?[0-9]")
"""A text that begins so is a number with what may stand behind one."""

_UNIT_LETTERS = frozenset("msghl")
_OPENING = frozenset({"(", "[", "{", r"\{", ",", ";", "=", "<", ">", "≤", "≥", "≈", "∈", ":", "and", "or"})
"""After these a value begins."""

_SEPARATING = frozenset({",", ";", "and", "or"})


def tokens(text: str, *, thousands: bool = True) -> list[Token]:
    """The tokens of a text.

    Args:
        thousands: `1,234` is one number; otherwise it is two.

    Raises:
        Malformed: a brace is missing.
        Monstrous: it is too long, or a number in it is.
        Unreadable: a command is not known.
    """
    return _Reader(without_empty_delimiters(lexemes(text)), thousands=thousands).read()


class _Reader:
    def __init__(self, found: list[str], *, thousands: bool) -> None:
        self._lexemes = found
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

    def _take(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of lexeme
        first = lexeme[0]
        if lexeme in ELLIPSES or lexeme.startswith(".."):
            self._ellipsis(slip=lexeme == "..")
        elif first.isdecimal() or (first == "." and len(lexeme) > 1):
            self._number()
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
            self._sign(lexeme)
        elif first != "$" and unicodedata.category(first) == "Sc":
            self._push("currency", CURRENCIES.get(first, first))
        elif first in "$~":
            self._spaced = True
        elif first.isalpha():
            self._push("word", lexeme)
        elif lexeme == "." and starts_period(self._lexemes, self._at):
            self._number()
        elif unicodedata.category(first) == "Sm" or (not first.isascii() and self._found):
            raise Unreadable(f"the sign {lexeme!r}")
        elif lexeme != "." or self._lexemes[self._at :] != []:
            raise Malformed(f"the sign {lexeme!r}")

    def _push(self, kind: str, text: str) -> None:
        self._found.append(Token(kind, text, spaced=self._spaced))
        self._spaced = False

    def _command(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of command
        name = lexeme[1:]
        if lexeme in OVERLINES:
            self._barred()
        elif lexeme in DROPPED:
            self._spaced = self._spaced or lexeme in (r"\ ", r"\quad", r"\qquad")
        elif lexeme in SKIPPED:
            self._group()
        elif lexeme in TEXTS:
            self._text(self._group())
        elif lexeme in CURRENCY_COMMANDS:
            self._push("currency", CURRENCIES[CURRENCY_COMMANDS[lexeme]])
        elif lexeme in (r"\angle", r"\measuredangle"):
            self._angle()
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
        elif name in NAMES:
            self._push("name", "P" if name == "Pr" else name)
        else:
            raise Unreadable(f"the command {lexeme}")

    def _sign(self, sign: str) -> None:
        following = "".join(self._lexemes[self._at : self._at + 1])
        if {sign, following} == {"+", "-"} and (not self._found or self._found[-1].kind in _OPENING):
            raise Unreadable(f"{sign}{following}, which may be two signs or ±")
        if sign == "_" and self._found and self._found[-1].kind in ("|", "‖"):
            raise Unreadable("a value at a place, or a norm")
        self._push(sign, sign)

    def _ellipsis(self, *, slip: bool) -> None:
        """No integer goes on; what a decimal or a list goes on with is not known, nor what two full stops mean."""
        last = self._found[-1] if self._found else None
        at_end = after_blanks(self._lexemes, self._at) == len(self._lexemes)
        alone = at_end and _SEPARATING.isdisjoint(token.kind for token in self._found)
        if alone and not slip and last is not None and last.kind == "number" and last.whole:
            raise Malformed("an integer that goes on")
        raise Unreadable("what goes on")

    def _angle(self) -> None:
        r"""The sign says nothing about the answer, nor does the `m` of `m\angle ABC`, its measure."""
        if self._found and self._found[-1].kind in ("symbol", "text") and self._found[-1].text.strip() == "m":
            self._found.pop()

    def _split(self) -> None:
        r"""The first of what follows `\frac` is the numerator, as TeX has it: `\frac12`, `\frac1{20}`, `\frac ab`."""
        self._at = after_blanks(self._lexemes, self._at)
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
        inside, self._at = group(self._lexemes, self._at)
        return inside

    def _barred(self) -> None:
        """A letter with a bar is another letter; a bar over several says nothing, and one over digits is not known."""
        start = self._at
        barred = self._group().strip()
        if barred.replace(".", "").isdecimal():
            raise Unreadable("a bar over a number")
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
            self._lexemes[self._at : self._at] = split(stripped.strip("$"))
        elif stripped in CURRENCY_CODES or stripped in CURRENCY_COMMANDS or stripped in CURRENCIES:
            name = CURRENCY_COMMANDS.get(stripped, stripped)
            self._push("currency", CURRENCIES.get(name, name))
        elif stripped in TEMPERATURES and self._after_degrees():
            self._push("text", TEMPERATURES[stripped])
        elif stripped == "to":
            self._push(":", stripped)
        elif stripped in ("%", r"\%", "percent"):
            self._push("%", stripped)
        elif not self._found and leads_in(stripped):
            self._spaced = True
        elif not self._found and (bare := cleaned(stripped)) != stripped and _NUMERAL.match(bare):
            self._lexemes[self._at : self._at] = split(bare)
        elif _NUMERAL.match(stripped) or (len(stripped) == 1 and stripped.islower() and stripped not in _UNIT_LETTERS):
            self._lexemes[self._at : self._at] = split(stripped)
        elif stripped and stripped != ".":
            self._push("text", content)

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
        elif lexeme in CURRENCY_CODES and self._beside_number():
            self._push("currency", lexeme)
        elif lexeme == "x" and self._stands_between(("number",), ("10",)):  # `1.5 x 10^8`
            self._push("*", lexeme)
        elif lower == "union" or (lexeme == "U" and self._stands_between((")", "]"), ("(", "["))):
            self._push("∪", lexeme)
        elif lower == "to":
            self._push(":", lexeme)
        elif lexeme in TEMPERATURES and self._after_degrees():
            self._push("text", TEMPERATURES[lexeme])
        elif len(lexeme) == 1:
            self._push("symbol", lexeme)
        else:
            self._push("word", lexeme)

    def _stands_between(self, kinds: tuple[str, ...], lexemes: tuple[str, ...]) -> bool:
        """Tell whether a letter is a sign, since it stands after one of the kinds and before one of the lexemes."""
        following = [lexeme for lexeme in self._lexemes[self._at : self._at + 2] if not lexeme[0].isspace()]
        return bool(self._found and following) and self._found[-1].kind in kinds and following[0] in lexemes

    def _after_degrees(self) -> bool:
        kinds = [token.kind for token in self._found[-2:]]
        return kinds[-1:] in (["°"], [r"\circ"]) or kinds == [r"\circ", "}"]

    def _beside_number(self) -> bool:
        """Whether letters are a currency: those of `\\angle CAD` are none."""
        at = after_blanks(self._lexemes, self._at)
        following = "".join(self._lexemes[at : at + 2]).lstrip("~-.")
        return following[:1].isdecimal() or (self._found != [] and self._found[-1].kind == "number")

    def _abbreviated(self) -> bool:
        """Whether a letter follows the point, as in `p.m.`."""
        following = "".join(self._lexemes[self._at + 1 : self._at + 2])
        return len(following) == 1 and following.isascii() and following.isalpha()

    def _number(self) -> None:
        """The number that begins with the last lexeme."""
        opened = bool(self._found) and self._found[-1].kind in ("(", "[")
        number = numeral(self._lexemes, self._at - 1, thousands=self._thousands, opened=opened)
        self._found.append(Token("number", number.text, number.value, self._spaced, number.grouped, number.whole))
        self._at = number.end
        self._spaced = False
