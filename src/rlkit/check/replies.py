"""Replies of the scripted model in a check.

Invariant: every reply is text that a tokenizer can produce: lone surrogates appear only as JSON escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import BaseModel, Field, JsonValue

from rlkit._util.files.json_fields import pick, pick_list, pick_object
from rlkit._util.sections import validate_fields
from rlkit.errors import UsageError
from rlkit.testing.policies import render_call
from rlkit.types import Json, Tool

PLAIN = "42"
"""An ordinary reply, most likely wrong."""

EMPTY = ("", " \n", "<think></think>")
"""Replies without an answer."""

MADE_UP_CALL = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'

THOUGHTFUL = "<think>\nLet me see.\n</think>\n\n  42  "
"""A reply with thinking and white space, which an environment loses if it keeps only the text."""

NUMBERS = (
    "1" * 5_000, "9**9**9", "1e999", "-1e999", "nan", "-inf", "Infinity", "0/0", "1/0", "½", "²", "٣", "－１", "1_000",
    "1,000", "0x1F", "--1", "+", ".", "1.2.3", "%", "\\boxed{", "\\boxed{}", "\\boxed{42", "\\boxed{\\frac{1}{0}}",
    "\\frac{1}", "$$", "\\sqrt{-1}", "\\", "}{",
)  # fmt: skip

JSON = (
    '{"answer": ', '{"answer": NaN}', '{"answer": 1e999}', "[]", "{}", "null", "true", '"\\ud800"', '{"a":' * 200,
    "[" * 2_000, "(" * 500,
)  # fmt: skip

MARKUP = (
    "<think>", "</think>", "<think>never closed", "<think>a</think><think>b</think>", "<tool_call>", "</tool_call>",
    "<tool_call>{}</tool_call>", '<tool_call>{"name": 3, "arguments": []}</tool_call>', "<tool_call>[1]</tool_call>",
    '<tool_call>{"name": "no_such_tool", "arguments": {}}', "<tool_call><tool_call>",
    '<tool_call>{"name": "\\ud800", "arguments": {"a": 1e999}}</tool_call>', "<answer>", "</answer><answer>",
    "<answer></answer>", "```", "```python\n", "```python\nwhile",
)  # fmt: skip

TEXT = (
    "x" * 50_000, "word " * 5_000, "\x00", "\x1b[31mred", "\u202eleft", "\ufeff1", "\ufffd\ufffd", "e\u0301", "\u2028",
    "🙂👩‍👩‍👧", "日本語", "a\r\nb\rc", "a\tb", "'", '"', "--", "%s %d {} {0}", "../../etc/passwd", "$(id)",
)  # fmt: skip

ODD = (*NUMBERS, *JSON, *MARKUP, *TEXT)
"""Replies that are difficult for graders: numbers out of range, broken notation, bare markup, unusual characters."""


def write_tool_calls(tools: Sequence[Tool]) -> list[str]:
    """Return tool calls in a model's format: with valid arguments, without arguments, and with arguments of wrong
    types."""
    pairs = [(tool["name"], arguments) for tool in tools for arguments in _make_arguments(tool["parameters"])]
    return [render_call(name, arguments) for name, arguments in pairs]


def write_replies(messages: object) -> tuple[str, ...]:
    """Return the assistant's messages as a model writes them: the text of each, then its tool calls.

    Raises:
        UsageError: a message is ill-formed.
    """
    if not isinstance(messages, list | tuple):
        return ()
    items = enumerate(cast("Sequence[object]", messages))
    return tuple(_write_reply(place, item) for place, item in items if not _has_other_role(item))


def _has_other_role(item: object) -> bool:
    return isinstance(item, Mapping) and cast("Mapping[str, object]", item).get("role") != "assistant"


def _write_reply(place: int, message: object) -> str:
    try:
        reply = validate_fields(_Reply, message, place=f"gold.{place}")
    except UsageError as error:
        form = '{"role": "assistant", "content": "…", "tool_calls": [{"name": "…", "arguments": {…}}]}'
        raise UsageError(f"{error}; write a message as {form}") from None
    calls = [render_call(call.name, call.arguments) for call in reply.tool_calls]
    return "\n".join([*([reply.content] if reply.content else []), *calls])


class _Call(BaseModel):
    name: str
    arguments: dict[str, JsonValue]


class _Reply(BaseModel):
    content: str
    tool_calls: list[_Call] = Field(default_factory=list[_Call])


def _make_arguments(schema: Mapping[str, Json]) -> list[dict[str, Json]]:
    fields = pick_object(schema, "properties")
    return [{name: _make_value(field) for name, field in fields.items()}, {}, {name: [None] for name in fields}]


def _make_value(field: object) -> Json:
    samples: dict[str, Json] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return [*pick_list(field, "enum"), samples.get(pick(field, "type", str) or "", "a")][0]
