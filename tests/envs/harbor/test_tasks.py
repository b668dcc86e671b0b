from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.harbor.tasks import Selection, Split, find_tasks, require_readable
from rlkit.errors import UsageError

from .conftest import write_task

IDS = [f"bench/task-{number}" for number in range(40)]
ids = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "task.toml").write_text("")
    return root


def test_a_single_task_is_named_after_its_folder(tmp_path: Path) -> None:
    assert find_tasks(folder_of(tmp_path, "hello") / "hello") == {"hello": tmp_path / "hello"}


def test_folders_of_tasks_and_of_datasets_are_searched(tmp_path: Path) -> None:
    folder_of(tmp_path, "one", "set/two", "set/three", ".hidden/four", "sets/more/five")
    (tmp_path / "empty").mkdir()
    assert list(find_tasks(tmp_path)) == ["one", "set/three", "set/two", "sets/more/five"]


def test_a_link_to_a_listed_task_is_no_second_task(tmp_path: Path) -> None:
    folder_of(tmp_path, "z/first", "elsewhere/second")
    (tmp_path / "z" / "again").symlink_to("first")
    (tmp_path / "z" / "second").symlink_to(tmp_path / "elsewhere" / "second")
    (tmp_path / "a").symlink_to("z")
    (tmp_path / "z" / "around").symlink_to(tmp_path / "z")
    assert list(find_tasks(tmp_path / "z")) == ["first", "second"]
    assert list(find_tasks(tmp_path)) == ["elsewhere/second", "z/first"]


def test_a_folder_inside_a_task_is_no_task(tmp_path: Path) -> None:
    folder_of(tmp_path, "one", "one/environment/nested")
    assert list(find_tasks(tmp_path)) == ["one"]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("taskz", r"there is no folder .*taskz\. Did you mean '.*tasks'\?"),
        ("empty", "no folder in .*empty has a task.toml"),
        ("old", r".*old/one is a task of terminal-bench 1: run `rlkit tasks convert .*old --to DIR`"),
    ],
)
def test_a_folder_without_tasks_is_a_one_line_error(tmp_path: Path, folder: str, message: str) -> None:
    folder_of(tmp_path, "tasks/one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old" / "one").mkdir(parents=True)
    (tmp_path / "old" / "one" / "task.yaml").write_text("")
    with pytest.raises(UsageError, match=f"^tasks_dir: {message}"):
        find_tasks(tmp_path / folder)


def test_globs_match_the_whole_id_or_its_last_part() -> None:
    chosen = Selection(task_ids=["task-1*", "bench/task-2"], exclude=["*-1[5-9]"], shuffle=False).select(IDS)
    assert chosen == [f"bench/task-{number}" for number in (1, 10, 11, 12, 13, 14, 2)]


def test_the_order_depends_on_the_seed_and_not_on_other_tasks() -> None:
    order, other_order = Selection(seed=1).select(IDS), Selection(seed=2).select(IDS)
    assert order != other_order
    assert sorted(order) == sorted(other_order) == sorted(IDS)
    assert Selection(seed=1).select(IDS[::-1]) == order
    fewer = Selection(seed=1, exclude=["task-7"]).select(IDS)
    assert fewer == [task for task in order if task != "bench/task-7"]
    assert Selection(seed=1, max_tasks=3).select(IDS) == order[:3]


@given(ids, st.floats(0.05, 0.95), st.integers(0, 9), st.integers(0, 9))
def test_a_task_is_in_exactly_one_half_whatever_else_is_chosen(
    tasks: list[str], fraction: float, seed: int, other_seed: int
) -> None:
    train = halves(tasks, "train", eval_fraction=fraction, seed=seed)
    held_out = halves(tasks[: len(tasks) // 2 + 1], "eval", eval_fraction=fraction, seed=other_seed)
    assert not set(train) & set(held_out)
    assert sorted([*train, *halves(tasks, "eval", eval_fraction=fraction)]) == sorted(tasks)


def halves(tasks: list[str], split: Split, **settings: object) -> list[str]:
    try:
        return Selection(split=split, **settings).select(tasks)  # type: ignore[arg-type]  as the test gives them
    except UsageError as error:
        assert f"is in the split {split}" in str(error)
        return []


def test_a_fifth_is_kept_for_evaluation_or_what_is_named() -> None:
    assert 3 <= len(Selection(split="eval").select(IDS)) <= 13
    named = ["task-3", "task-4"]
    assert Selection(split="eval", eval_tasks=named, shuffle=False).select(IDS) == ["bench/task-3", "bench/task-4"]
    assert len(Selection(split="train", eval_tasks=named).select(IDS)) == 38


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task_ids": ["task-l0"]}, r"task_ids: no task matches 'task-l0'\. Similar: task-0, "),
        ({"task_ids": ["xyz*"]}, r"task_ids: no task matches 'xyz\*'\. The 40 tasks: bench/task-0, .*, …"),
        ({"exclude": ["*"]}, "exclude: all of the 40 selected tasks are excluded"),
        ({"split": "eval", "eval_fraction": 1e-9}, "none of the 40 selected tasks is in the split eval: change"),
        ({"eval_fraction": 0.5}, "eval_fraction has no effect on all tasks"),
        ({"split": "eval", "eval_fraction": 0.5, "eval_tasks": ["a"]}, "eval_fraction has no effect with eval_tasks"),
    ],
)
def test_an_empty_or_invalid_selection_is_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Selection(**settings).select(IDS)  # type: ignore[arg-type]  as the test gives them


@pytest.mark.parametrize("choice", [{}, {"task_ids": ["a"]}, {"exclude": ["a"]}])
def test_selecting_from_a_dataset_without_tasks_is_an_error(choice: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError, match=r"^the dataset has no tasks"):
        Selection(**choice).select([])  # type: ignore[arg-type]  as the test gives them


def test_a_task_that_harbor_cannot_read_is_named(tmp_path: Path) -> None:
    good, bad = write_task(tmp_path / "good"), write_task(tmp_path / "bad")
    (bad / "tests" / "test.sh").unlink()
    require_readable({"good": good})
    with pytest.raises(UsageError, match=r"the task bad cannot be read: FileNotFoundError: .*test\.sh.*exclude"):
        require_readable({"good": good, "bad": bad})
    (good / "instruction.md").write_text(" \n")
    with pytest.raises(UsageError, match=r"the task good cannot be read: instruction\.md is empty\. Fix it"):
        require_readable({"good": good})
