"""Ending a model's thinking when its budget is spent, so that it gives an answer.

Invariant: what is appended follows from the text alone; an answer that has begun is never interrupted.
"""

from __future__ import annotations

_FINAL = "<|start|>assistant<|channel|>final<|message|>"
"""The head of an answer in the format of gpt-oss (harmony)."""


def end_of_thinking(text: str, phrase: str) -> str:
    """Return the text to append to a reply that was cut off while the model was thinking; "" if it was answering.

    In harmony, it is the phrase, the end of the message and the head of one in the final channel; between `<think>` and
    `</think>`, the phrase and the latter; for a model without thinking, the phrase.

    Args:
        text: the end of the prompt and the reply, with their special tokens.
        phrase: tells the model to come to an end.
    """
    if "<|channel|>" in text:
        last = text.rpartition("<|start|>assistant")[2]
        if "<|channel|>final<|message|>" in last:
            return ""
        _, begun, header = text.rpartition("<|start|>")
        if begun and "<|message|>" not in header:  # cut off between the words of a head, which is finished first
            head = begun + header
            return _FINAL.removeprefix(head) if _FINAL.startswith(head) else f"<|message|>{phrase}<|end|>{_FINAL}"
        return _FINAL if text.endswith("<|end|>") else f"{phrase}<|end|>{_FINAL}"
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return f"{phrase}\n</think>\n\n"
    return "" if closed >= 0 else phrase
