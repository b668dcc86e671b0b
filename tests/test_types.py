from __future__ import annotations

import importlib
from dataclasses import FrozenInstanceError, fields, is_dataclass

import numpy as np
import pytest

from rlkit.types import IMAGE_TOKEN, Episode, Image, Prompt, Turn, join
from tests.builders import episode, group, turn


def picture(start: int, data: bytes = b"x") -> Prompt:
    tokens = np.array([*[5] * start, IMAGE_TOKEN, IMAGE_TOKEN, 6], np.int32)
    return Prompt(tokens, (Image(start, 2, data, "png"),))


def test_prompts_are_joined_with_their_images_moved() -> None:
    both = picture(1) + picture(0)
    assert both.tokens.tolist() == [5, -1, -1, 6, -1, -1, 6]
    assert [image.start for image in both.images] == [1, 4]
    assert both.drop_first(4).images == picture(0).images


def test_a_prompt_continues_another_only_with_the_same_images() -> None:
    assert (picture(1) + picture(0)).starts_with(picture(1))
    assert not (picture(1, b"y") + picture(0)).starts_with(picture(1))
    assert not picture(1).starts_with(picture(1) + picture(0))
    assert len(join([])) == 0


def test_a_group_shows_its_rewards_and_which_are_valid() -> None:
    rewards = group([1.0, None, 0.0])
    np.testing.assert_array_equal(rewards.rewards, [1.0, np.nan, 0.0])
    assert rewards.valid_mask.tolist() == [True, False, True]


def test_an_episode_counts_its_sampled_tokens_and_segments() -> None:
    three = episode(1.0, turns=[turn([1], [2, 3], forced=1), turn([4], [5], parent=0), turn([9], [9])])
    assert three.sampled_tokens == 3
    assert three.segment_count == 2


def test_a_failed_episode_with_a_reward_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="failed"):
        Episode(0, 0, (), "failed", 0.0, {}, {}, 1.0)


def test_a_turn_with_unequal_arrays_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Turn(Prompt(np.zeros(1, np.int32)), np.zeros(2, np.int32), np.zeros(1, np.float32), np.ones(2, bool), "stop", 0)


MODULES = ["algorithms.datums", "algorithms.datums", "env", "rollout.player", "types"]
MODULES += ["store.history", "store.journal", "store.table", "training.schedule", "training.step"]
MODULES += ["training.groups", "training.run"]
CHANGING = {"Counts", "Player", "PendingStep", "History", "_GroupInPlay"}
"""Data whose purpose is to be changed."""
OWNERS = {"Groups", "GroupSupply", "PolicyLearner", "PublishedSampler", "Run"}
"""Dataclasses that own a part of a run's state, and so are not data."""
WITH_ARRAYS = {
    "PreparedGroup",
    "RecordedGroup",
    "StepGroup",
    "UpdateResult",
    "Prompt",
    "Turn",
    "Episode",
    "Group",
    "Datum",
}
WITH_ARRAYS |= {"Completion", "Reply", "PendingStep", "History", "_GroupInPlay"}
WITH_ARRAYS |= {"Task"}  # its env may have some


@pytest.mark.parametrize("module", MODULES)
def test_data_cannot_be_changed_nor_a_field_of_it_misspelt(module: str) -> None:
    names = vars(importlib.import_module(f"rlkit.{module}"))
    kinds = [kind for kind in names.values() if isinstance(kind, type) and kind.__module__ == f"rlkit.{module}"]
    data = [kind for kind in kinds if is_dataclass(kind) and kind.__name__ not in OWNERS]
    assert data
    for kind in data:
        instance = object.__new__(kind)
        with pytest.raises(AttributeError):  # a FrozenInstanceError is one
            object.__setattr__(instance, "no_such_field", 0)
        if kind.__name__ not in CHANGING:
            with pytest.raises(FrozenInstanceError):
                setattr(instance, fields(kind)[0].name, 0)
        # The truth value of compared arrays is an error, so that what holds them is itself and nothing else.
        assert (kind.__eq__ is object.__eq__) == (kind.__name__ in WITH_ARRAYS), kind


def test_each_module_of_data_has_data() -> None:
    for module, name in [
        ("training.step", "StepRecipe"),
        ("algorithms.datums", "UpdateResult"),
        ("algorithms.datums", "PreparedGroup"),
    ]:
        assert is_dataclass(getattr(importlib.import_module(f"rlkit.{module}"), name))
