"""Choice of a run's tasks; a resumed run plays the same tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.config.schema.envs import TargetCurriculum
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.listing import Split, choose_tasks
from rlkit.envs.openreward.task import OpenRewardTask
from rlkit.errors import UsageError
from rlkit.tasks.from_config import task_source
from rlkit.tasks.provenance import write_manifest
from rlkit.training.trainer import RLTrainer
from rlkit.types import Json
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


def make_tasks(url: str, **args: object) -> Sequence[OpenRewardTask]:
    return openreward(target=f"{url}#marks", **args)  # pyright: ignore


def test_a_resumed_run_keeps_its_tasks_although_the_server_has_others(
    worlds: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = list[Json]()
    first = make_tasks(worlds.url, splits={"train": Split(num_samples=4)}, pin=lambda now: records.append(now) or now)
    serve(monkeypatch, lambda tasks: [*tasks, *({"id": number} for number in range(90, 99))])
    splits = {"train": Split(num_samples=4)}
    assert make_tasks(worlds.url, splits=splits) != first
    assert make_tasks(worlds.url, splits=splits, pin=lambda now: records[0]) == first


def test_a_run_cannot_be_resumed_with_another_environment(worlds: Served) -> None:
    records = list[Json]()
    make_tasks(worlds.url, pin=lambda now: records.append(now) or now)
    with pytest.raises(UsageError, match="the run was started with marks, not answers"):
        openreward(target=f"{worlds.url}#answers", pin=lambda now: records[0])


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
    loaded = load_envs("mine", config.envs["mine"], field="envs.mine", seed=0)
    tasks = cast("Sequence[OpenRewardTask]", loaded)
    assert sorted(task.task_id.rpartition("/")[0] for task in tasks) == ["marks/test"] * 2 + ["marks/train"] * 2
    assert len({task.task_id for task in tasks}) == 4


def test_a_curriculum_may_draw_the_tasks(worlds: Served) -> None:
    source = task_source(make_tasks(worlds.url), TargetCurriculum(name="target"), field="c", seed=0)
    assert source.next() is not None


def test_the_first_environment_of_a_server_needs_no_variant(worlds: Served) -> None:
    assert openreward(target=worlds.url)[0].settings.access.target.variant == "marks"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([], "splits is empty"),
        ({"train": {"num_samples": 0}}, "num_samples"),
        ({"train": {"samples": 1}}, "samples"),
    ],
)
def test_invalid_splits_are_rejected(worlds: Served, splits: object, message: str) -> None:
    settings = {"envs": {"m": {"env": "openreward", "args": {"target": worlds.url, "splits": splits}}}}
    config = load_config([], settings=settings).config  # pyright: ignore
    with pytest.raises(UsageError, match=message):
        load_envs("m", config.envs["m"], field="envs.m", seed=0)


def make_trainer(url: str, directory: Path, *, resume: bool, **args: object) -> RLTrainer:
    settings = {
        "model": "simulated",
        "envs": {"mine": {"env": "openreward", "args": {"target": f"{url}#marks"}}},
        "eval": {
            "envs": {"held_out": {"env": "openreward", "args": {"target": f"{url}#marks", "splits": "test"} | args}}
        },
    }
    resolved = load_config([], settings=settings)  # pyright: ignore
    return RLTrainer(resolved, directory=directory, resume=resume)


def recorded_eval_tasks(url: str, directory: Path, *, resume: bool = False, **args: object) -> list[str]:
    """Start or resume a run on a server; return the names of its evaluation tasks."""
    trainer = make_trainer(url, directory, resume=resume, **args)
    write_manifest(directory, trainer._manifest)  # pyright: ignore[reportPrivateUsage]  as `train` does, which would need a service
    return [env.task_id for env in trainer._eval_tasks["held_out"]]  # pyright: ignore


def serve(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[object]], list[object]]) -> None:
    """Change the tasks of the server."""
    tasks = {split: change(Marks.list_tasks(split)) for split in ("train", "test")}
    monkeypatch.setattr(Marks, "_tasks_cache", tasks, raising=False)


@pytest.mark.slow
def test_a_run_evaluates_its_recorded_tasks_after_the_server_adds_more(
    worlds: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorded_eval_tasks(worlds.url, tmp_path)
    recorded = json.loads((tmp_path / "tasks.json").read_text())
    test = recorded["eval.envs.held_out"]
    assert test["target"] == "marks"
    assert test["sizes"] == {"test": len(Marks.list_tasks("test"))}
    assert first == [f"marks/test/{index}" for index in test["tasks"]["test"]]
    assert set(recorded) == {"envs.mine", "eval.envs.held_out"}
    serve(monkeypatch, lambda tasks: [*tasks, *({"id": number} for number in range(90, 99))])
    assert recorded_eval_tasks(worlds.url, tmp_path, resume=True) == first
    assert recorded_eval_tasks(worlds.url, tmp_path / "other") != first
    assert (
        recorded_eval_tasks(worlds.url, tmp_path / "repeated", splits={"test": {"size": test["sizes"]["test"]}})
        == first
    )


def test_a_run_does_not_resume_with_changed_or_missing_tasks(
    worlds: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_eval_tasks(worlds.url, tmp_path)
    serve(monkeypatch, lambda tasks: tasks[::-1])
    with pytest.raises(UsageError, match="the tasks of marks have changed since the run was started"):
        recorded_eval_tasks(worlds.url, tmp_path, resume=True)
    serve(monkeypatch, lambda tasks: tasks[1:])
    with pytest.raises(UsageError, match=r"of marks had \d tasks when the run was started, and has fewer now"):
        recorded_eval_tasks(worlds.url, tmp_path, resume=True)


def test_changed_settings_of_a_resumed_run_take_effect(worlds: Served, tmp_path: Path) -> None:
    assert len(recorded_eval_tasks(worlds.url, tmp_path)) == 2
    assert recorded_eval_tasks(
        worlds.url, tmp_path, resume=True, splits={"test": {"num_samples": 1, "shuffle": False}}
    ) == ["marks/test/0"]


def test_a_size_beyond_the_split_is_rejected(worlds: Served) -> None:
    with pytest.raises(UsageError, match=r"splits\.train\.size: the split has \d+ tasks, not 1000"):
        make_tasks(worlds.url, splits={"train": Split(size=1000)})


def test_a_server_that_does_not_list_its_tasks_is_noted(worlds: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(split: str, index: int) -> object:
        raise NotImplementedError

    monkeypatch.setattr(Marks, "get_task", hidden)
    notes = list[str]()
    make_tasks(worlds.url, note=notes.append)
    assert notes == ["marks does not show its tasks, so changes of them cannot be detected"]
