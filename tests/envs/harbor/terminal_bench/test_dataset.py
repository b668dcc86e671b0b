from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from rlkit.envs.harbor.registries.registry import fetch
from rlkit.envs.harbor.tasks import Selection
from rlkit.errors import MissingError, UsageError
from rlkit.types import Json

from .conftest import BRANCH, Upstream, git

DATASET = "terminal-bench-core==0.1.1"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("rlkit.envs.harbor.terminal_bench.git.sleep", lambda seconds: None)


def fetched(upstream: Upstream, notes: list[str], dataset: str = DATASET, **choice: object) -> dict[str, Path]:
    selection = Selection(shuffle=False, **choice)  # type: ignore[arg-type]
    return fetch(dataset, selection, registry=str(upstream.registry), note=notes.append)


@pytest.mark.parametrize("dataset", [DATASET, "terminal-bench-core@0.1.1", "terminal-bench-core"])
def test_the_tasks_of_an_entry_are_converted_at_its_commit(upstream: Upstream, notes: list[str], dataset: str) -> None:
    tasks = fetched(upstream, notes, dataset)
    assert list(tasks) == ["answer", "keystrokes", "services"]  # and not the folder's fourth, which is no member
    assert (tasks["answer"] / "instruction.md").read_text() == "Write 42 to answer.\n"
    assert f"fetching {DATASET}: tasks at commit {upstream.commit[:12]}" in notes


def test_differences_are_noted_for_each_selected_task(upstream: Upstream, notes: list[str]) -> None:
    fetched(upstream, notes)
    task_notes = [note for note in notes if note.startswith(f"{DATASET}: ")]
    assert task_notes == [
        f"{DATASET}: keystrokes: its solution (solution.yaml) is keystrokes, which cannot be replayed: "
        "`rlkit tasks check` finds none",
        f"{DATASET}: services: its services (database) of docker-compose.yaml need a container engine: set environment "
        "to docker; local does not support it",
    ]
    notes.clear()
    assert list(fetched(upstream, notes, task_ids=["ans*"])) == ["answer"]
    assert notes == []


