"""Rows of the pages, made from the records of other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlkit._util.files.json_fields import pick, pick_list, pick_object, pick_rows
from rlkit.view.records.reader import Row

_MEMBER = ("reward", "advantage", "tokens", "turns", "seconds", "cut", "versions")
_TURN = ("version", "stop", "reward", "seconds", "trainer_logprobs", "advantages", "datum")
_TOKENS = ("prompt", "completion", "sampled", "logprobs", "images")


def make_member(*, error: str | None, is_truncated: bool, **fields: object) -> Row:
    """Return an episode as a member of its group; it failed if there is an error."""
    status = "failed" if error else "truncated" if is_truncated else "completed"
    row: Row = {"attempt": 0, "status": status, "masked": False, "metrics": {}, "error": error and error.split("\n")[0]}
    return {**dict.fromkeys(_MEMBER), **row, **fields}


def make_turn(messages: Sequence[Row], *, index: int, **fields: object) -> Row:
    """Return turn `index` without tokens; the last message that it adds is its reply if the role is `assistant`."""
    row: Row = {"parent": index - 1 if index else None, "messages": list(messages)}
    if messages and messages[-1]["role"] == "assistant":
        row["messages"][-1] = {**messages[-1], "turn": index}
    return {**dict.fromkeys(_TURN), **{name: [] for name in _TOKENS}, **row, **fields}


def split_turns(messages: Sequence[Row]) -> list[Row]:
    """Return a conversation as turns, each of which ends with a reply; messages may follow the last one."""
    ends = {index for index, message in enumerate(messages, 1) if message["role"] == "assistant"} | {len(messages)}
    places = pairwise(sorted({0, *ends}))
    return [make_turn(messages[start:end], index=index) for index, (start, end) in enumerate(places)]


def make_message(source: Row) -> Row:
    """Return a message of any of the tools."""
    parts, thinking = list[Row](), [pick(source, "reasoning_content", str)]
    for part in pick_rows(source, "content"):
        if part.get("type") in ("reasoning", "thinking"):
            thinking.append(pick(part, "reasoning", str) or pick(part, "thinking", str))
        elif image := pick(part, "image", str) or pick(part, "image_url.url", str):
            parts.append({"type": "image", "image": image})
        else:
            text = pick(part, "text", str)
            parts.append({"type": "text", "text": json.dumps(part) if text is None else text})
    extras = {
        "thinking": "\n".join(filter(None, thinking)),
        "tool_calls": [_make_call(call) for call in pick_list(source, "tool_calls")],
        "tool_call_id": pick(source, "tool_call_id", str),
        "name": pick(source, "name", str),
    }
    message = {"role": pick(source, "role", str) or "", "content": parts or pick(source, "content", str) or ""}
    return message | {name: value for name, value in extras.items() if value}


def _make_call(call: object) -> Row:
    if isinstance(call, str):  # verifiers before 0.4 writes a call as text
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            call = {"arguments": call}
    function = pick_object(call, "function") or call  # inspect_ai has the name in its place
    name, arguments = pick(function, "name", str) or pick(call, "function", str), pick(function, "arguments", object)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": pick(call, "id", str), "name": name, "arguments": text}


def list_settings(config: Mapping[str, Any]) -> list[list[str]]:
    """Return a configuration as rows of name, text and origin."""
    return [[name, value if isinstance(value, str) else json.dumps(value), ""] for name, value in config.items()]
