"""The text that ends a model's thinking when its budget is spent, so that it answers.

Invariant: the text follows from the reply alone; an answer is never interrupted.
"""

from __future__ import annotations

_FINAL = "<|start|>assistant<|channel|>final<|message|>"
"""The header of an answer in the format of gpt-oss (harmony)."""


def end_of_thinking(text: str, phrase: str) -> str:
    """Return the text to append to a reply that was cut off while the model was thinking; "" if it was answering.

    In harmony, it is the phrase, the end of the message and the header of one in the final channel; between `<think>`
    and `</think>`, the phrase and the latter; for a model without thinking, the phrase.

    Args:
        text: the end of the prompt and the reply, with their special tokens.
        phrase: sentence that tells the model to answer now.
    """
    if "<|channel|>" in text:
        last = text.rpartition("<|start|>assistant")[2]
        if "<|channel|>final<|message|>" in last:
            return ""
        _, start, rest = text.rpartition("<|start|>")
        if start and "<|message|>" not in rest:  # cut off within a header, which is finished first
            header = start + rest
            return _FINAL.removeprefix(header) if _FINAL.startswith(header) else f"<|message|>{phrase}<|end|>{_FINAL}"
        return _FINAL if text.endswith("<|end|>") else f"{phrase}<|end|>{_FINAL}"
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return f"{phrase}\n</think>\n\n"
    return "" if closed >= 0 else phrase
