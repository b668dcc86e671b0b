"""Which tasks a run plays, and that a resumed run plays the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config import load_config, load_envs
from rlkit.config.curriculum import TargetCurriculum
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.listing import Split, chosen
from rlkit.envs.openreward.source import OpenRewardTasks
from rlkit.errors import UsageError
from rlkit.settings import task_source
from tests.envs.openreward.worlds import Served

sizes_of_splits = st.dictionaries(st.sampled_from(["train", "test", "x"]), st.integers(1, 30), min_size=1)


@given(sizes=sizes_of_splits, seed=st.integers(0, 99))
def test_the_choice_follows_from_sizes_settings_and_seed(sizes: dict[str, int], seed: int) -> None:
    splits = {"train": Split(shuffle=False, num_samples=3), "test": Split(num_samples=5)}
    tasks = chosen(sizes, splits, seed=seed)
    assert tasks == chosen(sizes, splits, seed=seed)
    assert len(set(tasks)) == len(tasks)
    assert all(0 <= index < sizes[split] for split, index in tasks)
    assert [index for split, index in tasks if split == "train"] == [*range(min(3, sizes.get("train", 0)))]
    assert sum(split == "test" for split, _ in tasks) == min(5, sizes.get("test", 0))
    assert sum(split == "x" for split, _ in tasks) == sizes.get("x", 0)


def made(url: str, **args: object) -> OpenRewardTasks:
    return openreward(target=f"{url}#marks", **args)  # pyright: ignore


def test_a_resumed_run_sees_the_tasks_that_it_began_with_though_the_server_has_others(worlds: Served) -> None:
    first = made(worlds.url, splits={"train": Split(num_samples=4)}, seed=3)
    first.next()
    kept = first.state_dict()
    rest = [first.next().task_id for _ in range(7)]
    grown = made(worlds.url, splits={"train": Split(num_samples=4)}, seed=3)
    grown.load_state_dict({**kept, "sizes": {"train": 50}})
    assert grown.state_dict()["sizes"] == {"train": 50}
    again = made(worlds.url, splits={"train": Split(num_samples=4)}, seed=3)
    again.load_state_dict(grown.state_dict())
    again.load_state_dict(kept)
    assert [again.next().task_id for _ in range(7)] == rest


def test_a_run_cannot_be_resumed_with_another_environment(worlds: Served) -> None:
    state = made(worlds.url).state_dict()
    with pytest.raises(UsageError, match="the run was begun with marks, and this is answers"):
        openreward(target=f"{worlds.url}#answers").load_state_dict(state)


def test_several_splits_and_a_configuration_name_the_same_tasks(worlds: Served) -> None:
    settings: Mapping[str, object] = {
        "envs": {
            "mine": {
                "env": "openreward",
                "args": {"target": f"{worlds.url}#marks", "splits": {"train": {"num_samples": 2}, "test": {}}},
            }
        }
    }
    config = load_config([], settings=settings).config  # pyright: ignore
    tasks = load_envs("mine", config.envs["mine"], field="envs.mine", seed=0)
    assert isinstance(tasks, OpenRewardTasks)
    assert sorted(task.task_id.rpartition("/")[0] for task in tasks) == ["marks/test"] * 2 + ["marks/train"] * 2
    assert len({task.task_id for task in tasks}) == 4


def test_a_curriculum_may_choose_among_them(worlds: Served) -> None:
    source = task_source(made(worlds.url), TargetCurriculum(name="target"), field="c", seed=0)
    assert source.next() is not None


def test_a_server_whose_first_environment_is_meant_needs_no_variant(worlds: Served) -> None:
    assert openreward(target=worlds.url)[0].settings.access.target.variant == "marks"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([], "splits: name one at least"),
        ({"train": {"num_samples": 0}}, "num_samples"),
        ({"train": {"samples": 1}}, "samples"),
    ],
)
def test_splits_that_make_no_sense_are_refused(worlds: Served, splits: object, message: str) -> None:
    settings = {"envs": {"m": {"env": "openreward", "args": {"target": worlds.url, "splits": splits}}}}
    config = load_config([], settings=settings).config  # pyright: ignore
    with pytest.raises(UsageError, match=message):
        load_envs("m", config.envs["m"], field="envs.m", seed=0)
