"""Train on an environment of your own: spell words backwards.

    python examples/custom_env.py

Spaces separate the letters because a model reads tokens: ` c`, ` a` and ` t` are one token each.
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
    """Return all words of `length` different letters. In a configuration: `env: examples/custom_env.py:words`."""
    return [Reverse(" ".join(letters)) for letters in permutations(LETTERS, length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or directory of the model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=8, help="words per step")
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
