"""Scores from several attempts at each task, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.evaluation.scores import compute_score_metrics, compute_scores
from rlkit.types import Episode, Group, Json

NONE: Mapping[str, Json] = {}


def group(
    rewards: Sequence[float | None], *, answers: Sequence[str | None] | None = None, labels: Mapping[str, Json] = NONE
) -> Group:
    episodes = list[Episode]()
    for member, reward in enumerate(rewards):
        info: dict[str, Json] = {"labels": labels} if labels else {}
        if answers is not None:
            info["answer"] = answers[member]
        episodes.append(Episode(member, 0, (), "failed" if reward is None else "completed", reward, {}, info, 1.0))
    return Group("maths", "task", 0, tuple(episodes))


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=6), min_size=1, max_size=5))
def test_pass_at_k_is_the_mean_over_all_choices_of_k(rewards: list[list[float | None]]) -> None:
    scores = compute_scores([group(row) for row in rewards])
    valid = [[reward for reward in row if reward is not None] for row in rewards]
    for name, value in scores.items():
        kind, _, k = name.partition("_at_")
        if kind == "pass":
            tasks = [row for row in valid if len(row) >= int(k)]
            expected = np.mean([np.mean([max(subset) for subset in combinations(row, int(k))]) for row in tasks])
            assert value.mean == pytest.approx(expected)
        if kind == "avg":
            assert value.mean == pytest.approx(np.mean([np.mean(row) for row in valid if row]))


@pytest.mark.parametrize(
    ("rewards", "answers", "expected"),
    [
        ([1, 1, 0], ["4", "4", "5"], 1.0),
        ([1, 0, 0], ["4", "5", "5"], 0.0),
        ([1, 0, 0, 1], ["4", "5", "5", "4"], 0.5),  # as many for the one as for the other
        ([1, 0, 0], ["4", None, None], 1.0),  # who says nothing has no vote
        ([0, 0], [None, None], 0.0),
    ],
)
def test_majority_score_uses_the_most_frequent_answer(
    rewards: list[float], answers: list[str | None], expected: float
) -> None:
    scores = compute_scores([group(rewards, answers=answers)])
    assert scores[f"maj_at_{len(rewards)}"].mean == expected


def test_without_answers_or_with_one_attempt_there_is_no_majority() -> None:
    assert not any("maj" in name for name in compute_scores([group([1, 0])]))
    assert not any("maj" in name for name in compute_scores([group([1], answers=["4"])]))


def test_failed_attempts_alone_give_no_score() -> None:
    assert compute_scores([group([None, None])]) == {}
    assert compute_score_metrics([group([None, None])], prefix="eval") == {}


def test_each_value_of_a_label_has_its_own_scores() -> None:
    groups = [
        group([1, 1], labels={"level": "Level 1", "subject": "A/B"}),
        group([0, 1], labels={"level": "Level 2", "subject": "A/B"}),
        group([0, 0], labels={"level": "Level 2", "subject": "A/B"}),
    ]
    metrics = compute_score_metrics(groups, prefix="eval")
    assert metrics["eval/maths/avg_at_2"] == metrics["eval/all/avg_at_2"] == 0.5
    assert metrics["eval/maths/level/Level 1/avg_at_2"] == 1
    assert metrics["eval/maths/level/Level 2/pass_at_2"] == 0.5
    assert metrics["eval/maths/level/Level 2/tasks"] == 2
    assert not any("subject" in key for key in metrics)  # a label of one value divides nothing
    assert not any(key.startswith("eval/all/level") for key in metrics)


def test_label_with_too_many_values_is_not_split() -> None:
    groups = [group([1], labels={"number": str(number)}) for number in range(21)]
    assert not any("number" in key for key in compute_score_metrics(groups, prefix="eval"))
