from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.advantages import as_estimator, step_estimator
from rlkit.algorithms.datums import OverlongAction, Preparation, PreparedGroup, episode_data, sequence_lengths
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.shaping import Normalization
from rlkit.errors import EnvironmentFault, RunFailed
from rlkit.types import IMAGE_TOKEN, Group, Image, Prompt, Turn
from tests.builders import episode, group, turn


def prepare(preparation: Preparation, group: Group) -> PreparedGroup:
    return asyncio.run(preparation.prepare(group))


def make_data(*turns: Turn, advantages: list[float] | None = None):
    values = np.array(advantages or [1.0] * len(turns))
    return [datum for _, datum in episode_data(episode(1.0, turns=turns), values)]


def test_a_single_turn_is_aligned_for_next_token_prediction() -> None:
    (datum,) = make_data(turn([1, 2], [3, 4, 5], forced=1), advantages=[2.0])
    assert datum.prompt.tokens.tolist() == [1, 2, 3, 4]
    assert datum.targets.tolist() == [2, 3, 4, 5]
    assert datum.mask.tolist() == [False, False, True, True]
    assert datum.advantages.tolist() == [0, 0, 2, 2]
    np.testing.assert_allclose(datum.logprobs, [0, 0, -0.2, -0.3])


def test_turns_that_extend_each_other_become_one_sequence() -> None:
    (datum,) = make_data(turn([1], [2]), turn([3, 4], [5], parent=0), advantages=[1.0, -1.0])
    assert datum.prompt.tokens.tolist() == [1, 2, 3, 4]
    assert datum.targets.tolist() == [2, 3, 4, 5]
    assert datum.advantages.tolist() == [1, 0, 0, -1]


def test_a_broken_history_becomes_two_sequences() -> None:
    first, second = make_data(turn([1], [2]), turn([9, 1], [3]))
    assert first.prompt.tokens.tolist() == [1]
    assert second.prompt.tokens.tolist() == [9, 1]


def test_two_branches_of_one_turn_train_it_once() -> None:
    first, second = make_data(turn([1], [2]), turn([3], [4], parent=0), turn([5], [6], parent=0))
    assert first.targets[first.mask].tolist() == [2, 4]
    assert second.targets[second.mask].tolist() == [6]
    assert second.prompt.tokens.tolist() == [1, 2, 5]


def test_images_pass_through_and_are_never_a_target() -> None:
    tokens = np.array([1, IMAGE_TOKEN, IMAGE_TOKEN, 2], np.int32)
    prompt = Prompt(tokens, (Image(1, 2, b"png", "png"),))
    image_turn = turn([], [7, 8])
    image_turn = Turn(prompt, image_turn.completion, image_turn.logprobs, image_turn.sampled_mask, "stop", 0)
    (datum,) = make_data(image_turn)
    assert datum.prompt.images == prompt.images
    assert datum.targets.tolist() == [0, 0, 2, 7, 8]


def test_group_with_equal_rewards_has_no_data() -> None:
    preparation = Preparation({"env": GroupMean()})
    assert prepare(preparation, group([1, 1])).data == ()
    assert len(prepare(preparation, group([0, 1])).data) == 2
    assert [row.tolist() for row in prepare(preparation, group([1, 1])).advantages] == [[0.0], [0.0]]


def test_failed_episode_is_never_trained_on_by_any_loss() -> None:
    prepared = prepare(Preparation({"env": GroupMean()}, every_sequence=True), group([1, None, 1]))
    assert len(prepared.data) == 2


def mask_member(played: Group, member: int) -> Group:
    episodes = [replace(episode, masked=episode.member == member) for episode in played.episodes]
    return replace(played, episodes=tuple(episodes))


def test_masked_episode_counts_in_its_group_but_is_not_trained_on() -> None:
    played = mask_member(group([1, 0, 0]), 0)
    prepared = prepare(Preparation({"env": GroupMean()}, every_sequence=True), played)
    assert [row.tolist() for row in prepared.advantages] == [[0.0], [pytest.approx(-1 / 3)], [pytest.approx(-1 / 3)]]
    assert len(prepared.data) == 2


def test_masked_episode_does_not_count_in_the_mean_over_episodes() -> None:
    normalization = Normalization("sequence", groups_per_step=1, constant_tokens=0)
    prepared = prepare(Preparation({"env": GroupMean()}, normalization=normalization), mask_member(group([1, 0, 0]), 1))
    weights = [float(datum.advantages[datum.mask].sum()) for datum in prepared.data]
    assert weights == [pytest.approx(2 / 3 / 2), pytest.approx(-1 / 3 / 2)]


