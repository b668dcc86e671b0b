r"""Extraction of the final answer from a model's reply.

Invariant: time is linear in the length; no text raises an error; text inside of thinking is never an answer.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)")
_UNBRACED = re.compile(r"\s*([^\s$]*)")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)
_FINAL_CHANNEL = "<|channel|>final<|message|>"
_ANALYSIS_CHANNEL = "<|channel|>analysis<|message|>"
_SPECIAL_TOKENS = re.compile(r"<\|[a-z_]{1,20}\|>")
_HASHES = "####"
_EMPHASIS = re.compile(r"\*+")
_PAIRED_MARKS = ("***", "**", "*", "$$", "$")
_ANSWER_IS = re.compile(r"(?:final answer|answer)(?:\*\*)?[ \t]?(?:is|:)(?:\*\*)?[ \t:]", re.IGNORECASE)


def final_answer(text: str, *, boxed_only: bool = False) -> str | None:
    r"""Return the answer at the end of a reply, or None.

    Thinking is removed first. The answer is the content of the last `\boxed{…}` or `\fbox{…}`, with nested braces. If
    that box is not closed, the reply was cut off and has no answer. Without any box the answer is the rest of the line
    after the last `####`, or else after the last `answer is` or `Answer:`.

    Args:
        boxed_only: ignore answers outside of a box.
    """
    answer = strip_thinking(text)
    if _BOX.search(answer):
        return find_boxed(answer)
    if boxed_only:
        return None
    place = answer.rfind(_HASHES)
    if place >= 0:
        return _first_line(answer, place + len(_HASHES))
    ends = [match.end() for match in _ANSWER_IS.finditer(answer)]
    return _first_line(answer, ends[-1]) if ends else None


def strip_thinking(text: str) -> str:
    """Return the text after the last `</think>` or in the final channel; empty if the thinking does not end."""
    if _FINAL_CHANNEL in text:
        text = text.rpartition(_FINAL_CHANNEL)[2]
    elif _ANALYSIS_CHANNEL in text:
        return ""
    _, mark, after = text.rpartition("</think>")
    text = after if mark else text
    return _SPECIAL_TOKENS.sub("", text.partition("<think>")[0])


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed` or `\fbox`; None if there is none, or it is not closed.

    An empty box is ignored, because it only mentions the command.
    """
    for box in reversed(list(_BOX.finditer(text))):
        content = _read_box(text, box.end())
        if content != "":
            return content
    return None


def _read_box(text: str, at: int) -> str | None:
    """Return the content of the box whose command ends at an index; None if it is cut off."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at >= len(text):
        return None
    if text[at] != "{":
        match = _UNBRACED.match(text, at)
        return match[1].rstrip(".,") if match else ""
    depth = 0
    for brace in _BRACE.finditer(text, at):  # `\{` is not a brace
        depth += {"{": 1, "}": -1}.get(brace[1], 0)
        if depth == 0:
            return text[at + 1 : brace.start()].strip()
    return None


def _first_line(text: str, at: int) -> str | None:
    """Return the first non-empty line after an index without the marks around it, or None."""
    line = text[at:].strip().split("\n", 1)[0]
    marks = _EMPHASIS.findall(text, text.rfind("\n", 0, at) + 1, at)
    if len(marks) % 2:  # `**Answer: 7**` is emphasised as a whole
        line = line.removesuffix(".").removesuffix(marks[-1])
    answer = _strip_marks(line)
    return answer if answer.strip("*$") else None


def _strip_marks(line: str) -> str:
    """Remove pairs of marks around the whole line, and a final full stop unless it ends an ellipsis."""
    while True:
        previous = line
        line = line.strip()
        if line.endswith(".") and not line.endswith(".."):
            line = line[:-1].rstrip()
        for mark in _PAIRED_MARKS:
            inside = line[len(mark) : -len(mark)]
            if inside and line.startswith(mark) and line.endswith(mark) and mark[0] not in inside:
                line = inside
        if line == previous:
            return line
