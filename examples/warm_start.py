"""Order digits in a notation that the model has never seen: no reply is right until it was shown some.

Run it with `rlkit train examples/warm_start.yaml`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rlkit

DIGITS = 5


@dataclass(frozen=True)
class Order(rlkit.SingleTurnEnv):
    """Digits to write in ascending order, as in `5 2 9` and `2 < 5 < 9`."""

    digits: tuple[int, ...]

    def prompt(self) -> list[rlkit.Message]:
        """Return the digits without an explanation."""
        return [{"role": "user", "content": " ".join(map(str, self.digits))}]

    def answer(self) -> str:
        """Return the right reply."""
        return " < ".join(map(str, sorted(self.digits)))

    def grade(self, reply: rlkit.Reply) -> float:
        """Return 1 for the right reply, else 0."""
        return float(reply.text.strip() == self.answer())


def orders(*, seed: int = 0, count: int = 500) -> list[Order]:
    """Return tasks of `DIGITS` different digits each."""
    rng = random.Random(seed)
    return [Order(tuple(rng.sample(range(10), DIGITS))) for _ in range(count)]


def demonstrations(count: int) -> Iterator[dict[str, object]]:
    """Yield conversations with right replies, as lines of `warm_start.jsonl`."""
    for task in orders(seed=1, count=count):
        yield {"messages": [*task.prompt(), {"role": "assistant", "content": task.answer()}]}


if __name__ == "__main__":
    lines = [json.dumps(line) + "\n" for line in demonstrations(8)]
    Path(__file__).with_suffix(".jsonl").write_text("".join(lines))
