from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import group_mean
from rlkit.batch import Excess, Preparation, Prepared, episode_data
from rlkit.errors import EnvironmentFault, RunFailed
from rlkit.shaping import Normalization
from rlkit.types import IMAGE_TOKEN, Group, Image, Prompt, Turn
from tests.builders import episode, group, turn


def prepare(preparation: Preparation, group: Group) -> Prepared:
    return asyncio.run(preparation.prepare(group))


def data_of(*turns: Turn, advantages: list[float] | None = None):
    values = np.array(advantages or [1.0] * len(turns))
    return list(episode_data(episode(1.0, turns=turns), values))


def test_a_single_turn_is_aligned_for_next_token_prediction() -> None:
    (datum,) = data_of(turn([1, 2], [3, 4, 5], forced=1), advantages=[2.0])
    assert datum.prompt.tokens.tolist() == [1, 2, 3, 4]
    assert datum.targets.tolist() == [2, 3, 4, 5]
    assert datum.mask.tolist() == [False, False, True, True]
    assert datum.advantages.tolist() == [0, 0, 2, 2]
    np.testing.assert_allclose(datum.logprobs, [0, 0, -0.2, -0.3])


def test_turns_that_extend_each_other_become_one_sequence() -> None:
    (datum,) = data_of(turn([1], [2]), turn([3, 4], [5], parent=0), advantages=[1.0, -1.0])
    assert datum.prompt.tokens.tolist() == [1, 2, 3, 4]
    assert datum.targets.tolist() == [2, 3, 4, 5]
    assert datum.advantages.tolist() == [1, 0, 0, -1]


def test_a_broken_history_becomes_two_sequences() -> None:
    first, second = data_of(turn([1], [2]), turn([9, 1], [3]))
    assert first.prompt.tokens.tolist() == [1]
    assert second.prompt.tokens.tolist() == [9, 1]


def test_two_branches_of_one_turn_train_it_once() -> None:
    first, second = data_of(turn([1], [2]), turn([3], [4], parent=0), turn([5], [6], parent=0))
    assert first.targets[first.mask].tolist() == [2, 4]
    assert second.targets[second.mask].tolist() == [6]
    assert second.prompt.tokens.tolist() == [1, 2, 5]


def test_images_pass_through_and_are_never_a_target() -> None:
    tokens = np.array([1, IMAGE_TOKEN, IMAGE_TOKEN, 2], np.int32)
    prompt = Prompt(tokens, (Image(1, 2, b"png", "png"),))
    seen = turn([], [7, 8])
    seen = Turn(prompt, seen.completion, seen.logprobs, seen.sampled, "stop", 0)
    (datum,) = data_of(seen)
    assert datum.prompt.images == prompt.images
    assert datum.targets.tolist() == [0, 0, 2, 7, 8]


def test_a_group_with_equal_rewards_costs_nothing() -> None:
    preparation = Preparation({"env": group_mean})
    assert prepare(preparation, group([1, 1])).data == ()
    assert len(prepare(preparation, group([0, 1])).data) == 2
    assert [row.tolist() for row in prepare(preparation, group([1, 1])).advantages] == [[0.0], [0.0]]


def test_a_failed_episode_is_never_trained_on_not_even_by_a_loss_that_wants_every_sequence() -> None:
    prepared = prepare(Preparation({"env": group_mean}, every_sequence=True), group([1, None, 1]))
    assert len(prepared.data) == 2


def masking(played: Group, member: int) -> Group:
    episodes = [replace(one, masked=one.member == member) for one in played.episodes]
    return replace(played, episodes=tuple(episodes))


def test_a_masked_episode_counts_in_its_group_and_is_not_trained_on() -> None:
    played = masking(group([1, 0, 0]), 0)
    prepared = prepare(Preparation({"env": group_mean}, every_sequence=True), played)
    assert [row.tolist() for row in prepared.advantages] == [[0.0], [pytest.approx(-1 / 3)], [pytest.approx(-1 / 3)]]
    assert len(prepared.data) == 2


