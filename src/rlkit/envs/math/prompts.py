r"""Prompts for maths problems.

Invariant: a prompt contains the template and the question, never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.types import Message


@dataclass(frozen=True, slots=True)
class Example:
    """Worked example: a question with a complete reply."""

    question: str
    reply: str


@dataclass(frozen=True, slots=True)
class Template:
    r"""Text around a question."""

    # Text after the question in the same message.
    suffix: str = "Think step by step, then write the final answer in \\boxed{}."
    system: str | None = None
    examples: tuple[Example, ...] = ()  # conversations that precede the question

    def messages(self, question: str) -> list[Message]:
        """Return the conversation that asks a question."""
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for example in self.examples:
            messages.append({"role": "user", "content": self._format_question(example.question)})
            messages.append({"role": "assistant", "content": example.reply})
        return [*messages, {"role": "user", "content": self._format_question(question)}]

    def _format_question(self, question: str) -> str:
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
"""Worked examples for models that do not know the expected form of a reply."""
