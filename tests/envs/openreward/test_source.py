"""Which tasks a run plays, and that a resumed run plays the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config import load_config, load_envs
from rlkit.config.schema.envs import TargetCurriculum
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.listing import Split, choose_tasks
from rlkit.envs.openreward.source import OpenRewardTasks
from rlkit.errors import UsageError
from rlkit.tasks.from_config import task_source
from rlkit.training.trainer import RLTrainer
from tests.envs.openreward.worlds import Marks, Served

sizes_of_splits = st.dictionaries(st.sampled_from(["train", "test", "x"]), st.integers(1, 30), min_size=1)


@given(sizes=sizes_of_splits, seed=st.integers(0, 99))
def test_the_choice_follows_from_sizes_settings_and_seed(sizes: dict[str, int], seed: int) -> None:
    splits = {"train": Split(shuffle=False, num_samples=3), "test": Split(num_samples=5)}
    tasks = choose_tasks(sizes, splits, seed=seed)
    assert tasks == choose_tasks(sizes, splits, seed=seed)
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
    with pytest.raises(UsageError, match="the run was started with marks, not answers"):
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
        ([], "splits is empty"),
        ({"train": {"num_samples": 0}}, "num_samples"),
        ({"train": {"samples": 1}}, "samples"),
    ],
)
def test_splits_that_make_no_sense_are_refused(worlds: Served, splits: object, message: str) -> None:
    settings = {"envs": {"m": {"env": "openreward", "args": {"target": worlds.url, "splits": splits}}}}
    config = load_config([], settings=settings).config  # pyright: ignore
    with pytest.raises(UsageError, match=message):
        load_envs("m", config.envs["m"], field="envs.m", seed=0)


def configured(url: str, directory: Path, *, resume: bool, **args: object) -> RLTrainer:
    settings = {
        "model": "simulated",
        "envs": {"mine": {"env": "openreward", "args": {"target": f"{url}#marks"}}},
        "eval": {
            "envs": {"held_out": {"env": "openreward", "args": {"target": f"{url}#marks", "splits": "test"} | args}}
        },
    }
    resolved = load_config([], settings=settings)  # pyright: ignore
    return RLTrainer(resolved, directory=directory, resume=resume)


def begun(url: str, directory: Path, *, resume: bool = False, **args: object) -> list[str]:
    """The tasks that a run evaluates, which is begun, or gone on with, on a server."""
    trainer = configured(url, directory, resume=resume, **args)
    trainer._manifest.write(directory)  # pyright: ignore[reportPrivateUsage]  as `train` does, which would need a service
    return [env.task_id for env in trainer._eval_tasks["held_out"]]  # pyright: ignore


def serve(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[object]], list[object]]) -> None:
    """From now on the server has other tasks."""
    tasks = {split: change(Marks.list_tasks(split)) for split in ("train", "test")}
    monkeypatch.setattr(Marks, "_tasks_cache", tasks, raising=False)


@pytest.mark.slow
def test_a_run_records_its_tasks_and_evaluates_the_same_ones_after_a_server_has_got_more(
    worlds: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(worlds.url, tmp_path)
    recorded = json.loads((tmp_path / "tasks.json").read_text())
    test = recorded["eval.envs.held_out"]
    assert test["target"] == "marks"
    assert test["sizes"] == {"test": len(Marks.list_tasks("test"))}
    assert first == [f"marks/test/{index}" for index in test["tasks"]["test"]]
    assert set(recorded) == {"envs.mine", "eval.envs.held_out"}
    serve(monkeypatch, lambda tasks: [*tasks, *({"id": number} for number in range(90, 99))])
    assert begun(worlds.url, tmp_path, resume=True) == first
    assert begun(worlds.url, tmp_path / "other") != first
    assert begun(worlds.url, tmp_path / "repeated", splits={"test": {"size": test["sizes"]["test"]}}) == first


def test_a_run_does_not_go_on_with_tasks_that_have_changed_or_are_gone(
    worlds: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(worlds.url, tmp_path)
    serve(monkeypatch, lambda tasks: tasks[::-1])
    with pytest.raises(UsageError, match="the tasks of marks have changed since the run was started"):
        begun(worlds.url, tmp_path, resume=True)
    serve(monkeypatch, lambda tasks: tasks[1:])
    with pytest.raises(UsageError, match=r"of marks had \d tasks when the run was started, and has fewer now"):
        begun(worlds.url, tmp_path, resume=True)


def test_other_settings_of_a_run_that_goes_on_are_followed(worlds: Served, tmp_path: Path) -> None:
    assert len(begun(worlds.url, tmp_path)) == 2
    assert begun(worlds.url, tmp_path, resume=True, splits={"test": {"num_samples": 1, "shuffle": False}}) == [
        "marks/test/0"
    ]


def test_a_size_that_a_split_does_not_have_is_refused(worlds: Served) -> None:
    with pytest.raises(UsageError, match=r"splits\.train\.size: the split has \d+ tasks, not 1000"):
        made(worlds.url, splits={"train": Split(size=1000)})


def test_a_server_that_does_not_show_its_tasks_is_said_to_go_unnoticed(
    worlds: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(split: str, index: int) -> object:
        raise NotImplementedError

    monkeypatch.setattr(Marks, "get_task", hidden)
    told = list[str]()
    made(worlds.url, note=told.append)
    assert told == ["marks does not show its tasks, so changes of them cannot be detected"]