def test_a_masked_episode_takes_no_part_in_the_mean_over_episodes() -> None:
    normalization = Normalization("sequence", groups=1, tokens=0)
    kept = prepare(Preparation({"env": group_mean}, normalization=normalization), masking(group([1, 0, 0]), 1))
    weights = [float(datum.advantages[datum.mask].sum()) for datum in kept.data]
    assert weights == [pytest.approx(2 / 3 / 2), pytest.approx(-1 / 3 / 2)]


def test_a_group_whose_only_lessons_are_masked_teaches_nothing() -> None:
    assert prepare(Preparation({"env": group_mean}), group([1, 0])).teaches
    played = group([1, 0])
    every = replace(played, episodes=tuple(replace(one, masked=True) for one in played.episodes))
    assert not prepare(Preparation({"env": group_mean}), every).teaches


@pytest.mark.parametrize(("excess", "lengths"), [("truncate", [3, 2]), ("drop", [2])])
def test_a_sequence_that_is_too_long_is_cut_or_left_out(excess: Excess, lengths: list[int]) -> None:
    long, short = episode(1.0, turns=[turn([1, 2], [3, 4, 5])]), episode(0.0, member=1, turns=[turn([1], [3, 4])])
    played = Group("env", "task", 0, (long, short))
    prepared = prepare(Preparation({"env": group_mean}, max_tokens=4, excess=excess), played)
    assert [len(datum.targets) for datum in prepared.data] == lengths
    assert prepared.excess == 1
    if excess == "truncate":
        assert prepared.data[0].targets.tolist() == [2, 3, 4]


def test_a_sequence_that_is_too_long_can_end_the_run() -> None:
    with pytest.raises(
        RunFailed, match=r"a sequence of 4 tokens of env, task task, is longer than batch\.max_tokens = 3"
    ):
        prepare(Preparation({"env": group_mean}, max_tokens=3, excess="error"), group([0, 1]))


def test_an_estimator_that_raises_is_named() -> None:
    def broken(group):
        raise ZeroDivisionError("mine")

    with pytest.raises(
        EnvironmentFault, match=r"estimator broken \(.*\) failed on a group of env: ZeroDivisionError: mine"
    ):
        prepare(Preparation({"env": broken}), group([0, 1]))


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    """Any episode: each turn starts a segment or extends an earlier turn."""
    turns, token = list[Turn](), 0
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        prompt_size = draw(st.integers(1 if parent is None else 0, 4))  # a truncated reply may be continued as it is
        completion_size = draw(st.integers(1, 4))
        ids = list(range(token, token + prompt_size + completion_size))
        token += len(ids)
        forced = draw(st.integers(0, completion_size))
        turns.append(turn(ids[:prompt_size], ids[prompt_size:], forced=forced, parent=parent))
    return turns


@given(histories())
def test_every_sampled_token_is_trained_in_exactly_one_datum_and_no_other_token_is(turns: list[Turn]) -> None:
    trained = [int(token) for datum in data_of(*turns) for token in datum.targets[datum.mask]]
    sampled = [int(token) for t in turns for token in t.completion[t.sampled]]
    assert sorted(trained) == sorted(sampled)
    for datum in data_of(*turns):
        assert not datum.advantages[~datum.mask].any()
        assert len(datum.prompt) == len(datum.targets) == len(datum.logprobs) == len(datum.mask)


@given(histories())
def test_every_target_is_the_next_token_of_its_own_conversation(turns: list[Turn]) -> None:
    def whole(index: int | None) -> list[int]:
        if index is None:
            return []
        t = turns[index]
        return [*whole(t.parent), *t.prompt.tokens.tolist(), *t.completion.tolist()]

    conversations = [whole(index) for index in range(len(turns))]
    for datum in data_of(*turns):
        sequence = [*datum.prompt.tokens.tolist(), int(datum.targets[-1])]
        assert sequence[1:] == datum.targets.tolist()
        assert sequence in conversations
