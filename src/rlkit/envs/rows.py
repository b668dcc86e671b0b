"""Rows of a table as tasks: a prompt, an answer and a grader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, TypedDict, cast

from pydantic import Field, TypeAdapter, ValidationError

from rlkit.env import SingleTurnEnv
from rlkit.envs.math.table_files import Row, read_rows
from rlkit.errors import UsageError, did_you_mean
from rlkit.types import Message, Outcome, Reply

type Grader = Callable[..., Outcome | float]


class _Message(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


type _Prompt = str | Annotated[list[_Message], Field(min_length=1)]

_PROMPT = TypeAdapter[_Prompt](_Prompt)

_COLUMN = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_ROWS_MAX = 2**62  # far above any file


@dataclass(frozen=True)
class RowTask(SingleTurnEnv):
    """A task of one prompt and one reply."""

    task_id: str
    # Text or messages.
    question: str | Sequence[Message]
    # The answer, or the row if there is no column of answers.
    answer: object
    grader: Grader | None
    # A reply that earns the full reward.
    gold: str | None

    @property
    def content(self) -> str:
        """The prompt as text, so that a row that is evaluated is not trained on."""
        return self.question if isinstance(self.question, str) else json.dumps(self.question)

    def prompt(self) -> str | Sequence[Message]:
        """Return the messages, or the text to complete."""
        return self.question

    def grade(self, reply: Reply) -> Outcome | float:
        """Return the reward of the grader, or 1 for a reply equal to the answer."""
        if self.grader is None:
            return float(reply.text.strip() == str(self.answer).strip())
        return self.grader(reply.text, self.answer)


def rows(
    *,
    path: Path,
    prompt: str = "prompt",
    answer: str | None = None,
    grader: Grader | None = None,
    gold: str | None = None,
    system: str | None = None,
    chat: bool = True,
    start: Annotated[int, Field(ge=0, le=_ROWS_MAX)] = 0,
    stop: Annotated[int, Field(ge=1, le=_ROWS_MAX)] | None = None,
) -> list[RowTask]:
    """Return the rows of a file as tasks.

    Args:
        path: `.jsonl`, `.ndjson`, `.json`, `.parquet`, `.csv` or `.tsv`.
        prompt: column of the prompt, a text or a list of messages; or a text with columns in braces.
        answer: column of the answer.
        grader: function of the reply's text and the answer (the row, without `answer`) that returns the reward. By
            default the reply must equal the answer.
        gold: column of a reply that earns the full reward of the grader, for `rlkit check`.
        system: system prompt before a prompt that is a text.
        chat: false lets the model continue the prompt as plain text, without its chat template.
        start, stop: first row, and the row after the last one, from 0.

    Raises:
        UsageError: the file cannot be read, a row lacks a column, or there is nothing to reward or no row.
    """
    if answer is None and grader is None:
        raise UsageError("answer: set it to the column of the answer, or set grader")
    if gold is not None and grader is None:
        raise UsageError("gold: it has no effect without grader, because the answer is the gold reply")
    if system is not None and not chat:
        raise UsageError("system: it has no effect without the chat template; leave out chat: false")
    if grader is not None:
        _check_parameters(grader)
    prefix: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    tasks = list[RowTask]()
    for number, row in enumerate(islice(read_rows(path), start, stop), start):
        where = f"row {number} (counted from 0) of {path}"
        question = _read_prompt(row, prompt, where)
        if chat and isinstance(question, str):
            user: Message = {"role": "user", "content": question}
            question = [*prefix, user]
        expected = row if answer is None else _find_value(row, answer, "answer", where)
        gold_reply = None
        if grader is None:
            gold_reply = str(expected)
        elif gold is not None:
            gold_reply = str(_find_value(row, gold, "gold", where))
        tasks.append(RowTask(f"{path.stem}-{number}", question, expected, grader, gold_reply))
    if not tasks:
        end = f" and before {stop}" if stop else ""
        raise UsageError(f"path: {path} has no row from {start} on{end}, besides its header if it has one")
    return tasks


def _check_parameters(grader: Grader) -> None:
    with suppress(ValueError):  # a built-in function may have no signature
        try:
            signature(grader).bind("", "")
        except TypeError as error:
            raise UsageError(f"grader: it must take the reply's text and the answer: {error}") from None


def _read_prompt(row: Row, prompt: str, where: str) -> str | Sequence[Message]:
    if _COLUMN.search(prompt):
        return _COLUMN.sub(lambda match: _fill(match, row, where), prompt)
    value = _find_value(row, prompt, "prompt", where)
    try:
        return cast("str | list[Message]", _PROMPT.validate_python(value, strict=True))
    except ValidationError:
        kind = "neither a text nor a list of messages, each with a role and a text as content"
        raise UsageError(f"prompt: the column {prompt!r} of {where} is {kind}") from None


def _fill(match: re.Match[str], row: Row, where: str) -> str:
    """Return the value of a column of a template; `{{` and `}}` are braces."""
    if match[1] is None:
        return match[0][0]
    value = _find_value(row, match[1], "prompt", where, hint=" (write a brace as {{ or }})")
    if not isinstance(value, str | int | float):
        raise UsageError(f"prompt: {match[1]!r} of {where} is neither a text nor a number")
    return str(value)


def _find_value(row: Row, column: str, argument: str, where: str, *, hint: str = "") -> object:
    value = row.get(column)
    if value is None and column in row:
        raise UsageError(f"{argument}: {where} has an empty {column!r}: fill it in, or remove the row")
    if value is None:
        columns = [str(name) for name in row]
        near = did_you_mean(column, columns) or f" Columns: {', '.join(columns)}"
        raise UsageError(f"{argument}: {where} has no column {column!r}{hint}.{near}")
    return value
