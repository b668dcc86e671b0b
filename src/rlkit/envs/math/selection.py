"""Selection of the problems of a dataset that become tasks.

Invariant: the rows, the settings and the seed determine the selection. Every row that is left out is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlkit._util.seeds import derive_seed
from rlkit.envs.math.problems import Problem, normalise_question

type Order = Literal["shuffled", "dataset", "ascending", "descending"]
type Share = tuple[Literal["train", "test"], float]
"""Split to select from a dataset without splits, and the fraction of problems in its test split."""

_SEEDS = 2**31  # upper bound of a seed


@dataclass(frozen=True, slots=True)
class Selection:
    """Settings of a selection; `docs/maths.md` describes the arguments of `maths` with these names."""

    subjects: Collection[str] = ()
    min_level: float | None = None
    max_level: float | None = None
    max_question_characters: int | None = None
    max_answer_characters: int | None = None
    order: Order = "shuffled"
    limit: int | None = None
    seed: int = 0
    share: Share | None = None

    def accepts(self, problem: Problem) -> bool:
        """Tell whether a problem passes the filters; limits on the level reject a problem without a level."""
        if self.subjects and problem.subject not in self.subjects:
            return False
        if self.min_level is not None or self.max_level is not None:
            level = problem.difficulty
            if level is None or not _default(self.min_level, -math.inf) <= level <= _default(self.max_level, math.inf):
                return False
        if len(problem.question) > _default(self.max_question_characters, math.inf):
            return False
        return len(problem.answer) <= _default(self.max_answer_characters, math.inf)


@dataclass(slots=True)
class SelectionCounts:
    """Numbers of rows of a dataset: read, selected, and left out by reason."""

    rows: int = 0
    selected: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        reasons = "; ".join(f"{number:,} {reason}" for reason, number in self.left_out.items())
        return f"{self.selected:,} of {self.rows:,} problems" + (f" ({reasons})" if reasons else "")


def select(
    problems: Iterable[Problem | None],
    selection: Selection,
    *,
    excluded: Collection[str] = (),
    is_gradable: Callable[[str], bool],
) -> tuple[list[Problem], SelectionCounts]:
    """Return the selected problems in order, no question twice, and the numbers of all.

    Args:
        problems: problems of the dataset; None for a row without one.
        excluded: normalised questions that are left out.
    """
    counts = SelectionCounts()
    questions = set[str]()
    candidates = list[Problem]()
    for problem in problems:
        counts.rows += 1
        reason = _reject_reason(problem, selection, excluded, questions)
        if reason is not None:
            counts.left_out[reason] += 1
        elif problem is not None:
            candidates.append(problem)
    ordered = _sort(candidates, selection)
    selected = list[Problem]()
    while len(selected) < _default(selection.limit, math.inf) and (problem := next(ordered, None)) is not None:
        if is_gradable(problem.answer):
            selected.append(problem)
        else:
            counts.left_out["have an answer that cannot be graded"] += 1
    for _ in ordered:
        counts.left_out["are over the limit"] += 1
    counts.selected = len(selected)
    return selected, counts


def _reject_reason(
    problem: Problem | None, selection: Selection, excluded: Collection[str], questions: set[str]
) -> str | None:
    """Return why a problem is left out, or None and add its question to `questions`."""
    if problem is None:
        return "have no question or no answer"
    if not selection.accepts(problem):
        return "are filtered out"
    key = normalise_question(problem.question)
    if key in excluded:
        return "are in an excluded set"
    if selection.share is not None:
        part, test_share = selection.share
        if (derive_seed(0, "math", key) / _SEEDS < test_share) != (part == "test"):
            return f"are not in the split {part}"
    if key in questions:
        return "are duplicates"
    questions.add(key)
    return None


def _sort(problems: list[Problem], selection: Selection) -> Iterator[Problem]:
    match selection.order:
        case "dataset":
            return iter(problems)
        case "shuffled":
            order: list[int] = np.random.default_rng(selection.seed).permutation(len(problems)).tolist()
            return (problems[index] for index in order)
        case "ascending":
            return iter(sorted(problems, key=lambda problem: _default(problem.difficulty, math.inf)))
        case "descending":
            return iter(sorted(problems, key=lambda problem: -_default(problem.difficulty, -math.inf)))


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
