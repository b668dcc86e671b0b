r"""Rows of a table, read as problems.

Invariant: a problem's answer is what its row says, and nothing is guessed: a row without a question or an answer is
counted and left out.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rlkit.envs.math.catalogue import Columns
from rlkit.envs.math.files import Row
from rlkit.envs.math.grader import final_answer
from rlkit.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its right answer.

    Args:
        answer: the gold, as its author wrote it.
        place: the row, counted from 0 over the whole dataset.
        level: how hard it is, in the dataset's own words.
    """

    question: str
    answer: str
    place: int
    level: str | None = None
    subject: str | None = None

    @property
    def difficulty(self) -> float | None:
        """The level as a number: `Level 3` is 3, and `3/8` is 0.375."""
        found = _LEVEL.search(self.level or "")
        if found is None:
            return None
        below = float(found[2] or 1)
        return float(found[1]) / below if below else None


_LEVEL = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?")

_SPACING = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|quad|qquad)\b|\\[,;:!> ]|[\s$~{}]+")
"""What changes how a question looks and not what it asks."""


def normalised(question: str) -> str:
    r"""A question in a form in which two that ask the same in the same words are equal.

    Letters of one case, no spaces, dollar signs or braces, no LaTeX that only lays out, and `\dfrac` and `\tfrac` as
    `\frac`. Operators and numbers stay: they are what tells one problem from the next.
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    text = re.sub(r"\\[dt]frac\b", r"\\frac", text)
    return _SPACING.sub("", text).rstrip(".?!:")


def read_problems(rows: Iterable[Row], columns: Columns, *, where: str) -> Iterator[Problem | None]:
    """The problems of a table, None for each row that has no question or no answer.

    Args:
        where: the table, for messages.

    Raises:
        UsageError: the table lacks a column, or one of them holds neither text nor numbers.
    """
    place = 0
    for row in rows:
        if place == 0:
            _check(row, columns, where)
        if columns.only is not None and not _holds(row.get(columns.only[0]), columns.only[1]):
            continue
        for column in (columns.question, columns.answer):
            _check_kind(row.get(column), column, where)
        question, answer = _question(row, columns), _gold(row.get(columns.answer), columns)
        if question and answer:
            yield Problem(
                question, answer, place, _label(row, columns.level) or None, _label(row, columns.subject) or None
            )
        else:
            yield None
        place += 1


def _check(row: Row, columns: Columns, where: str) -> None:
    for column in columns.used:
        if column not in row:
            known = ", ".join(map(str, row)) or "none"
            raise UsageError(f"{where} has no column {column!r}.{did_you_mean(column, row)} It has: {known}")


def _check_kind(value: object, column: str, where: str) -> None:
    """Refuse what no text can be read from: objects that are no messages, alone or in a list."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    first = values[0] if values else None
    if isinstance(first, Mapping) and "content" not in first:
        fields = ", ".join(map(str, cast("Mapping[object, object]", first)))
        raise UsageError(f"{where}: the column {column!r} holds objects with {fields}, where texts or numbers are read")


def _question(row: Row, columns: Columns) -> str:
    return _text(row.get(columns.question)).removeprefix(columns.speaker).strip()


def _holds(value: object, wanted: str) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return wanted in cast("Sequence[object]", value)
    return wanted in str(value)


def _label(row: Row, column: str | None) -> str:
    return "" if column is None else _text(row.get(column))


def _text(value: object) -> str:  # noqa: PLR0911  one for each kind of value
    """A value as text; of a list, the first; of a conversation, what the user says last."""
    if value is None or (
        isinstance(value, float) and not math.isfinite(value)
    ):  # NaN is how tables say that none is there
        return ""
    if isinstance(value, bytes):
        return value.decode(errors="replace").strip()
    if isinstance(value, Mapping):
        return _text(cast("Mapping[str, object]", value).get("content"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = cast("Sequence[object]", value)
        if items and isinstance(items[0], Mapping):
            said = [one for one in cast("Sequence[Mapping[str, object]]", items) if one.get("role") == "user"]
            return _text(said[-1]) if said else ""
        return _text(items[0]) if items else ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _gold(value: object, columns: Columns) -> str:
    text = _text(value)
    if columns.gold == "boxed":
        return (final_answer(text, boxed_only=True) or "").strip()
    if columns.gold == "hash":
        _, mark, after = text.rpartition("####")
        return after.strip() if mark else ""
    return text
