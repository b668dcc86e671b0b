r"""Removal of text around an answer: a lead-in, emphasis, quotation marks, a full stop.

Invariant: only text without meaning is removed; marks are removed in pairs, so that `**7**` is 7 and `7*` is not.
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
_NEGATIONS = frozenset({"no", "none", "never", "neither", "nothing", "nowhere", "nobody", "if", "unless"})
_IN_BASE = re.compile(
    r"([0-9A-F]+)\s*(?:\\text\{)?\s*\(?(?:in )?base[\s~-]?\s*\}?\s*([0-9]+|[a-z]+)\)?\}?", re.IGNORECASE
)


def clean(text: str) -> str:
    """Return the answer without the text around it."""
    text = _strip_end(text.strip())
    for _ in range(MAX_ROUNDS):
        previous = text
        text = _strip_lead_in(_strip_marks(text))
        if text == previous:
            break
    text = text.removeprefix("=").lstrip()
    if match := _IN_BASE.fullmatch(text):
        return rf"{match[1]}_{{{match[2]}}}"
    return text[0] if len(text) == 2 and text[0].isalpha() and text[1] == ")" else text


def is_lead_in(text: str) -> bool:
    """Tell whether words only announce an answer: `Answer:`, `The area is`."""
    text = text.strip().rstrip(" :,")
    sentence = _SENTENCE.fullmatch(text) is not None and _NEGATIONS.isdisjoint(text.lower().split())
    return text.lower() in words.LEAD_INS or (sentence and not words.alters_value(text))


def _strip_marks(text: str) -> str:
    """Remove a pair of emphasis or quotation marks around the whole text."""
    marks = _MARKS.match(text)
    size = len(marks[0]) if marks else 1
    if len(text) <= 2 * size:
        return text
    opening, content, closing = text[:size], text[size:-size], text[-size:]
    is_pair = opening == closing if marks else _QUOTES.get(opening) == closing
    is_only_pair = opening not in content and closing not in content
    return _strip_end(content.strip()) if is_pair and is_only_pair else text


def _strip_lead_in(text: str) -> str:
    r"""Remove lead-ins such as `The answer is` and `**Answer:**`; emphasis may span lead-in and answer."""
    marks = _MARKS.match(text)
    unmarked = text[marks.end() :] if marks else text
    lower = unmarked.lower()
    lead = next((lead for lead in words.LEAD_INS if lower.startswith(lead)), "")
    if not lead and (sentence := _SENTENCE.match(unmarked)) and is_lead_in(sentence[0]):
        lead = sentence[0]
    if not lead or len(unmarked) == len(lead) or unmarked[len(lead)].isalnum():
        return text
    rest = unmarked[len(lead) :]
    if marks is None:
        return _AFTER_LEAD_IN.sub("", rest)
    before, closing, after = rest.partition(marks[0])
    return _AFTER_LEAD_IN.sub("", before + after) if closing else text


def _strip_end(text: str) -> str:
    r"""Remove full stops and commas at the end, except those of an ellipsis or `\,`."""
    while text and text[-1] in _ENDS and not _ELLIPSIS.search(text):
        if text[:-1].endswith("\\"):
            return text
        text = text[:-1]
    return text.removesuffix("\\")  # of `\ `