def test_completely_masked_group_has_no_signal() -> None:
    assert prepare(Preparation({"env": GroupMean()}), group([1, 0])).has_signal
    played = group([1, 0])
    every = replace(played, episodes=tuple(replace(episode, masked=True) for episode in played.episodes))
    assert not prepare(Preparation({"env": GroupMean()}), every).has_signal


@pytest.mark.parametrize(("overlong", "lengths"), [("truncate", [3, 2]), ("drop", [2])])
def test_overlong_sequence_is_truncated_or_dropped(overlong: OverlongAction, lengths: list[int]) -> None:
    long, short = episode(1.0, turns=[turn([1, 2], [3, 4, 5])]), episode(0.0, member=1, turns=[turn([1], [3, 4])])
    played = Group("env", "task", 0, (long, short))
    prepared = prepare(Preparation({"env": GroupMean()}, max_tokens=4, overlong=overlong), played)
    assert [len(datum.targets) for datum in prepared.data] == lengths
    assert prepared.overlong == 1
    if overlong == "truncate":
        assert prepared.data[0].targets.tolist() == [2, 3, 4]


def test_overlong_sequence_can_be_an_error() -> None:
    with pytest.raises(
        RunFailed, match=r"a sequence of 4 tokens of env, task task, is longer than batch\.max_tokens = 3"
    ):
        prepare(Preparation({"env": GroupMean()}, max_tokens=3, overlong="error"), group([0, 1]))


def test_error_of_an_estimator_names_it() -> None:
    def broken(group):
        raise ZeroDivisionError("mine")

    with pytest.raises(
        EnvironmentFault, match=r"estimator broken \(.*\) failed on a group of env: ZeroDivisionError: mine"
    ):
        prepare(Preparation({"env": as_estimator(broken)}), group([0, 1]))


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
    trained = [int(token) for datum in make_data(*turns) for token in datum.targets[datum.mask]]
    sampled = [int(token) for t in turns for token in t.completion[t.sampled_mask]]
    assert sorted(trained) == sorted(sampled)
    for datum in make_data(*turns):
        assert not datum.advantages[~datum.mask].any()
        assert len(datum.prompt) == len(datum.targets) == len(datum.logprobs) == len(datum.mask)


@given(histories())
def test_every_target_is_the_next_token_of_its_own_conversation(turns: list[Turn]) -> None:
    def list_tokens(index: int | None) -> list[int]:
        if index is None:
            return []
        t = turns[index]
        return [*list_tokens(t.parent), *t.prompt.tokens.tolist(), *t.completion.tolist()]

    conversations = [list_tokens(index) for index in range(len(turns))]
    for datum in make_data(*turns):
        sequence = [*datum.prompt.tokens.tolist(), int(datum.targets[-1])]
        assert sequence[1:] == datum.targets.tolist()
        assert sequence in conversations


def with_image(*, start: int, length: int, tokens: int) -> Turn:
    """A turn of `tokens` prompt tokens, an image among them, and a completion of three."""
    prompt = np.arange(1, tokens + 1, dtype=np.int32)
    prompt[start : start + length] = IMAGE_TOKEN
    sampled = turn([], [7, 8, 9])
    image = Image(start, length, b"png", "png")
    return Turn(Prompt(prompt, (image,)), sampled.completion, sampled.logprobs, sampled.sampled_mask, "stop", 0)


@pytest.mark.parametrize(
    ("max_tokens", "targets", "images"),
    [
        (9, [2, 0, 0, 0, 6, 7, 8, 9], 1),  # it fits
        (8, [2, 0, 0, 0, 6, 7, 8], 1),
        (7, [2, 0, 0, 0, 6, 7], 1),
    ],
)
def test_image_before_the_truncation_is_kept(max_tokens: int, targets: list[int], images: int) -> None:
    played = Group("env", "task", 0, (episode(1.0, turns=[with_image(start=2, length=3, tokens=6)]), episode(0.0)))
    prepared = prepare(Preparation({"env": GroupMean()}, max_tokens=max_tokens), played)
    datum = prepared.data[0]
    assert datum.targets.tolist() == targets
    assert len(datum.prompt.images) == images
    assert prepared.overlong == (max_tokens < 9)


