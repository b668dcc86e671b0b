"""Which problems of a dataset become tasks, and what became of the others.

Invariant: the selection follows from the rows, the settings and the seed. Every row that is left out is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlkit._util.seeds import derive_seed
from rlkit.envs.math.problems import Problem, normalised

type Order = Literal["shuffled", "given", "ascending", "descending"]
type Share = Literal["train", "test"]

_SHARES = 2**31
"""Seeds are below it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings of a selection; `maths` describes its arguments of these names."""

    subjects: Collection[str] = ()
    min_level: float | None = None
    max_level: float | None = None
    max_question_characters: int | None = None
    max_answer_characters: int | None = None
    order: Order = "shuffled"
    limit: int | None = None
    seed: int = 0

    def takes(self, problem: Problem) -> bool:
        """Whether it is of the wanted kind. One without a level is not, where levels are limited."""
        if self.subjects and problem.subject not in self.subjects:
            return False
        if self.min_level is not None or self.max_level is not None:
            level = problem.difficulty
            if level is None or not _or(self.min_level, -math.inf) <= level <= _or(self.max_level, math.inf):
                return False
        if len(problem.question) > _or(self.max_question_characters, math.inf):
            return False
        return len(problem.answer) <= _or(self.max_answer_characters, math.inf)


@dataclass(slots=True)
class Count:
    """What became of the rows of a dataset."""

    rows: int = 0
    taken: int = 0
    left: Counter[str] = field(default_factory=Counter[str])
    """Rows that were left out, by the reason."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{number:,} {why}" for why, number in self.left.items())
        return f"{self.taken:,} of {self.rows:,} problems" + (f" ({reasons})" if reasons else "")


def select(
    problems: Iterable[Problem | None],
    wanted: Wanted,
    *,
    apart: Collection[str] = (),
    share: tuple[Share, float] | None = None,
    gradable: Callable[[str], bool],
    count: Count,
) -> list[Problem]:
    """The wanted problems, in the wanted order, no question twice.

    Args:
        problems: of the dataset; None for a row that holds none.
        apart: normalised questions that must not be among them.
        share: of a dataset without splits, which part of it, and the share of all problems that is for testing.
        gradable: whether an answer can be graded.
    """
    seen = set[str]()
    found = list[Problem]()
    for problem in problems:
        count.rows += 1
        why = _reason(problem, wanted, apart, share, seen)
        if why is not None:
            count.left[why] += 1
        elif problem is not None:
            found.append(problem)
    ordered = _ordered(found, wanted)
    taken = list[Problem]()
    while len(taken) < _or(wanted.limit, math.inf) and (problem := next(ordered, None)) is not None:
        if gradable(problem.answer):
            taken.append(problem)
        else:
            count.left["have an answer that cannot be graded"] += 1
    for _ in ordered:
        count.left["are past the limit"] += 1
    count.taken = len(taken)
    return taken


def _reason(
    problem: Problem | None,
    wanted: Wanted,
    apart: Collection[str],
    share: tuple[Share, float] | None,
    seen: set[str],
) -> str | None:
    """Why a problem is left out, if it is."""
    if problem is None:
        return "have no question or no answer"
    if not wanted.takes(problem):
        return "are filtered out"
    key = normalised(problem.question)
    if key in apart:
        return "are in a set that is kept apart"
    if share is not None and (derive_seed(0, "math", key) / _SHARES < share[1]) != (share[0] == "test"):
        return f"are not in the share for {share[0]}"
    if key in seen:
        return "are there twice"
    seen.add(key)
    return None


def _ordered(problems: list[Problem], wanted: Wanted) -> Iterator[Problem]:
    match wanted.order:
        case "given":
            return iter(problems)
        case "shuffled":
            order: list[int] = np.random.default_rng(wanted.seed).permutation(len(problems)).tolist()
            return (problems[index] for index in order)
        case "ascending":
            return iter(sorted(problems, key=lambda problem: _or(problem.difficulty, math.inf)))
        case "descending":
            return iter(sorted(problems, key=lambda problem: -_or(problem.difficulty, -math.inf)))


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
