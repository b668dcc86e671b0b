r"""Lexer of answers in LaTeX, ASCII and Unicode.

Invariant: time is linear in the length, which is limited; every token has a kind that `Token` lists.
"""

from __future__ import annotations

import re
import unicodedata

from rlkit.envs.math.answers.lexing import notation
from rlkit.envs.math.answers.lexing.cleaning import clean, is_lead_in
from rlkit.envs.math.answers.lexing.lexemes import Token, read_group, skip_blanks, split_ascii_lexemes, split_lexemes
from rlkit.envs.math.answers.lexing.numerals import OVERLINES, read_numeral, starts_repeating_decimal
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, UnsupportedError
from rlkit.envs.math.answers.lexing.words import CURRENCIES, CURRENCY_CODES, TEMPERATURES

MAX_TOKENS = 1_500


_NUMERAL = re.compile(rf"(?:[+-]|\\?\$|[€£¥₹]|(?:{'|'.join(sorted(CURRENCY_CODES))})\s*)*\.?[0-9]")
"""Beginning of a text that is a number with a suffix or unit."""

_UNIT_LETTERS = frozenset("msghl")
_OPENING = frozenset({"(", "[", "{", r"\{", ",", ";", "=", "<", ">", "≤", "≥", "≈", "∈", ":", "and", "or"})
"""Kinds of tokens before a value."""

_SEPARATING = frozenset({",", ";", "and", "or"})


def tokenize(text: str, *, thousands: bool = True) -> list[Token]:
    """Return the tokens of a text.

    Args:
        thousands: read `1,234` as one number, not two.

    Raises:
        MalformedError: a brace is missing.
        LimitError: the text or a number in it is too long.
        UnsupportedError: a command is unknown.
    """
    return _Lexer(split_lexemes(text), thousands=thousands).tokenize_all()