@pytest.mark.parametrize(("max_tokens", "length"), [(6, 5), (7, 6), (8, 6), (9, 6), (10, 9), (11, 10)])
def test_image_at_the_truncation_is_dropped(max_tokens: int, length: int) -> None:
    first = turn([1, 2], [3, 4])
    second = replace(with_image(start=2, length=3, tokens=5), parent=0)
    played = Group("env", "task", 0, (episode(1.0, turns=[first, second]), episode(0.0)))
    datum = prepare(Preparation({"env": GroupMean()}, max_tokens=max_tokens), played).data[0]
    assert len(datum.targets) == length
    assert [(image.start, image.length) for image in datum.prompt.images] == ([(6, 3)] if length >= 9 else [])
    assert (datum.prompt.tokens == IMAGE_TOKEN).sum() == (3 if length >= 9 else 0)


def test_sequence_truncated_before_its_sampled_tokens_is_dropped() -> None:
    long = episode(1.0, turns=[turn([1, 2, 3, 4], [5])])
    played = Group("env", "task", 0, (long, episode(0.0, member=1)))
    prepared = prepare(Preparation({"env": GroupMean()}, max_tokens=4), played)
    assert [datum.targets.tolist() for datum in prepared.data] == [[2, 3, 4]]
    assert prepared.overlong == 1


def test_overlong_sequence_without_advantage_is_not_an_error() -> None:
    preparation = Preparation({"env": GroupMean()}, max_tokens=3, overlong="error")
    prepared = prepare(preparation, group([1, 1]))
    assert (prepared.data, prepared.overlong) == ((), 0)


def test_prepared_group_counts_its_tokens_and_has_a_signal() -> None:
    prepared = prepare(Preparation({"env": GroupMean()}), group([1, 0, 0.5]))
    assert (prepared.tokens, prepared.has_signal) == (6, True)
    every = prepare(Preparation({"env": GroupMean()}, every_sequence=True), group([1, 1]))
    assert (every.tokens, every.has_signal) == (6, False)


def test_step_estimator_changes_only_groups_of_its_environments() -> None:
    def by_place(groups: Sequence[Group]) -> list[np.ndarray]:
        return [np.array([place + 1.0, 0.0]) for place, _ in enumerate(groups)]

    whole_step = as_estimator(step_estimator(by_place))
    preparation = Preparation({"a": whole_step, "b": GroupMean(), "c": whole_step})
    assert preparation.needs_whole_steps
    assert not Preparation({"b": GroupMean()}).needs_whole_steps
    separate = [prepare(preparation, group([1, 0], env=env, draw=draw)) for draw, env in enumerate("aba")]
    together = preparation.prepare_step(separate)
    assert together[1] is separate[1]
    rows = [[row.tolist() for row in prepared.advantages] for prepared in together]
    assert rows == [[[1.0], [0.0]], [[0.5], [-0.5]], [[2.0], [0.0]]]
    assert [float(prepared.data[0].advantages.max()) for prepared in together] == [1.0, 0.5, 2.0]


def test_prepared_group_reports_its_penalty_and_clipped_share() -> None:
    prepared = prepare(Preparation({"env": GroupMean()}, clip={"env": 0.25}), group([1, 0]))
    assert [row.tolist() for row in prepared.advantages] == [[0.25], [-0.25]]
    assert (prepared.clipped, prepared.length_penalty, prepared.drifts) == (1.0, None, ())
    assert prepare(Preparation({"env": GroupMean()}), group([1, 0])).clipped is None


def test_normalization_scales_advantages_only() -> None:
    normalization = Normalization("sequence", groups_per_step=2, constant_tokens=0)
    plain = prepare(Preparation({"env": GroupMean()}), group([1, 0]))
    divided = prepare(Preparation({"env": GroupMean()}, normalization=normalization), group([1, 0]))
    for plain_datum, divided_datum in zip(plain.data, divided.data, strict=True):
        share = float(divided_datum.advantages[-1] / plain_datum.advantages[-1])
        np.testing.assert_allclose(divided_datum.advantages, plain_datum.advantages * share, rtol=1e-6)
        assert 0 < share < 1
        assert (
            divided_datum.targets is plain_datum.targets
            or divided_datum.targets.tolist() == plain_datum.targets.tolist()
        )
        np.testing.assert_array_equal(divided_datum.logprobs, plain_datum.logprobs)


@given(histories())
def test_predicted_tokens_of_an_episode_are_those_of_its_sequences(turns: list[Turn]) -> None:
    lengths = sequence_lengths(episode(1.0, turns=turns))
    assert [length - 1 for length in lengths] == [len(datum.targets) for datum in make_data(*turns)]
