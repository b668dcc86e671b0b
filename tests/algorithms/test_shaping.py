from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.advantages import as_estimator
from rlkit.algorithms.datums import Preparation, PreparedGroup
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.shaping import LengthPenalty, Normalization, clip_advantages
from rlkit.types import Group
from tests.builders import episode, group, turn


def prepare(preparation: Preparation, played: Group) -> PreparedGroup:
    return asyncio.run(preparation.prepare(played))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Any group: failed episodes, several segments, forced tokens."""
    episodes = list[object]()
    for member in range(draw(st.integers(1, 5))):
        reward = draw(st.none() | st.integers(-3, 3).map(float))
        turns = [
            turn([1, 2], range(draw(st.integers(1, 6))), forced=draw(st.integers(0, 2)))
            for _ in range(draw(st.integers(1, 3)))
        ]
        episodes.append(episode(reward, member=member, turns=turns))
    return Group("env", "task", 0, tuple(episodes))  # type: ignore[arg-type]  they are episodes


@given(st.floats(0.01, 10), st.integers(0, 50), st.integers(1, 50), st.integers(0, 200))
def test_length_penalty_is_zero_then_linear_then_full(coefficient: float, start: int, ramp: int, n: int) -> None:
    penalty = LengthPenalty(coefficient, start, start + ramp)
    if n <= start:
        assert penalty.amount(n) == 0
    elif n >= start + ramp:
        assert penalty.amount(n) == coefficient
    else:
        assert penalty.amount(n) == pytest.approx(coefficient * (n - start) / ramp)
    assert penalty.amount(n) <= penalty.amount(n + 1) <= penalty.amount(n) + coefficient / ramp * (1 + 1e-9)


@given(st.integers(0, 40))
def test_a_length_penalty_is_that_of_dapo(n: int) -> None:
    longest, cache = 30, 10
    soft = 0.0 if n <= longest - cache else ((longest - cache) - n) / cache if n <= longest else -1.0
    assert -LengthPenalty(1.0, longest - cache, longest).amount(n) == pytest.approx(soft)


@given(groups())
def test_length_penalty_changes_estimated_but_not_recorded_rewards(played: Group) -> None:
    penalty = LengthPenalty(0.5, 1, 7)
    expected = np.array(
        [
            np.nan if e.reward is None else e.reward - 0.5 * min(max((e.sampled_tokens - 1) / 6, 0), 1)
            for e in played.episodes
        ]
    )
    estimated_rewards = list[np.ndarray]()

    def watching(group: Group) -> np.ndarray:
        estimated_rewards.append(group.rewards)
        return GroupMean().advantages(group)

    prepared = prepare(Preparation({"env": as_estimator(watching)}, length_penalty={"env": penalty}), played)
    np.testing.assert_allclose(estimated_rewards[0], expected)
    assert prepared.group is played
    if played.valid_mask.any():
        assert prepared.length_penalty == pytest.approx(np.nanmean(played.rewards - expected))


def test_an_environment_without_a_length_penalty_keeps_its_rewards() -> None:
    prepared = prepare(
        Preparation({"env": GroupMean()}, length_penalty={"other": LengthPenalty(9, 0, 1)}), group([0, 1])
    )
    assert [row.tolist() for row in prepared.advantages] == [[-0.5], [0.5]]
    assert prepared.length_penalty is None


def test_advantages_are_clipped_and_their_share_is_reported() -> None:
    rows, share = clip_advantages([np.array([-3.0, 0.5]), np.array([2.0])], 1.0)
    assert [row.tolist() for row in rows] == [[-1.0, 0.5], [1.0]]
    assert share == pytest.approx(2 / 3)
    prepared = prepare(Preparation({"env": GroupMean()}, clip={"env": 0.4}), group([0, 1, 0.5]))
    assert [row.tolist() for row in prepared.advantages] == [[-0.4], [0.4], [0.0]]
    assert prepared.clipped == pytest.approx(2 / 3)


def ones(played: Group) -> np.ndarray:
    return np.ones(len(played.episodes))


def weights_by_episode(played: Group, normalization: Normalization, **settings: object) -> list[list[float]]:
    """By what each trained token counts, episode by episode, as the service would see it."""
    weights = list[list[float]]()
    for selected in played.episodes:
        # All others get nothing, so that what is left is of this episode.
        def only(group: Group, member: int = selected.member) -> np.ndarray:
            return np.array([float(episode.member == member) for episode in group.episodes])

        prepared = prepare(Preparation({"env": as_estimator(only)}, normalization=normalization, **settings), played)  # type: ignore[arg-type]
        weights.append([float(w) for datum in prepared.data for w in datum.advantages[datum.mask]])
    return weights


@given(groups(), st.integers(1, 4))
def test_token_normalization_weighs_all_tokens_of_a_group_equally(played: Group, batch: int) -> None:
    weights = weights_by_episode(played, Normalization("token", batch, 1))
    total = max(sum(e.sampled_tokens for e in played.episodes if e.reward is not None), 1)
    for played_episode, token_weights in zip(played.episodes, weights, strict=True):
        expected = 0 if played_episode.reward is None else played_episode.sampled_tokens
        np.testing.assert_allclose(token_weights, [1 / (total * batch)] * expected, rtol=1e-6)


@given(groups(), st.integers(1, 4))
def test_sequence_normalization_weighs_all_episodes_of_a_group_equally(played: Group, batch: int) -> None:
    weights = weights_by_episode(played, Normalization("sequence", batch, 1))
    valid = max(int(played.valid_mask.sum()), 1)
    for played_episode, token_weights in zip(played.episodes, weights, strict=True):
        if played_episode.reward is not None and played_episode.sampled_tokens:
            assert sum(token_weights) == pytest.approx(1 / (valid * batch), rel=1e-5)
            assert max(token_weights) == min(token_weights)
        else:
            assert token_weights == []


@given(groups(), st.integers(1, 4), st.integers(1, 9))
def test_constant_normalization_ignores_lengths(played: Group, batch: int, tokens: int) -> None:
    weights = weights_by_episode(played, Normalization("constant", batch, tokens))
    valid = max(int(played.valid_mask.sum()), 1)
    for token_weights in weights:
        np.testing.assert_allclose(token_weights, [1 / (tokens * valid * batch)] * len(token_weights), rtol=1e-6)


def test_truncated_tokens_do_not_count() -> None:
    long, short = episode(1.0, turns=[turn([1, 2], [3, 4, 5])]), episode(0.0, member=1, turns=[turn([1], [3])])
    played = Group("env", "task", 0, (long, short))
    truncated = weights_by_episode(played, Normalization("token", 1, 1), max_tokens=4)
    np.testing.assert_allclose(np.concatenate(truncated), [1 / 3] * 3)
    dropped = weights_by_episode(played, Normalization("token", 1, 1), max_tokens=4, overlong="drop")
    assert dropped == [[], [1.0]]


def test_weight_of_a_group_does_not_depend_on_uninformative_groups() -> None:
    normalization = Normalization("token", 2.0, 1)
    alone = prepare(Preparation({"env": as_estimator(ones)}, normalization=normalization), group([0, 1]))
    assert sum(float(datum.advantages.sum()) for datum in alone.data) == pytest.approx(0.5)
    again = prepare(
        Preparation({"env": as_estimator(ones)}, normalization=normalization), replace(group([0, 1]), draw=7)
    )
    assert [d.advantages.tolist() for d in again.data] == [d.advantages.tolist() for d in alone.data]