def test_a_cached_dataset_needs_neither_git_nor_the_repository(
    upstream: Upstream, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetched(upstream, notes)
    upstream.repository.rename(tmp_path / "gone")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetched(upstream, notes) == first


def test_an_interrupted_fetch_is_not_taken_for_complete(
    upstream: Upstream, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlkit.envs.harbor.terminal_bench.dataset.convert", break_off)
        with pytest.raises(KeyboardInterrupt):
            fetched(upstream, notes)
    parent = tmp_path / "cache" / "terminal-bench" / upstream.commit
    assert [path.suffix for path in parent.iterdir()] == [".lock"]
    (parent / f"{next(parent.iterdir()).stem}.unfinished" / "tasks").mkdir(parents=True)  # of one that was killed
    assert len(fetched(upstream, notes)) == 3


@pytest.mark.slow
def test_concurrent_processes_fetch_a_dataset_once(upstream: Upstream, tmp_path: Path) -> None:
    script = (
        "import sys; from rlkit.envs.harbor import harbor\n"
        f"tasks = harbor(dataset={DATASET!r}, registry=sys.argv[1], note=print)\n"
        "print(*sorted(task.task_id for task in tasks))"
    )
    command = [sys.executable, "-c", script, str(upstream.registry)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[-1] for lines in outputs] == ["answer keystrokes services"] * 2
    assert sum(line.startswith("fetching") for lines in outputs for line in lines) == 1


def test_waiting_for_another_process_is_noted(upstream: Upstream, tmp_path: Path) -> None:
    fetched(upstream, [])
    (folder,) = (path for path in (tmp_path / "cache" / "terminal-bench" / upstream.commit).iterdir() if path.is_dir())
    moved = folder.rename(tmp_path / "moved")
    lock = FileLock(folder.with_suffix(".lock"))
    notes: list[str] = []

    def finish(message: str) -> None:
        notes.append(message)
        moved.rename(folder)
        lock.release()

    lock.acquire()
    selection = Selection(task_ids=["answer"])
    assert list(fetch(DATASET, selection, registry=str(upstream.registry), note=finish)) == ["answer"]
    assert notes == [f"waiting for another process that fetches {DATASET}"]


def test_a_branch_version_stays_at_the_commit_of_the_run(upstream: Upstream, tmp_path: Path, notes: list[str]) -> None:
    upstream.write_registry(version="head", commit_hash="head")
    newest = git(upstream.repository, "rev-parse", BRANCH)
    pinned: list[Json] = []

    def pin(now: Json) -> Json:
        pinned.append(now)
        return upstream.commit

    selection = Selection(task_ids=["answer"])
    first_fetch = fetch(
        "terminal-bench-core@head", selection, registry=str(upstream.registry), note=notes.append, pin=pin
    )
    assert pinned == [newest]
    assert "42" in (first_fetch["answer"] / "instruction.md").read_text()
    upstream.repository.rename(tmp_path / "away")
    assert first_fetch == fetch(
        "terminal-bench-core@head", selection, registry=str(upstream.registry), note=notes.append, pin=pin
    )
    (tmp_path / "away").rename(upstream.repository)
    now = fetched(upstream, notes, "terminal-bench-core@head", task_ids=["answer"])
    assert "43" in (now["answer"] / "instruction.md").read_text()
    upstream.repository.rename(tmp_path / "gone")
    assert fetched(upstream, notes, "terminal-bench-core@head", task_ids=["answer"]) == now
    assert f"using commit {newest[:12]} from the cache" in notes[-1]


def test_a_task_that_would_copy_local_files_is_left_out(upstream: Upstream, tmp_path: Path, notes: list[str]) -> None:
    tasks = upstream.repository / "tasks"
    (tmp_path / "secret").write_text("key")
    (tasks / "answer" / "data").symlink_to(tmp_path / "secret")
    (tasks / "services" / "big.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tasks / "keystrokes" / "run-tests.sh").unlink()
    shutil.copytree(tasks / "no-member", tasks / "fine")
    (shutil.copytree(tasks / "no-member", tasks / "endless") / "tests" / "loop").symlink_to("..")
    upstream.write_registry(commit_hash=upstream.commit_all(), task_id_subset=None)
    assert list(fetched(upstream, notes)) == ["fine", "no-member"]
    exclusions = [note.partition(" is left out: ") for note in notes if " is left out: " in note]
    assert {name.rpartition(" ")[2]: why for name, _, why in exclusions if "keystrokes" not in name} == {
        "answer": "its link data leads out of its folder",
        "endless": "its link tests/loop leads to a folder",
        "services": "its file big.bin is stored in git-lfs, which is not installed",
    }
    assert len(exclusions) == 4
    with pytest.raises(UsageError, match=r"^dataset: none of the 1 selected tasks of .* can be converted"):
        fetched(upstream, notes, task_ids=["answer"])


def test_a_linked_task_or_a_task_with_a_broken_link_is_left_out(upstream: Upstream, notes: list[str]) -> None:
    tasks = upstream.repository / "tasks"
    (tasks / "alias").symlink_to("answer")
    for name, target in (("itself", "loop"), ("round", "tests/other"), ("nowhere", "gone"), ("unnameable", "x" * 300)):
        shutil.copytree(tasks / "no-member", tasks / name)
        (tasks / name / "loop").symlink_to(target)
    (tasks / "round" / "tests" / "other").symlink_to("../loop")
    upstream.write_registry(commit_hash=upstream.commit_all(), task_id_subset=None)
    assert list(fetched(upstream, notes)) == ["answer", "keystrokes", "no-member", "services"]
    left_out = dict(note.removeprefix(f"{DATASET}: ").split(" is left out: ") for note in notes if "left out" in note)
    assert left_out == {
        "alias": "it is a link",
        "itself": "its link loop leads nowhere",
        "round": "its link loop leads nowhere",
        "nowhere": "its link loop leads nowhere",
        "unnameable": "its link loop leads nowhere",
    }


def test_a_full_disk_is_not_cached_as_a_fault_of_a_task(
    upstream: Upstream, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: '/cache/tests'"

    def copytree_on_a_full_disk(source: Path, target: Path) -> None:
        raise shutil.Error([(source, target, reason)])

    with monkeypatch.context() as full:
        full.setattr("rlkit.envs.harbor.terminal_bench.convert.shutil.copytree", copytree_on_a_full_disk)
        with pytest.raises(MissingError, match="disk is full"):
            fetched(upstream, notes)
    assert "answer" in fetched(upstream, notes)


def test_without_a_network_a_branch_is_at_the_last_commit_that_was_converted(
    upstream: Upstream, tmp_path: Path, notes: list[str]
) -> None:
    upstream.write_registry(version="head", commit_hash="head")
    before = fetched(upstream, notes, "terminal-bench-core@head")
    shutil.rmtree(upstream.repository / "tasks")
    upstream.commit_all()
    with pytest.raises(MissingError, match="has no folder tasks at commit"):
        fetched(upstream, notes, "terminal-bench-core@head")
    upstream.repository.rename(tmp_path / "gone")
    assert fetched(upstream, notes, "terminal-bench-core@head") == before


@pytest.mark.parametrize("choice", [{}, {"exclude": ["gone-*"]}, {"task_ids": ["gone-1"]}])
def test_a_repository_without_any_registry_task_is_an_error_with_their_names(
    upstream: Upstream, notes: list[str], choice: dict[str, list[str]]
) -> None:
    upstream.write_registry(task_id_subset=[f"gone-{number}" for number in range(7)])
    message = (
        r"the repository has none of the 7 tasks of the registry: gone-0, gone-1, gone-2, gone-3, gone-4 and 2 more$"
    )
    with pytest.raises(UsageError, match=rf"^dataset: {DATASET}: {message}"):
        fetched(upstream, notes, **choice)


def test_registry_tasks_missing_from_the_repository_are_named(upstream: Upstream, notes: list[str]) -> None:
    upstream.write_registry(task_id_subset=["answer", "gone"])
    assert list(fetched(upstream, notes)) == ["answer"]
    assert f"{DATASET}: the repository has no gone of the 2 tasks of the registry" in notes
    with pytest.raises(UsageError, match=r"^task_ids: no task matches 'gone'"):
        fetched(upstream, notes, task_ids=["gone"])


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_without_tasks_is_an_error(upstream: Upstream, notes: list[str], packed: bool) -> None:
    empty = upstream.repository / "empty"
    empty.mkdir()
    (empty / ("tasks.zip" if packed else "notes.txt")).write_text("x")
    upstream.write_registry(commit_hash=upstream.commit_all(), dataset_path="empty")
    with pytest.raises(UsageError, match=r"has no terminal-bench 1 task in its folder empty") as raised:
        fetched(upstream, notes)
    assert ("archives" in str(raised.value)) == packed


def test_a_missing_repository_is_a_one_line_error(upstream: Upstream, notes: list[str]) -> None:
    upstream.write_registry(github_url="http://127.0.0.1:9/t.git")
    with pytest.raises(MissingError, match=r"^dataset: http://127\.0\.0\.1:9/t\.git cannot be fetched") as raised:
        fetched(upstream, notes)
    assert os.linesep not in str(raised.value)
