"""A conversation of several turns: guess a number with the help of hints.

    python examples/multi_turn.py

or, in a configuration, `env: examples/multi_turn.py:games`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass
class Game:
    """What one episode knows: the number lies from `low` to `high`."""

    low: int = 1
    high: int = HIGHEST


class Guess(rlkit.StepEnv[Game]):
    """1 for finding the number within `max_turns`, less 0.1 for each reply that the hints rule out."""

    max_turns = 3

    def __init__(self, number: int) -> None:
        self.number = number
        self.task_id = str(number)
        self.gold = str(number)

    def reset(self) -> tuple[Game, Sequence[rlkit.Message]]:
        return Game(), OPENING

    async def step(self, state: Game, reply: rlkit.Reply) -> rlkit.Step:
        digit = re.fullmatch(rf"[1-{HIGHEST}]", reply.text.strip())
        if digit is None:
            return rlkit.Step([{"role": "user", "content": "A digit"}], reward=-0.1)
        guess = int(digit[0])
        if guess == self.number:
            return rlkit.Step(reward=1.0, done=True)
        sensible = state.low <= guess <= state.high
        if guess < self.number:
            state.low = max(state.low, guess + 1)
        else:
            state.high = min(state.high, guess - 1)
        hint = "Higher" if guess < self.number else "Lower"
        return rlkit.Step([{"role": "user", "content": hint}], reward=0.0 if sensible else -0.1)


def games() -> list[Guess]:
    return [Guess(number) for number in range(1, HIGHEST + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a name or a directory")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    result = rlkit.train(
        model=arguments.model,
        envs=games(),
        steps=arguments.steps,
        batch={"groups": HIGHEST, "group_size": 6},
        sampling={"max_tokens": 3},
        optimizer={"learning_rate": 3e-4},
    )
    print(f"mean reward of the last step: {result.metrics['env/all/reward/mean']:.2f}; the run is {result.directory}")


if __name__ == "__main__":
    main()
