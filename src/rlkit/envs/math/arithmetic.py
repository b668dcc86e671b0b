"""Sums of two numbers: the smallest task at which a real model visibly learns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rlkit.env import SingleTurnEnv
from rlkit.errors import UsageError
from rlkit.policy import Reply
from rlkit.seeds import derive
from rlkit.types import Outcome

EXAMPLE = "4 + 5 = 9"
"""The worked sum that shows a base model what is asked."""

FIRST_INTEGER = re.compile(r"\s*(-?\d+)(?!\d)")

TEST_SHARE = 5
"""One sum in so many is kept for testing."""

type Split = Literal["all", "train", "test"]
type Match = Literal["exact", "first_integer"]

type Grader = Callable[[str, int], float]


@dataclass(frozen=True)
class Sum(SingleTurnEnv):
    """What is `left + right`?

    Args:
        left: first summand.
        right: second summand.
        match: `exact` wants the line to hold the sum and nothing else; `first_integer` reads the number that the reply
            begins with and ignores what follows.
        grader: instead of `match`, a function of the reply's text and the right sum that gives the reward.
    """

    left: int
    right: int
    match: Match = "exact"
    grader: Grader | None = None

    @property
    def task_id(self) -> str:
        """The sum itself."""
        return f"{self.left}+{self.right}"

    @property
    def gold(self) -> str:
        """A reply that earns the full reward."""
        return f" {self.left + self.right}\n"

    def prompt(self) -> str:
        """A worked example and the question, as plain text."""
        return f"{EXAMPLE}\n{self.left} + {self.right} ="

    def grade(self, reply: Reply) -> Outcome:
        """1 for the right sum, 0 for anything else, unless a grader says otherwise."""
        if self.grader is not None:
            return Outcome(self.grader(reply.text, self.left + self.right))
        answer = reply.text.split("\n", 1)[0].strip()
        if self.match == "first_integer":
            found = FIRST_INTEGER.match(reply.text)
            answer = found[1] if found else ""
        return Outcome(float(answer == str(self.left + self.right)), info={"answer": answer})


def arithmetic(
    *,
    max_operand: Annotated[int, Field(ge=1, le=10**9)] = 9,
    count: Annotated[int, Field(ge=1, le=10**6)] = 1000,
    split: Split = "all",
    match: Match = "exact",
    grader: Grader | None = None,
    seed: int = 0,
) -> Sequence[Sum]:
    """Sums of two numbers from 0 to `max_operand`.

    Args:
        max_operand: the largest summand.
        count: at most this many tasks, all different.
        split: `test` is a fifth of all sums, `train` the rest, whatever the seed: the two never share a task.
        match: how a reply is read, see `Sum`.
        grader: a function of your own, see `Sum`.
        seed: decides which sums, and their order.

    Raises:
        UsageError: the split holds no sum.
    """
    base = max_operand + 1
    pairs = dict.fromkeys(pair for pair in _pairs(base, count, seed) if split in ("all", _split(*pair)))
    if not pairs:
        raise UsageError(f"split: no sum up to {max_operand} is in the {split} split; raise max_operand")
    return [Sum(left, right, match, grader) for left, right in islice(pairs, count)]


def _pairs(base: int, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Every pair below `base` in random order, or, where those are too many to list, enough random ones."""
    rng = np.random.default_rng(seed)
    if base * base <= 100 * count:
        indices: list[int] = rng.permutation(base * base).tolist()
    else:
        indices = rng.integers(base * base, size=10 * count).tolist()
    for index in indices:
        yield index // base, index % base


def _split(left: int, right: int) -> Split:
    return "test" if derive(0, "arithmetic", left, right) % TEST_SHARE == 0 else "train"
