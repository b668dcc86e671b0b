"""An environment of your own: spelling words backwards.

    python examples/custom_env.py

The letters stand apart because a model reads tokens, not letters: ` c`, ` a` and ` t` are one token each.
"""

from __future__ import annotations

import argparse
from itertools import permutations

import rlkit

LETTERS = "abcdef"


class Reverse(rlkit.Env):
    def __init__(self, word: str) -> None:
        self.word = word
        self.task_id = word
        self.gold = f" {word[::-1]}\n"

    async def rollout(self, policy: rlkit.Policy) -> float:
        reply = await policy.sample(f"x y -> y x\np q -> q p\n{self.word} ->", stop=["\n"])
        return float(reply.text.strip() == self.word[::-1])


def words(length: int = 2) -> list[Reverse]:
    """All words of so many different letters; for a configuration, `env: examples/custom_env.py:words`."""
    return [Reverse(" ".join(letters)) for letters in permutations(LETTERS, length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a name or a directory")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=8, help="words in a step")
    arguments = parser.parse_args()
    result = rlkit.train(
        model=arguments.model,
        envs=words(),
        steps=arguments.steps,
        batch={"groups": arguments.groups, "group_size": 8},
        sampling={"max_tokens": 4},
        optimizer={"learning_rate": 3e-4},
    )
    print(f"mean reward of the last step: {result.metrics['env/all/reward/mean']:.2f}; the run is {result.directory}")


if __name__ == "__main__":
    main()