class _Lexer:
    def __init__(self, lexemes: list[str], *, thousands: bool) -> None:
        self._lexemes = lexemes
        self._at = 0
        self._thousands = thousands
        self._spaced = False
        self._tokens: list[Token] = []

    def tokenize_all(self) -> list[Token]:
        while self._at < len(self._lexemes):
            lexeme = self._lexemes[self._at]
            self._at += 1
            if lexeme[0].isspace():
                self._spaced = True
                continue
            self._read_lexeme(lexeme)
            if len(self._tokens) > MAX_TOKENS:
                raise LimitError(f"more than {MAX_TOKENS} tokens")
        return self._tokens

    def _read_lexeme(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of lexeme
        first = lexeme[0]
        if lexeme in notation.ELLIPSES or lexeme.startswith(".."):
            self._reject_ellipsis(is_slip=lexeme == "..")
        elif first.isdecimal() or (first == "." and len(lexeme) > 1):
            self._read_number()
        elif lexeme in notation.FRACTIONS:
            self._push(notation.FRACTIONS[lexeme], lexeme)
            self._split_numerator()
        elif lexeme in notation.ALIASES:
            self._push(notation.ALIASES[lexeme], lexeme)
        elif first == "\\":
            self._read_command(lexeme)
        elif first.isascii() and first.isalpha():
            self._read_letters(lexeme)
        elif lexeme in notation.PLAIN:
            self._read_sign(lexeme)
        elif first != "$" and unicodedata.category(first) == "Sc":
            self._push("currency", CURRENCIES.get(first, first))
        elif first in "$~":
            self._spaced = True
        elif first.isalpha():
            self._push("word", lexeme)
        elif lexeme == "." and starts_repeating_decimal(self._lexemes, self._at):
            self._read_number()
        elif unicodedata.category(first) == "Sm" or (not first.isascii() and self._tokens):
            raise UnsupportedError(f"the sign {lexeme!r}")
        elif lexeme != "." or self._lexemes[self._at :] != []:
            raise MalformedError(f"the sign {lexeme!r}")

    def _push(self, kind: str, text: str) -> None:
        self._tokens.append(Token(kind, text, spaced=self._spaced))
        self._spaced = False

    def _read_command(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of command
        name = lexeme[1:]
        if lexeme in OVERLINES:
            self._read_barred()
        elif lexeme in notation.DROPPED:
            self._spaced = self._spaced or lexeme in (r"\ ", r"\quad", r"\qquad")
        elif lexeme in notation.SKIPPED:
            self._read_group()
        elif lexeme in notation.TEXTS:
            self._read_text(self._read_group())
        elif lexeme in CURRENCIES:
            self._push("currency", CURRENCIES[lexeme])
        elif lexeme in (r"\angle", r"\measuredangle"):
            self._drop_measure()
        elif lexeme == r"\not":
            is_negated = self._lexemes[self._at : self._at + 1] == ["="]
            self._at += is_negated
            self._push("≠" if is_negated else "not", lexeme)
        elif lexeme in (r"\mathbb", r"\Bbb"):
            self._push("set", self._read_group().strip())
        elif name in notation.FUNCTIONS:
            self._push("function", notation.FUNCTIONS[name])
        elif name in notation.GREEK:
            self._push("symbol", notation.GREEK[name])
        elif lexeme in (r"\begin", r"\end"):
            self._read_environment(lexeme, self._read_group().strip())
        elif name in notation.NAMES:
            self._push("name", "P" if name == "Pr" else name)
        else:
            raise UnsupportedError(f"the command {lexeme}")

    def _read_sign(self, sign: str) -> None:
        following = "".join(self._lexemes[self._at : self._at + 1])
        if {sign, following} == {"+", "-"} and (not self._tokens or self._tokens[-1].kind in _OPENING):
            raise UnsupportedError(f"{sign}{following}, which may be two signs or ±")
        if sign == "_" and self._tokens and self._tokens[-1].kind in ("|", "‖"):
            raise UnsupportedError("an evaluation at a point, or a norm")
        self._push(sign, sign)

    def _reject_ellipsis(self, *, is_slip: bool) -> None:
        """Reject an ellipsis: after an integer it is malformed, elsewhere its meaning is unknown."""
        last_token = self._tokens[-1] if self._tokens else None
        is_at_end = skip_blanks(self._lexemes, self._at) == len(self._lexemes)
        is_last = is_at_end and _SEPARATING.isdisjoint(token.kind for token in self._tokens)
        if is_last and not is_slip and last_token and last_token.kind == "number" and last_token.text.isdecimal():
            raise MalformedError("an integer with an ellipsis")
        raise UnsupportedError("an ellipsis")

    def _drop_measure(self) -> None:
        r"""Drop the angle sign and, in `m\angle ABC`, the `m` before it."""
        if self._tokens and self._tokens[-1].kind in ("symbol", "text") and self._tokens[-1].text.strip() == "m":
            self._tokens.pop()

    def _split_numerator(self) -> None:
        r"""Split off the first character after `\frac` as its numerator: `\frac12`, `\frac1{20}`, `\frac ab`."""
        self._at = skip_blanks(self._lexemes, self._at)
        if self._at < len(self._lexemes) and len(lexeme := self._lexemes[self._at]) > 1 and lexeme[0].isalnum():
            self._lexemes[self._at : self._at + 1] = [lexeme[0], lexeme[1:]]

    def _read_environment(self, lexeme: str, name: str) -> None:
        if name not in notation.ENVIRONMENTS:
            raise UnsupportedError(f"the environment {name}")
        self._push("begin" if lexeme == r"\begin" else "end", name)
        if name == "array" and lexeme == r"\begin":
            self._read_group()

    def _read_group(self) -> str:
        """Read the text in the next braces, or the next lexeme."""
        content, self._at = read_group(self._lexemes, self._at)
        return content

    def _read_barred(self) -> None:
        """Read a barred letter as a letter of its own; ignore a bar over several letters; reject a bar over digits."""
        start = self._at
        content = self._read_group().strip()
        if content.replace(".", "").isdecimal():
            raise UnsupportedError("a bar over a number")
        if len(content) == 1 and content.isalpha():
            self._push("symbol", content + "bar")
        else:
            self._at = start

    def _read_text(self, content: str) -> None:
        """Read a text as a formula if it begins with a number or is a letter, and otherwise as one token."""
        stripped = content.strip()
        if stripped in notation.FUNCTIONS:
            self._push("function", notation.FUNCTIONS[stripped])
        elif stripped in notation.TEXT_SIGNS:
            self._push(notation.TEXT_SIGNS[stripped], stripped)
        elif stripped.startswith("$") and stripped.endswith("$"):
            self._lexemes[self._at : self._at] = split_ascii_lexemes(stripped.strip("$"))
        elif stripped in CURRENCY_CODES or stripped in CURRENCIES:
            self._push("currency", CURRENCIES.get(stripped, stripped))
        elif stripped in TEMPERATURES and self._is_after_degrees():
            self._push("text", TEMPERATURES[stripped])
        elif not self._tokens and is_lead_in(stripped):
            self._spaced = True
        elif not self._tokens and (cleaned := clean(stripped)) != stripped and _NUMERAL.match(cleaned):
            self._lexemes[self._at : self._at] = split_ascii_lexemes(cleaned)
        elif _NUMERAL.match(stripped) or (len(stripped) == 1 and stripped.islower() and stripped not in _UNIT_LETTERS):
            self._lexemes[self._at : self._at] = split_ascii_lexemes(stripped)
        elif stripped and stripped != ".":
            self._push("text", content)

    def _read_letters(self, lexeme: str) -> None:  # noqa: PLR0912  one for each kind of word
        while self._lexemes[self._at : self._at + 1] == ["."] and self._is_abbreviation():
            lexeme += self._lexemes[self._at + 1]
            self._at += 2
        lower = lexeme.lower()
        if lower in notation.ORDINALS and not self._spaced and self._tokens and self._tokens[-1].kind == "number":
            return  # `12th`
        if lexeme in notation.FUNCTIONS:
            self._push("function", notation.FUNCTIONS[lexeme])
        elif lexeme[:-1] in notation.FUNCTIONS and lexeme[-1] in "xyz":
            self._push("function", notation.FUNCTIONS[lexeme[:-1]])
            self._push("symbol", lexeme[-1])
        elif lower == "pi":
            self._push("symbol", "π")
        elif (kind := notation.WORDS.get(lexeme) or notation.WORDS_IN_ANY_CASE.get(lower)) is not None:
            self._push(kind, lexeme)
        elif lexeme in notation.GREEK:
            self._push("symbol", notation.GREEK[lexeme])
        elif lexeme in CURRENCY_CODES and self._is_beside_number():
            self._push("currency", lexeme)
        elif lexeme == "x" and self._is_between(("number",), ("10",)):  # `1.5 x 10^8`
            self._push("*", lexeme)
        elif lexeme == "U" and self._is_between((")", "]"), ("(", "[")):
            self._push("∪", lexeme)
        elif lexeme in TEMPERATURES and self._is_after_degrees():
            self._push("text", TEMPERATURES[lexeme])
        elif len(lexeme) == 1:
            self._push("symbol", lexeme)
        else:
            self._push("word", lexeme)

    def _is_between(self, kinds: tuple[str, ...], lexemes: tuple[str, ...]) -> bool:
        """Tell whether a letter is a sign: it follows one of the kinds and precedes one of the lexemes."""
        following = [lexeme for lexeme in self._lexemes[self._at : self._at + 2] if not lexeme[0].isspace()]
        return bool(self._tokens and following) and self._tokens[-1].kind in kinds and following[0] in lexemes

    def _is_after_degrees(self) -> bool:
        kinds = [token.kind for token in self._tokens[-2:]]
        return kinds[-1:] in (["°"], [r"\circ"]) or kinds == [r"\circ", "}"]

    def _is_beside_number(self) -> bool:
        """Tell whether letters beside a number are a currency, unlike those of `\\angle CAD`."""
        at = skip_blanks(self._lexemes, self._at)
        following = "".join(self._lexemes[at : at + 2]).lstrip("~-.")
        return following[:1].isdecimal() or (self._tokens != [] and self._tokens[-1].kind == "number")

    def _is_abbreviation(self) -> bool:
        """Tell whether a letter follows the point, as in `p.m.`."""
        following = "".join(self._lexemes[self._at + 1 : self._at + 2])
        return len(following) == 1 and following.isascii() and following.isalpha()

    def _read_number(self) -> None:
        """Read the number that begins with the previous lexeme."""
        is_opened = bool(self._tokens) and self._tokens[-1].kind in ("(", "[")
        number, self._at = read_numeral(self._lexemes, self._at - 1, thousands=self._thousands, is_opened=is_opened)
        self._tokens.append(number._replace(spaced=self._spaced))
        self._spaced = False
