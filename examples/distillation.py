"""Distil a prompted model into itself: it learns to answer as a system prompt asks, without the prompt.

Run it with `rlkit train examples/distillation.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass

import rlkit

STYLE = "You answer like a pirate, in one short sentence that begins with Arr."

TOPICS = (
    *("the moon", "a good breakfast", "rain", "your favourite book"),
    *("bicycles", "the colour blue", "winter", "cats"),
)
QUESTIONS = ("What is special about {}?", "Tell me something about {}.", "Why do people like {}?")


@dataclass(frozen=True)
class Question(rlkit.SingleTurnEnv):
    """A question without a right answer: only the teacher counts."""

    text: str

    def prompt(self) -> list[rlkit.Message]:
        """Return the question alone, without the style."""
        return [{"role": "user", "content": self.text}]

    def grade(self, reply: rlkit.Reply) -> float:
        """Return 0, because `reward: none` trains on no reward."""
        return 0.0


def questions(*, held_out: bool = False) -> list[Question]:
    """Return the questions about all topics but the last two, or about those."""
    topics = TOPICS[-2:] if held_out else TOPICS[:-2]
    return [Question(question.format(topic)) for topic in topics for question in QUESTIONS]


def with_style(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    """Return the messages that the teacher sees."""
    return [{"role": "system", "content": STYLE}, *messages]
