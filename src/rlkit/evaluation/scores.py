"""Scores of a model at an environment's tasks, with several attempts at each, and their intervals.

Invariant: tasks are what is independent, never the attempts at one: every interval is over tasks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import numpy as np

from rlkit.metrics.metrics import SOLVED
from rlkit.types import Episode, Group, Json

COVERAGE = 0.95
"""How often an interval holds the true value."""

LABELS_MAX = 20
"""A label with more values than this is no way to divide tasks."""

_Z = NormalDist().inv_cdf((1 + COVERAGE) / 2)


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of tasks' values, each from 0 to 1, the ends of its 95 % interval, and the number of tasks."""

    mean: float
    low: float
    high: float
    tasks: int


def compute_scores(groups: Sequence[Group]) -> dict[str, Score]:
    """Return `avg_at_k`, `pass_at_k` and `maj_at_k` of groups whose tasks have up to k attempts with a reward.

    `avg_at_k` is the share of a task's attempts that solve it, for the largest k; for k = 1 its name is `pass_at_1`, of
    which it is an estimate for every k. `pass_at_k` is the chance that one of k does, without bias: with c of n solved,
    1 − C(n − c, k) / C(n, k), for powers of two and the largest k (Chen et al. 2021, arXiv:2107.03374). `maj_at_k` is
    whether the answer that most attempts give solves it (Wang et al. 2022,
    arXiv:2203.11171), for the largest k, where outcomes have an `answer` in their info; of several answers that are as
    frequent, the mean. An attempt without an answer has no vote.
    """
    played = [[episode for episode in group.episodes if episode.reward is not None] for group in groups]
    played = [episodes for episodes in played if episodes]
    if not played:
        return {}
    largest = max(map(len, played))
    counts = [(len(episodes), sum(map(_solves, episodes))) for episodes in played]
    found = {
        f"{'pass' if largest == 1 else 'avg'}_at_{largest}": estimate_mean([solved / tries for tries, solved in counts])
    }
    sizes = {2**power for power in range(1, largest.bit_length())} | {largest}
    for k in sorted(sizes - {1}):
        values = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        found[f"pass_at_{k}"] = estimate_mean(values)
    voted = [value for episodes in played if (value := _majority(episodes)) is not None]
    if voted and largest > 1:
        found[f"maj_at_{largest}"] = estimate_mean(voted)
    return found


def estimate_mean(values: Sequence[float]) -> Score:
    """Return the mean of tasks' values from 0 to 1, with a 95 % interval that stays between 0 and 1.

    It is Wilson's interval for the number of tasks n that would give the variance that was seen: with the mean m and
    its standard error s, n = m(1 − m) / s². Where all values are equal it is that of as many tasks as there are.
    Source: Wilson 1927; the effective number as in Korn and Graubard 1998.
    """
    array = np.asarray(values, np.float64)
    tasks, mean = len(array), float(array.mean())
    squared_error = float(array.var(ddof=1)) / tasks if tasks > 1 else 0.0
    worth = mean * (1 - mean) / squared_error if squared_error > 0 and 0 < mean < 1 else float(tasks)
    below = 1 + _Z**2 / worth
    middle = (mean + _Z**2 / (2 * worth)) / below
    half = _Z / below * math.sqrt(mean * (1 - mean) / worth + _Z**2 / (4 * worth**2))
    return Score(mean, max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), tasks)


def compute_score_metrics(groups: Sequence[Group], *, prefix: str) -> dict[str, float]:
    """Return the scores of groups by environment, over all, and by label, each with the ends of its interval.

    Under `<prefix>/<env>/<score>`, `…/<score>/low` and `…/<score>/high`, and the same under
    `<prefix>/<env>/<label>/<value>/…`, with the number of `tasks`, for each label that the outcomes' info has in
    `labels`.
    """
    metrics = dict[str, float]()
    for name in [*dict.fromkeys(group.env for group in groups), "all"]:
        own = [group for group in groups if name in (group.env, "all")]
        metrics |= _flat(f"{prefix}/{name}", compute_scores(own))
        if name == "all":
            continue
        for label, values in _divided(own).items():
            for value, some in values.items():
                below = f"{prefix}/{name}/{label}/{value}"
                if of_label := compute_scores(some):
                    metrics |= {f"{below}/tasks": float(len(some))} | _flat(below, of_label)
    return metrics


def _flat(prefix: str, named: Mapping[str, Score]) -> dict[str, float]:
    metrics = dict[str, float]()
    for name, each in named.items():
        key = f"{prefix}/{name}"
        metrics |= {key: each.mean, f"{key}/low": each.low, f"{key}/high": each.high}
    return metrics


def _divided(groups: Sequence[Group]) -> Mapping[str, Mapping[str, Sequence[Group]]]:
    """Return groups by label and value, in order; a label of a single value, or of too many, divides nothing."""
    labelled = defaultdict[str, dict[str, list[Group]]](dict)
    for group in groups:
        for label, value in _labels(group).items():
            labelled[label].setdefault(value, []).append(group)
    return {label: dict(sorted(values.items())) for label, values in labelled.items() if 1 < len(values) <= LABELS_MAX}


def _labels(group: Group) -> dict[str, str]:
    for episode in group.episodes:
        labels = episode.info.get("labels")
        if isinstance(labels, Mapping):
            known = cast("Mapping[str, Json]", labels)
            return {_name(str(label)): _name(str(value)) for label, value in known.items()}
    return {}


def _name(text: str) -> str:
    """Return a text as one part of a metric's name."""
    return text.replace("/", "_").strip() or "_"


def _solves(episode: Episode) -> bool:
    return episode.reward is not None and episode.reward >= SOLVED


def _majority(episodes: Sequence[Episode]) -> float | None:
    """Return the chance that the most frequent answer solves the task; None where no outcome has an answer."""
    if not any("answer" in episode.info for episode in episodes):
        return None
    votes, solved = Counter[str](), Counter[str]()
    for episode in episodes:
        answer = episode.info.get("answer")
        if answer is not None:
            votes[str(answer)] += 1
            solved[str(answer)] += _solves(episode)
    most = max(votes.values(), default=0)
    return float(np.mean([solved[answer] / most for answer, count in votes.items() if count == most])) if most else 0.0
