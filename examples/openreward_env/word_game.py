"""A word game: find one word with a given beginning, end and length. Each rule that the word fits earns a quarter.

The model's plain reply is its answer, so models without tool calls can play too. A hint is a tool and costs reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, override

from openreward.environments import Environment, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, Field

TRAIN = "apple bread chair dream earth flame glass house juice knife lemon money night ocean piano queen"
TEST = "river sugar table voice water zebra"
WORDS: Mapping[str, Sequence[str]] = {"train": TRAIN.split(), "test": TEST.split()}
HINT_COST = 0.1


class Answer(BaseModel):
    text: str = Field(description="the word")


class WordGame(Environment):
    @classmethod
    @override
    def list_splits(cls) -> list[Any]:
        return list(WORDS)

    @classmethod
    @override
    def list_tasks(cls, split: str) -> list[Any]:
        return [{"word": word} for word in WORDS[split]]

    @property
    def word(self) -> str:
        return str(self.task_spec["word"])

    @override
    def get_prompt(self) -> list[Any]:
        first, last, length = self.word[0], self.word[-1], len(self.word)
        rules = f"begins with {first}, ends with {last} and has {length} letters"
        return [TextBlock(text=f"Answer with one word that {rules}. Write the word and nothing else.")]

    @tool
    async def hint(self) -> ToolOutput:
        """The first half of a word that fits. It costs a tenth of the reward."""
        half = self.word[: len(self.word) // 2]
        return ToolOutput(blocks=[TextBlock(text=f"One such word begins with {half}.")], reward=-HINT_COST)

    @terminal
    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Give the word."""
        reward = score(params.text, self.word)
        return ToolOutput(blocks=[TextBlock(text=f"{reward:.2f}")], reward=reward, finished=True)


def score(text: str, word: str) -> float:
    """Return a quarter each for a single word, its first letter, its last letter and its length."""
    words = re.findall(r"[a-z]+", text.lower())
    if not words:
        return 0.0
    first = words[0]
    is_met = (len(words) == 1, first[0] == word[0], first[-1] == word[-1], len(first) == len(word))
    return sum(is_met) / len(is_met)
