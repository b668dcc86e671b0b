"""Copy letters by a rule: the first letter moves to the end.

    rlkit train examples/copy_rule.yaml

Spaces separate the letters because a model reads tokens: ` c`, ` a` and ` t` are one token each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import rlkit

LETTERS = "abcdefgh"
TEST_SHARE = 5  # one task in five is for testing


@dataclass(frozen=True)
class Rotate(rlkit.SingleTurnEnv):
    letters: str

    @property
    def task_id(self) -> str:
        return self.letters

    @property
    def right(self) -> list[str]:
        first, *rest = self.letters.split()
        return [*rest, first]

    @property
    def gold(self) -> str:
        return " " + " ".join(self.right) + "\n"

    def prompt(self) -> str:
        return f"x y z -> y z x\np q r -> q r p\n{self.letters} ->"

    def grade(self, reply: rlkit.Reply) -> rlkit.Outcome:
        answer = reply.text.split("\n", 1)[0].split()
        places = sum(letter == right_letter for letter, right_letter in zip(answer, self.right, strict=False))
        exact = answer == self.right
        # Up to half the reward for letters in their right places: so a model that solves no task can still improve.
        reward = 1.0 if exact else 0.5 * places / max(len(answer), len(self.right))
        return rlkit.Outcome(reward, metrics={"exact": float(exact)}, info={"answer": " ".join(answer)})


def letters(length: int = 3, split: Literal["all", "train", "test"] = "all") -> list[Rotate]:
    """Return all rows of `length` different letters; no row is in both `train` and `test`."""
    rows = [" ".join(row) for row in permutations(LETTERS, length)]
    return [Rotate(row) for row in rows if split in ("all", "test" if _for_testing(row) else "train")]


def _for_testing(row: str) -> bool:
    return hashlib.sha256(row.encode()).digest()[0] % TEST_SHARE == 0
