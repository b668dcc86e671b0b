"""Cache of converted tasks of terminal-bench 1 datasets.

Invariant: the cached conversion of a commit is complete, and does not depend on the process that created it. Processes
that need it concurrently wait for the first, and later uses need no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rlkit._util import files
from rlkit._util.files.lock import make_once
from rlkit._util.paths import cache_dir
from rlkit.envs.harbor.tasks import Selection, join_names
from rlkit.envs.harbor.terminal_bench.checkout import check_out, find_newest_commit
from rlkit.envs.harbor.terminal_bench.convert import Conversion, convert, list_old_tasks
from rlkit.envs.harbor.terminal_bench.entries import HEAD, Entry
from rlkit.errors import MissingError, UsageError
from rlkit.tasks.provenance import PinTasks

type Note = Callable[[str], None]

CONVERSION = 2
"""Version of the conversion. Tasks of earlier versions are converted again."""

_TASKS, _REPORT = "tasks", "conversion.json"
_LFS = b"version https://git-lfs.github.com/spec/"


def select_tasks(
    entry: Entry, selection: Selection, *, note: Note, pin_commit: PinTasks = lambda newest: newest
) -> dict[str, Path]:
    """Return the folders of the selected tasks by name; fetch and convert the dataset if necessary.

    Args:
        note: called with progress, and with the differences from terminal-bench 1 of each selected task.
        pin_commit: function that receives the newest commit of a branch and returns the commit at the run's start.

    Raises:
        MissingError: git is not installed, or the repository, commit or folder cannot be fetched.
        UsageError: no task is selected, or no selected task can be converted.
    """
    newest = _find_newest_commit(entry, note=note) if entry.commit_hash == HEAD else None
    commit = entry.commit_hash if newest is None else str(pin_commit(newest))
    dataset = _load_converted(entry.model_copy(update={"commit_hash": commit}), note=note)
    if newest is not None and (commit == newest or not _branch_file(entry).is_file()):
        files.write_text(_branch_file(entry), commit)
    tasks = {path.name: path for path in dataset.folders}
    members = set(entry.task_id_subset) if entry.task_id_subset is not None else tasks.keys() | dataset.failed.keys()
    absent = sorted(members - tasks.keys() - dataset.failed.keys())
    if members and len(absent) == len(members):
        raise UsageError(
            f"dataset: {entry.label}: the repository has none of the {len(members)} tasks of the registry: "
            f"{join_names(absent)}"
        )
    if absent:
        note(f"{entry.label}: the repository has no {join_names(absent)} of the {len(members)} tasks of the registry")
    selected = selection.select(sorted(members - set(absent)))
    for name in selected:
        if name in dataset.failed:
            note(f"{entry.label}: {name} is left out: {dataset.failed[name]}")
        for line in dataset.differences.get(name, ()):
            note(f"{entry.label}: {name}: {line}")
    playable = {name: tasks[name] for name in selected if name in tasks}
    if not playable:
        raise UsageError(f"dataset: none of the {len(selected)} selected tasks of {entry.label} can be converted")
    return playable


def _load_converted(entry: Entry, *, note: Note) -> Conversion:
    """Load converted tasks; fetch and convert them if this machine does not have them."""
    folder = make_once(
        _cache_folder() / entry.commit_hash / _digest(entry.github_url, entry.dataset_path, str(CONVERSION)),
        lambda unfinished: _convert(entry, unfinished, note=note),
        on_wait=lambda: note(f"waiting for another process that fetches {entry.label}"),
    )
    report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    return Conversion(list((folder / _TASKS).iterdir()), report["failed"], report["differences"])


def _convert(entry: Entry, target: Path, *, note: Note) -> None:
    repository = target / "repository"
    note(f"fetching {entry.label}: {entry.dataset_path} at commit {entry.commit_hash[:12]}")
    folder = check_out(entry, repository, note=note)
    tasks = list_old_tasks(folder)
    if not tasks:
        archives = "; its tasks are zip archives, which are not supported" if any(folder.glob("*.zip")) else ""
        raise UsageError(
            f"dataset: {entry.label} has no terminal-bench 1 task in its folder {entry.dataset_path}{archives}"
        )
    note(f"converting the {len(tasks)} tasks of {entry.label}")
    refused = {task.name: reason for task in tasks if (reason := _find_refusal(task)) is not None}
    for path in (folder / task for task in refused):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    conversion = convert(folder, target / _TASKS) if len(refused) < len(tasks) else Conversion((), {}, {})
    files.make_folder(target / _TASKS)
    report = {
        "failed": refused | dict(conversion.failed),
        "differences": {task: list(lines) for task, lines in conversion.differences.items()},
    }
    files.write_text(target / _REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    shutil.rmtree(repository)


def _find_refusal(task: Path) -> str | None:
    """Return the reason to reject a task, or None. Rejected tasks would copy files of this machine, or lack files."""
    if task.is_symlink():
        return "it is a link"
    for path in task.rglob("*"):
        name = path.relative_to(task)
        if path.is_symlink() and (fault := _find_link_fault(path, task)) is not None:
            return f"its link {name} {fault}"
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_LFS):
            return f"its file {name} is stored in git-lfs, which is not installed"
    return None


def _find_link_fault(link: Path, task: Path) -> str | None:
    # Path.resolve and Path.exists raise an error for links to themselves and for names that are too long.
    if not Path(os.path.realpath(link)).is_relative_to(os.path.realpath(task)):
        return "leads out of its folder"
    if not os.path.exists(link):  # noqa: PTH110  as above
        return "leads nowhere"
    return "leads to a folder" if link.is_dir() else None  # a link to a parent would be copied forever


def _find_newest_commit(entry: Entry, *, note: Note) -> str:
    """Return the newest commit of the entry's branch; the last converted commit if the repository is unreachable."""
    try:
        return find_newest_commit(entry, note=note)
    except MissingError as error:
        file = _branch_file(entry)
        if not file.is_file():
            raise
        commit = file.read_text(encoding="utf-8").strip()
        note(f"{entry.label}: using commit {commit[:12]} from the cache: {error}")
        return commit


def _branch_file(entry: Entry) -> Path:
    """Return the file that stores the newest converted commit of the entry's branch."""
    return _cache_folder() / "branches" / _digest(entry.github_url, entry.branch, entry.dataset_path)


def _cache_folder() -> Path:
    return cache_dir() / "terminal-bench"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
