from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_a_length_penalty_is_nothing_then_linear_then_full(coefficient: float, start: int, ramp: int, n: int) -> None:
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
def test_a_length_penalty_moves_what_the_estimator_sees_and_no_recorded_reward(played: Group) -> None:
    penalty = LengthPenalty(0.5, 1, 7)
    expected = np.array(
        [
            np.nan if e.reward is None else e.reward - 0.5 * min(max((e.sampled_tokens - 1) / 6, 0), 1)
            for e in played.episodes
        ]
    )
    seen = list[np.ndarray]()

    def watching(given: Group) -> np.ndarray:
        seen.append(given.rewards)
        return GroupMean().advantages(given)

    prepared = prepare(Preparation({"env": watching}, length_penalty={"env": penalty}), played)
    np.testing.assert_allclose(seen[0], expected)
    assert prepared.group is played
    if played.valid_mask.any():
        assert prepared.length_penalty == pytest.approx(np.nanmean(played.rewards - expected))


def test_an_environment_without_a_length_penalty_keeps_its_rewards() -> None:
    prepared = prepare(
        Preparation({"env": GroupMean()}, length_penalty={"other": LengthPenalty(9, 0, 1)}), group([0, 1])
    )
    assert [row.tolist() for row in prepared.advantages] == [[-0.5], [0.5]]
    assert prepared.length_penalty is None


def test_advantages_are_clipped_and_it_is_told_how_many() -> None:
    rows, share = clip_advantages([np.array([-3.0, 0.5]), np.array([2.0])], 1.0)
    assert [row.tolist() for row in rows] == [[-1.0, 0.5], [1.0]]
    assert share == pytest.approx(2 / 3)
    prepared = prepare(Preparation({"env": GroupMean()}, clip=0.4), group([0, 1, 0.5]))
    assert [row.tolist() for row in prepared.advantages] == [[-0.4], [0.4], [0.0]]
    assert prepared.clipped == pytest.approx(2 / 3)


def ones(played: Group) -> np.ndarray:
    return np.ones(len(played.episodes))


def weights_by_episode(played: Group, normalization: Normalization, **more: object) -> list[list[float]]:
    """By what each trained token counts, episode by episode, as the service would see it."""
    found = list[list[float]]()
    for alone in played.episodes:
        # All others get nothing, so that what is left is of this episode.
        def only(given: Group, member: int = alone.member) -> np.ndarray:
            return np.array([float(other.member == member) for other in given.episodes])

        prepared = prepare(Preparation({"env": only}, normalization=normalization, **more), played)  # type: ignore[arg-type]
        found.append([float(w) for datum in prepared.data for w in datum.advantages[datum.mask]])
    return found


@given(groups(), st.integers(1, 4))
def test_normalised_by_token_all_sampled_tokens_of_a_group_count_the_same(played: Group, batch: int) -> None:
    weights = weights_by_episode(played, Normalization("token", batch, 1))
    total = max(sum(e.sampled_tokens for e in played.episodes if e.reward is not None), 1)
    for one, found in zip(played.episodes, weights, strict=True):
        expected = 0 if one.reward is None else one.sampled_tokens
        np.testing.assert_allclose(found, [1 / (total * batch)] * expected, rtol=1e-6)


@given(groups(), st.integers(1, 4))
def test_normalised_by_sequence_all_episodes_of_a_group_count_the_same(played: Group, batch: int) -> None:
    weights = weights_by_episode(played, Normalization("sequence", batch, 1))
    valid = max(int(played.valid_mask.sum()), 1)
    for one, found in zip(played.episodes, weights, strict=True):
        if one.reward is not None and one.sampled_tokens:
            assert sum(found) == pytest.approx(1 / (valid * batch), rel=1e-5)
            assert max(found) == min(found)
        else:
            assert found == []


@given(groups(), st.integers(1, 4), st.integers(1, 9))
def test_normalised_by_a_constant_a_token_counts_whatever_the_lengths(played: Group, batch: int, tokens: int) -> None:
    weights = weights_by_episode(played, Normalization("constant", batch, tokens))
    valid = max(int(played.valid_mask.sum()), 1)
    for found in weights:
        np.testing.assert_allclose(found, [1 / (tokens * valid * batch)] * len(found), rtol=1e-6)


def test_tokens_that_are_cut_off_do_not_count() -> None:
    long, short = episode(1.0, turns=[turn([1, 2], [3, 4, 5])]), episode(0.0, member=1, turns=[turn([1], [3])])
    played = Group("env", "task", 0, (long, short))
    cut = weights_by_episode(played, Normalization("token", 1, 1), max_tokens=4)
    np.testing.assert_allclose(np.concatenate(cut), [1 / 3] * 3)
    dropped = weights_by_episode(played, Normalization("token", 1, 1), max_tokens=4, overlong="drop")
    assert dropped == [[], [1.0]]


def test_the_share_of_a_group_does_not_depend_on_whether_others_teach() -> None:
    normalization = Normalization("token", 2.0, 1)
    alone = prepare(Preparation({"env": ones}, normalization=normalization), group([0, 1]))
    assert sum(float(datum.advantages.sum()) for datum in alone.data) == pytest.approx(0.5)
    again = prepare(Preparation({"env": ones}, normalization=normalization), replace(group([0, 1]), draw=7))
    assert [d.advantages.tolist() for d in again.data] == [d.advantages.tolist() for d in alone.data]
