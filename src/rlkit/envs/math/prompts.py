r"""How a problem is put to a model.

Invariant: what a model is shown is the template and the question, and nothing of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.types import Message


@dataclass(frozen=True, slots=True)
class Example:
    """A worked example: the question, and the whole reply that it deserves."""

    question: str
    reply: str


@dataclass(frozen=True, slots=True)
class Template:
    r"""What stands around a question.

    Args:
        suffix: follows the question in the same message.
        examples: conversations that are shown first.
    """

    suffix: str = "Think step by step, then write the final answer in \\boxed{}."
    system: str | None = None
    examples: tuple[Example, ...] = ()

    def messages(self, question: str) -> list[Message]:
        """The conversation that asks for the answer."""
        shown: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for example in self.examples:
            shown.append({"role": "user", "content": self._asked(example.question)})
            shown.append({"role": "assistant", "content": example.reply})
        return [*shown, {"role": "user", "content": self._asked(question)}]

    def _asked(self, question: str) -> str:
        return f"{question}\n\n{self.suffix}" if self.suffix else question


EXAMPLES = (
    Example(
        "A shelf holds 3 rows of 14 books. Nine of them are lent out. How many books are on the shelf?",
        "The shelf holds 3 · 14 = 42 books. Nine are lent out, so 42 − 9 = 33 are left.\n\n\\boxed{33}",
    ),
    Example(
        "What is the sum of the solutions of $x^2 - 5x + 6 = 0$?",
        "The equation is $(x - 2)(x - 3) = 0$, so its solutions are 2 and 3, and $2 + 3 = 5$.\n\n\\boxed{5}",
    ),
    Example(
        "A fair coin is thrown three times. What is the probability of exactly two heads?",
        "Of the 8 outcomes 3 have exactly two heads, so the probability is $\\frac{3}{8}$.\n\n\\boxed{\\frac{3}{8}}",
    ),
)
"""Worked examples of rlkit's own, for models that do not know what is wanted."""
