r"""The answer that a model's text gives.

Invariant: time in proportion to the length, and no text raises; what is thought is not what is answered.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)")
_BARE = re.compile(r"\s*([^\s$]*)")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)
_FINAL_CHANNEL = "<|channel|>final<|message|>"
_OTHER_CHANNEL = "<|channel|>analysis<|message|>"
_MARKS = re.compile(r"<\|[a-z_]{1,20}\|>")
_HASHES = "####"
_EMPHASIS = re.compile(r"\*+")
_PAIRED = ("***", "**", "*", "$$", "$")
_STATED = re.compile(r"(?:final answer|answer)(?:\*\*)?[ \t]?(?:is|:)(?:\*\*)?[ \t:]", re.IGNORECASE)


def final_answer(text: str, *, boxed_only: bool = False) -> str | None:
    r"""The answer at the end of a reply; None where there is none.

    Thinking is left out first. Then the last `\boxed{…}` or `\fbox{…}` counts, with braces nested as deep as they may
    be; one that is not closed was cut off, and no earlier one stands in for it. Without any box it is what follows the
    last `####` on its line, and without that, what follows the last `answer is` or `Answer:` on its line.

    Args:
        text: what the model wrote.
        boxed_only: only a box is an answer.
    """
    answer = without_thinking(text)
    if _BOX.search(answer):
        return boxed(answer)
    if boxed_only:
        return None
    place = answer.rfind(_HASHES)
    if place >= 0:
        return _first_line(answer, place + len(_HASHES))
    ends = [match.end() for match in _STATED.finditer(answer)]
    return _first_line(answer, ends[-1]) if ends else None


def without_thinking(text: str) -> str:
    """What follows the thinking: after the last `</think>`, or in the final channel; nothing where it never ends."""
    if _FINAL_CHANNEL in text:
        text = text.rpartition(_FINAL_CHANNEL)[2]
    elif _OTHER_CHANNEL in text:
        return ""
    _, closed, after = text.rpartition("</think>")
    text = after if closed else text
    return _MARKS.sub("", text.partition("<think>")[0])


def boxed(text: str) -> str | None:
    r"""What the last `\boxed` or `\fbox` holds; None where there is none, or it is not closed.

    An empty one only mentions the box, and does not count.
    """
    for box in reversed(list(_BOX.finditer(text))):
        held = _held(text, box.end())
        if held != "":
            return held
    return None


def _held(text: str, at: int) -> str | None:
    """What a box holds whose name ends at a place; None where it is cut off."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at >= len(text):
        return None
    if text[at] != "{":
        bare = _BARE.match(text, at)
        return bare[1].rstrip(".,") if bare else ""
    depth = 0
    for brace in _BRACE.finditer(text, at):  # `\{` is none
        depth += {"{": 1, "}": -1}.get(brace[1], 0)
        if depth == 0:
            return text[at + 1 : brace.start()].strip()
    return None


def _first_line(text: str, at: int) -> str | None:
    """The first line from a place on that is not empty, without what stands around the answer in it."""
    line = text[at:].strip().split("\n", 1)[0]
    marks = _EMPHASIS.findall(text, text.rfind("\n", 0, at) + 1, at)
    if len(marks) % 2:  # `**Answer: 7**` is emphasised as a whole
        line = line.removesuffix(".").removesuffix(marks[-1])
    answer = _bare(line)
    return answer if answer.strip("*$") else None


def _bare(line: str) -> str:
    """Without pairs of marks around the whole, and without the full stop; the points of an ellipsis stay."""
    while True:
        before = line
        line = line.strip()
        if line.endswith(".") and not line.endswith(".."):
            line = line[:-1].rstrip()
        for mark in _PAIRED:
            inside = line[len(mark) : -len(mark)]
            if inside and line.startswith(mark) and line.endswith(mark) and mark[0] not in inside:
                line = inside
        if line == before:
            return line
