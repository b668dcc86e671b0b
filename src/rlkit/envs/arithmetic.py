"""Sums, differences and products of two numbers: the smallest task that a real model visibly learns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from operator import add, mul, sub
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rlkit._util.seeds import derive_seed
from rlkit.env import SingleTurnEnv
from rlkit.errors import UsageError
from rlkit.types import Outcome, Reply

EXAMPLES: Mapping[Operator, str] = {"+": "4 + 5 = 9", "-": "9 - 4 = 5", "*": "4 * 5 = 20"}
"""Worked example in the prompt by operator; a base model needs one."""

_FUNCTIONS: Mapping[Operator, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}

FIRST_INTEGER = re.compile(r"\s*(-?\d+)(?!\d)")

TEST_SHARE = 5
"""Reciprocal of the share of sums in the test split."""

type Operator = Literal["+", "-", "*"]
type Split = Literal["all", "train", "test"]
type Match = Literal["exact", "first_integer"]

type Grader = Callable[[str, int], float]


@dataclass(frozen=True)
class Sum(SingleTurnEnv):
    """Task to compute `left + right`, or the same with another operator."""

    left: int
    right: int
    # `exact` requires a line with the result and nothing else; `first_integer` reads the number at the beginning of the
    # reply and ignores the rest.
    match: Match = "exact"
    # Function of the reply's text and the right result that returns the reward in place of `match`.
    grader: Grader | None = None
    operator: Operator = "+"

    @property
    def result(self) -> int:
        """The right result."""
        return _FUNCTIONS[self.operator](self.left, self.right)

    @property
    def task_id(self) -> str:
        """The formula, such as `4+5`."""
        return f"{self.left}{self.operator}{self.right}"

    @property
    def gold(self) -> str:
        """A reply that earns the full reward."""
        return f" {self.result}\n"

    def prompt(self) -> str:
        """Return a worked example and the question as plain text."""
        return f"{EXAMPLES[self.operator]}\n{self.left} {self.operator} {self.right} ="

    def grade(self, reply: Reply) -> Outcome:
        """Return the reward of the grader, or 1 for the right result and 0 for any other."""
        if self.grader is not None:
            return Outcome(self.grader(reply.text, self.result))
        answer = reply.text.split("\n", 1)[0].strip()
        if self.match == "first_integer":
            match = FIRST_INTEGER.match(reply.text)
            answer = match[1] if match else ""
        return Outcome(
            float(answer == str(self.result)), info={"answer": answer, "labels": {"operator": self.operator}}
        )


def arithmetic(
    *,
    max_operand: Annotated[int, Field(ge=1, le=10**9)] = 9,
    min_operand: Annotated[int, Field(ge=0, lt=10**9)] = 0,
    operators: Annotated[Sequence[Operator], Field(min_length=1)] = ("+",),
    count: Annotated[int, Field(ge=1, le=10**6)] = 1000,
    split: Split = "all",
    match: Match = "exact",
    grader: Grader | None = None,
    seed: Annotated[int, Field(ge=0)] = 0,
) -> Sequence[Sum]:
    """Return sums, differences or products of two numbers from `min_operand` to `max_operand`.

    Args:
        operators: any of `+`, `-` and `*`, in equal shares.
        count: maximum number of tasks, all different.
        split: `test` is a fifth of the sums of each operator, `train` the rest; the seed does not change the split.
        match: rule for reading a reply, see `Sum`.
        grader: function of your own, see `Sum`.
        seed: determines the sums and their order.

    Raises:
        UsageError: the split is empty, or `min_operand` is above `max_operand`.
    """
    if min_operand > max_operand:
        raise UsageError(f"min_operand: {min_operand} is above max_operand, {max_operand}")
    width = max_operand - min_operand + 1
    sums = [
        list(islice(_draw_pairs(operator, min_operand, width, count=count, split=split, seed=seed), count))
        for operator in dict.fromkeys(operators)
    ]
    tasks = [task for round_robin in zip_longest(*sums) for task in round_robin if task is not None]
    if not tasks:
        raise UsageError(f"split: no sum up to {max_operand} is in the {split} split; raise max_operand")
    return [Sum(left, right, match, grader, operator) for operator, left, right in tasks[:count]]


def _draw_pairs(
    operator: Operator, low: int, width: int, *, count: int, split: Split, seed: int
) -> Iterator[tuple[Operator, int, int]]:
    """Yield distinct pairs of numbers of a split, with their operator: all, or enough if there are too many to list."""
    rng = np.random.default_rng(seed)
    if width * width <= 100 * count:
        indices: list[int] = rng.permutation(width * width).tolist()
    else:
        indices = rng.integers(width * width, size=10 * count).tolist()
    for index in dict.fromkeys(indices):
        pair = low + index // width, low + index % width
        if split in ("all", _assign_split(operator, *pair)):
            yield operator, *pair


def _assign_split(operator: Operator, left: int, right: int) -> Split:
    key = (left, right) if operator == "+" else (operator, left, right)
    return "test" if derive_seed(0, "arithmetic", *key) % TEST_SHARE == 0 else "train"
