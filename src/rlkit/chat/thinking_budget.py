"""Text that ends a model's thinking when its budget is spent.

Invariant: the text depends only on the reply; an answer is never interrupted.
"""

from __future__ import annotations

_FINAL = "<|start|>assistant<|channel|>final<|message|>"  # header of an answer in the format of gpt-oss (harmony)


def end_of_thinking(text: str, phrase: str) -> str:
    """Return the text to append to a reply that was truncated during thinking; "" if the model was answering.

    It is the phrase, followed by `</think>` inside `<think>`, or in harmony by the end of the message and the header of
    the final channel.

    Args:
        text: the end of the prompt and the reply, with special tokens.
        phrase: sentence that tells the model to answer now.
    """
    if "<|channel|>" in text:
        last = text.rpartition("<|start|>assistant")[2]
        if "<|channel|>final<|message|>" in last:
            return ""
        _, start, rest = text.rpartition("<|start|>")
        if start and "<|message|>" not in rest:  # truncated inside a header: complete it first
            header = start + rest
            return _FINAL.removeprefix(header) if _FINAL.startswith(header) else f"<|message|>{phrase}<|end|>{_FINAL}"
        return _FINAL if text.endswith("<|end|>") else f"{phrase}<|end|>{_FINAL}"
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return f"{phrase}\n</think>\n\n"
    return "" if closed >= 0 else phrase
