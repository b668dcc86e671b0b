"""The rubric of a judge: its prompt, and the reading of its verdict.

Invariant: the value of a field is text alone: it fills no other field, and holds no special token of a chat format. A
verdict is read from the last line alone, to which a closing fence does not belong, and only if every number is within
the scale.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from rlkit.errors import UsageError

FIELD_CHARS = 50_000  # limit of the characters of a field; a longer one loses its middle
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_SPECIAL_TOKEN = re.compile(
    r"<(?=[|｜])|<(?=/?(?:s|bos|eos|pad|unk|think|im_start|im_end|start_of_turn|end_of_turn|tool_call)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|THINK)\])"
)
"""First character of a special token, which tokenizers read in plain text too."""
_NUMBER, _MARKS = r"-?\d+(?:\.\d+)?", r"[*`\s]*"
_LINE = re.compile(
    rf"[#-]*{_MARKS}(?:final\s+)?(scores?){_MARKS}:{_MARKS}({_NUMBER}(?:\s*,\s*{_NUMBER})*){_MARKS}(?:\.{_MARKS})?",
    re.IGNORECASE,
)
"""Verdict in words; it may be a heading, in a list, bold or code, and end with a full stop."""


def read_field_names(prompt: str) -> set[str]:
    """Return the names of a prompt's fields, without `mark`; braces around anything else are text."""
    return set(_FIELD.findall(prompt)) - {"mark"}


def fill_prompt(prompt: str, fields: Mapping[str, str], replies: Sequence[str] | None) -> str:
    """Fill the fields of a prompt, and `{replies}` with the replies of a comparison; UsageError if they do not fit."""
    names = read_field_names(prompt) - (set() if replies is None else {"replies"})
    if names != set(fields) or not all(isinstance(cast("object", value), str) for value in fields.values()):
        raise UsageError(f"judge: needs a text for each of the fields {sorted(names)}, not {fields!r:.200}")
    mark = hash_text([sorted(fields.items()), replies])[:12]
    blocks = (f"[reply {i} {mark}]\n{_clean(r)}\n[end of reply {i} {mark}]" for i, r in enumerate(replies or (), 1))
    values = {"mark": mark, "replies": "\n\n".join(blocks)} | {name: _clean(value) for name, value in fields.items()}
    return _FIELD.sub(lambda match: values[match[1]], prompt)


def hash_text(parts: object) -> str:
    """Return a hash of texts and numbers."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def ask_for_verdict(scale: tuple[float, float], count: int | None) -> str:
    """Return the request for the verdict's form: of one reply (None), or of `count` replies."""
    number = f"a number from {scale[0]:g} to {scale[1]:g}"
    if count is None:
        return f"End with a line of the form `Score: N`, where N is {number}."
    return f"End with a line of the form `Scores: N, …`: {number} for each of the {count} replies, in their order."


def read_verdict(text: str, *, scale: tuple[float, float], count: int | None) -> tuple[float, ...] | None:
    """Return the scores on the last line: `Score: 7`, `Scores: 7, 2`, or JSON such as `{"score": 7}`; None if none.

    The line may be in a block of code. Marks of Markdown around a score in words are ignored.
    """
    key = "score" if count is None else "scores"
    lines = text.strip().removesuffix("```").strip().splitlines() or [""]
    line = lines[-1].strip(" `").removeprefix("json")  # the language of a block of one line
    match = _LINE.fullmatch(line)
    if match is not None and match[1].lower() == key:
        line = f'{{"{key}": {match[2] if count is None else f"[{match[2]}]"}}}'
    try:
        value = cast("object", json.loads(line, object_pairs_hook=_make_object)[key])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    scores = cast("list[float]", [value] if count is None else value if isinstance(value, list) else [])
    numbers = tuple(score for score in scores if type(score) in (int, float) and scale[0] <= score <= scale[1])
    return tuple(map(float, numbers)) if len(numbers) == len(scores) == (count or 1) else None


def _make_object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; ValueError if a key is repeated, as its value is ambiguous."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _clean(value: str) -> str:
    if len(value) > FIELD_CHARS:
        head, tail = value[: FIELD_CHARS // 2], value[-FIELD_CHARS // 2 :]
        value = f"{head}\n[{len(value) - FIELD_CHARS:,} characters are left out here]\n{tail}"
    value = value.encode(errors="replace").decode()  # a lone surrogate cannot be sent
    return _SPECIAL_TOKEN.sub("\\g<0>\u200b", value)  # a space without width
