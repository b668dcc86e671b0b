r"""Answers without what stands around them: a lead-in, emphasis, quotation marks, a full stop.

Invariant: only what says nothing is taken off; marks come off in pairs, so that `**7**` is 7 and `7*` is not.
"""

from __future__ import annotations

import re

from rlkit.envs.math.answers.lexing import words

MAX_ROUNDS = 4

_ENDS = ".,;: \t\r\n"
_MARKS = re.compile(r"\*+|`+")
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}
_ELLIPSIS = re.compile(r"\.\s*\.$")
_AFTER_LEAD_IN = re.compile(r"\A(?:[,;:\s]|\.(?![.0-9(\\]))+")
_SENTENCE = re.compile(r"(?:[A-Za-z][A-Za-z'-]* ){1,10}(?:is|are|equals)(?= |$)", re.IGNORECASE)
_DENYING = frozenset({"no", "none", "never", "neither", "nothing", "nowhere", "nobody", "if", "unless"})
_IN_BASE = re.compile(
    r"([0-9A-F]+)\s*(?:\\text\{)?\s*\(?(?:in )?base[\s~-]?\s*\}?\s*([0-9]+|[a-z]+)\)?\}?", re.IGNORECASE
)


def cleaned(text: str) -> str:
    """The answer alone."""
    text = _without_end(text.strip())
    for _ in range(MAX_ROUNDS):
        before = text
        text = _without_lead_in(_without_marks(text))
        if text == before:
            break
    text = text.removeprefix("=").lstrip()
    if based := _IN_BASE.fullmatch(text):
        return rf"{based[1]}_{{{based[2]}}}"
    return text[0] if len(text) == 2 and text[0].isalpha() and text[1] == ")" else text


def leads_in(text: str) -> bool:
    """Whether words only say that an answer follows: `Answer:`, `The area is`."""
    text = text.strip().rstrip(" :,")
    sentence = _SENTENCE.fullmatch(text) is not None and _DENYING.isdisjoint(text.lower().split())
    return text.lower() in words.LEAD_INS or (sentence and not words.alters(text))


def _without_marks(text: str) -> str:
    """Without a pair of marks of emphasis or quotation around the whole."""
    marks = _MARKS.match(text)
    size = len(marks[0]) if marks else 1
    if len(text) <= 2 * size:
        return text
    opening, inside, closing = text[:size], text[size:-size], text[-size:]
    paired = opening == closing if marks else _QUOTES.get(opening) == closing
    alone = opening not in inside and closing not in inside
    return _without_end(inside.strip()) if paired and alone else text


def _without_lead_in(text: str) -> str:
    r"""Without `The answer is`, `**Answer:**` and their like; emphasis that begins before a lead-in ends after it."""
    marks = _MARKS.match(text)
    bare = text[marks.end() :] if marks else text
    lower = bare.lower()
    lead = next((lead for lead in words.LEAD_INS if lower.startswith(lead)), "")
    if not lead and (sentence := _SENTENCE.match(bare)) and leads_in(sentence[0]):
        lead = sentence[0]
    if not lead or len(bare) == len(lead) or bare[len(lead)].isalnum():
        return text
    rest = bare[len(lead) :]
    if marks is None:
        return _AFTER_LEAD_IN.sub("", rest)
    before, closing, after = rest.partition(marks[0])
    return _AFTER_LEAD_IN.sub("", before + after) if closing else text


def _without_end(text: str) -> str:
    r"""Without full stops and commas at the end; those of an ellipsis stay, and so does the comma of `\,`."""
    while text and text[-1] in _ENDS and not _ELLIPSIS.search(text):
        if text[:-1].endswith("\\"):
            return text
        text = text[:-1]
    return text.removesuffix("\\")  # of a space after a backslash
