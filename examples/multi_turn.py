"""Train on a conversation of several turns: guess a number with the help of hints.

    python examples/multi_turn.py

In a configuration: `env: examples/multi_turn.py:games`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import rlkit

HIGHEST = 7
OPENING: Sequence[rlkit.Message] = [
    {"role": "system", "content": f"Guess my number from 1 to {HIGHEST}."},
    {"role": "user", "content": "Guess"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Higher"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Right. Guess"},
]


class Guess(rlkit.StepEnv[set[int]]):
    """Guess a number. The reward is 1 for the number, minus 0.1 for each reply that the hints exclude."""

    max_turns = 3

    def __init__(self, number: int) -> None:
        self.number = number
        self.task_id = str(number)
        self.gold = str(number)

    def reset(self) -> tuple[set[int], Sequence[rlkit.Message]]:
        return set(range(1, HIGHEST + 1)), OPENING

    async def step(self, state: set[int], reply: rlkit.Reply) -> rlkit.Step:
        """Grade a reply and give a hint; `state` holds the numbers that are still possible."""
        if not re.fullmatch(rf"[1-{HIGHEST}]", reply.text):
            return rlkit.Step([{"role": "user", "content": "A digit"}], reward=-0.1)
        guess = int(reply.text)
        if guess == self.number:
            return rlkit.Step(reward=1.0, done=True)
        sensible, higher = guess in state, guess < self.number
        state.intersection_update(range(guess + 1, HIGHEST + 1) if higher else range(1, guess))
        hint = "Higher" if higher else "Lower"
        return rlkit.Step([{"role": "user", "content": hint}], reward=0.0 if sensible else -0.1)


def games() -> list[Guess]:
    return [Guess(number) for number in range(1, HIGHEST + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or directory of the model")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=HIGHEST, help="numbers per step")
    arguments = parser.parse_args()
    result = rlkit.train(
        model=arguments.model,
        envs=games(),
        steps=arguments.steps,
        batch={"groups": arguments.groups, "group_size": 6},
        sampling={"max_tokens": 3},
        optimizer={"learning_rate": 3e-4},
    )
    print(f"mean reward of the last step: {result.metrics['env/all/reward/mean']:.2f}; the run is {result.directory}")


if __name__ == "__main__":
    main()
