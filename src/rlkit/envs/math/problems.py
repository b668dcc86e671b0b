r"""Problems read from the rows of a table.

Invariant: an answer comes from its row and is never guessed; a row without a question or an answer is counted and
skipped.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rlkit.envs.math.catalogue import Columns
from rlkit.envs.math.grader import final_answer
from rlkit.envs.math.table_files import Row
from rlkit.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True)
class Problem:
    """Question with its right answer.

    Args:
        answer: gold answer as its author wrote it.
        place: index of the row in the whole dataset, from 0.
        level: difficulty as the dataset states it.
    """

    question: str
    answer: str
    place: int
    level: str | None = None
    subject: str | None = None

    @property
    def difficulty(self) -> float | None:
        """Level as a number: `Level 3` is 3, and `3/8` is 0.375."""
        match = _LEVEL.search(self.level or "")
        if match is None:
            return None
        denominator = float(match[2] or 1)
        return float(match[1]) / denominator if denominator else None


_LEVEL = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?")

_SPACING = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|quad|qquad)\b|\\[,;:!> ]|[\s$~{}]+")
"""Notation that changes only the layout of a question."""


def normalise_question(question: str) -> str:
    r"""Return a question in a normal form, equal for questions that differ only in case and layout.

    Case is folded; spaces, dollar signs, braces and LaTeX for layout are removed; `\dfrac` and `\tfrac` become
    `\frac`. Operators and numbers stay, since they distinguish problems.
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    text = re.sub(r"\\[dt]frac\b", r"\\frac", text)
    return _SPACING.sub("", text).rstrip(".?!:")


def read_problems(rows: Iterable[Row], columns: Columns, *, where: str) -> Iterator[Problem | None]:
    """Yield the problems of a table, None for each row without a question or an answer.

    Args:
        where: name of the table in messages.

    Raises:
        UsageError: the table lacks a column, or one of them holds neither text nor numbers.
    """
    place = 0
    for row in rows:
        if place == 0:
            _check_columns(row, columns, where)
        if columns.only is not None and not _contains(row.get(columns.only[0]), columns.only[1]):
            continue
        for column in (columns.question, columns.answer):
            _check_values(row.get(column), column, where)
        question = _to_text(row.get(columns.question)).removeprefix(columns.speaker).strip()
        answer = _read_gold(row.get(columns.answer), columns)
        level, subject = (_to_text(column and row.get(column)) or None for column in (columns.level, columns.subject))
        yield Problem(question, answer, place, level, subject) if question and answer else None
        place += 1


def _check_columns(row: Row, columns: Columns, where: str) -> None:
    for column in columns.names:
        if column not in row:
            columns_there = ", ".join(map(str, row)) or "none"
            raise UsageError(f"{where} has no column {column!r}.{did_you_mean(column, row)} It has: {columns_there}")


def _check_values(value: object, column: str, where: str) -> None:
    """Reject objects without `content`, alone or in a list, since they hold no text."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    first = values[0] if values else None
    if isinstance(first, Mapping) and "content" not in first:
        fields = ", ".join(map(str, cast("Mapping[object, object]", first)))
        raise UsageError(f"{where}: the column {column!r} holds objects with {fields}; it must hold text or numbers")


def _contains(value: object, text: str) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return text in cast("Sequence[object]", value)
    return text in str(value)


def _to_text(value: object) -> str:  # noqa: PLR0911  one for each kind of value
    """Return a value as text; for a list its first item, for a conversation the user's last message."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):  # tables write NaN for a missing value
        return ""
    if isinstance(value, bytes):
        return value.decode(errors="replace").strip()
    if isinstance(value, Mapping):
        return _to_text(cast("Mapping[str, object]", value).get("content"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = cast("Sequence[object]", value)
        if items and isinstance(items[0], Mapping):
            messages = cast("Sequence[Mapping[str, object]]", items)
            return next((_to_text(message) for message in reversed(messages) if message.get("role") == "user"), "")
        return _to_text(items[0]) if items else ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _read_gold(value: object, columns: Columns) -> str:
    text = _to_text(value)
    if columns.gold == "boxed":
        return (final_answer(text, boxed_only=True) or "").strip()
    if columns.gold == "hash":
        _, mark, after = text.rpartition("####")
        return after.strip() if mark else ""
    return text
