"""Tasks of a dataset of terminal-bench 1, converted and kept.

Invariant: what is kept of a commit is whole, and the same whoever made it: several processes that want it at once wait
for the first, and none of them needs a network afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlkit._util import files
from rlkit._util.paths import cache_dir
from rlkit._util.redaction import show_url
from rlkit.envs.harbor.tasks import Selection
from rlkit.envs.harbor.terminal_bench.checkout import DEFAULT_LIMITS, Place, check_out, newest_commit
from rlkit.envs.harbor.terminal_bench.convert import convert, old_tasks
from rlkit.envs.harbor.terminal_bench.entries import HEAD, Entry
from rlkit.envs.harbor.terminal_bench.git import GitLimits
from rlkit.errors import MissingError, UsageError
from rlkit.types import Json

type Note = Callable[[str], None]
type Recorded = Callable[[Json], Json]

CONVERSION = 2
"""Number of the conversion: what an earlier one has kept is made anew."""

_TASKS, _REPORT = "tasks", "conversion.json"
_LFS = b"version https://git-lfs.github.com/spec/"
_NAMED = 5


@dataclass(frozen=True)
class _ConvertedDataset:
    """The folder of the converted tasks, and by their names why some failed, or what differs from terminal-bench 1."""

    folder: Path
    failed: Mapping[str, str]
    differences: Mapping[str, Sequence[str]]


def select_tasks(
    entry: Entry,
    selection: Selection,
    *,
    note: Note,
    recorded: Recorded = lambda now: now,
    limits: GitLimits = DEFAULT_LIMITS,
) -> dict[str, Path]:
    """Return the folders of selected tasks of a dataset, which is fetched and converted first if need be, by name.

    Args:
        note: called with progress, and what differs from terminal-bench 1 in each selected task.
        recorded: gives the commit of when the run began, from the newest one of a branch.

    Raises:
        MissingError: git is not installed, or the repository, commit or folder cannot be had.
        UsageError: nothing is selected, or nothing that can be converted.
    """
    newest = _newest(entry, note=note, limits=limits) if entry.commit_hash == HEAD else None
    commit = entry.commit_hash if newest is None else str(recorded(newest))
    place = Place(url=entry.github_url, branch=entry.branch, commit=commit, folder=entry.dataset_path)
    dataset = _keep_converted(place, name=entry.label, note=note, limits=limits)
    if newest is not None and (commit == newest or not _branch_file(entry).is_file()):
        files.write_text(_branch_file(entry), commit)
    tasks = {path.name: path for path in dataset.folder.iterdir()}
    members = set(entry.task_id_subset) if entry.task_id_subset is not None else tasks.keys() | dataset.failed.keys()
    absent = sorted(members - tasks.keys() - dataset.failed.keys())
    if members and len(absent) == len(members):
        raise UsageError(
            f"dataset: {entry.label}: the repository has none of the {len(members)} tasks of the registry: "
            f"{_join_names(absent)}"
        )
    if absent:
        note(f"{entry.label}: the repository has no {_join_names(absent)} of the {len(members)} tasks of the registry")
    chosen = selection.of(sorted(members - set(absent)))
    for name in chosen:
        if name in dataset.failed:
            note(f"{entry.label}: {name} is left out: {dataset.failed[name]}")
        for line in dataset.differences.get(name, ()):
            note(f"{entry.label}: {name}: {line}")
    playable = {name: tasks[name] for name in chosen if name in tasks}
    if not playable:
        raise UsageError(f"dataset: none of the {len(chosen)} tasks of {entry.label} that are chosen can be converted")
    return playable


def _keep_converted(place: Place, *, name: str, note: Note, limits: GitLimits = DEFAULT_LIMITS) -> _ConvertedDataset:
    """Fetch and convert the tasks of a place unless this machine has them; `name` is the dataset's, for notes."""
    parent = _folder() / place.commit
    folder = parent / _digest(place.url, place.folder, str(CONVERSION))
    if not folder.is_dir():
        files.make_folder(parent)
        with _locked(folder.with_suffix(".lock"), lambda: note(f"waiting for a process that fetches {name}")):
            if not folder.is_dir():
                unfinished = folder.with_suffix(".unfinished")
                try:
                    _convert(place, unfinished, name=name, note=note, limits=limits)
                    unfinished.replace(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    return _ConvertedDataset(folder / _TASKS, report["failed"], report["differences"])


@contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Generator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        waits()
        held = lock.acquire()
    with held:
        yield


def _convert(place: Place, target: Path, *, name: str, note: Note, limits: GitLimits) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed
    repository = target / "repository"
    note(f"fetching {name}: {place.folder} at commit {place.commit[:12]}")
    source = check_out(place, repository, note=note, limits=limits)
    tasks = old_tasks(source)
    if not tasks:
        packed = "; its tasks are packed, and cannot be read" if any(source.glob("*.zip")) else ""
        raise UsageError(f"dataset: {name} holds no task of terminal-bench 1 in its folder {place.folder}{packed}")
    note(f"converting the {len(tasks)} tasks of {name}")
    refused = {task.name: reason for task in tasks if (reason := _refusal(task)) is not None}
    for path in (source / task for task in refused):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    done = convert(source, target / _TASKS) if len(refused) < len(tasks) else None
    files.make_folder(target / _TASKS)
    report = {
        "url": show_url(place.url),
        "commit": place.commit,
        "folder": place.folder,
        "failed": refused | dict(done.failed if done else {}),
        "differences": {} if done is None else {task: list(lines) for task, lines in done.differences.items()},
    }
    files.write_text(target / _REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    shutil.rmtree(repository)


def _refusal(task: Path) -> str | None:
    """Return the reason to leave out a task of a stranger's repository; None where it can be converted.

    It would take files of this machine, or lacks its own.
    """
    if task.is_symlink():
        return "it is a link"
    for path in _files(task):
        name = path.relative_to(task)
        if path.is_symlink() and (fault := _link_fault(path, task)) is not None:
            return f"its link {name} {fault}"
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_LFS):
            return f"its file {name} is kept by git-lfs, which is not installed here"
    return None


def _link_fault(link: Path, task: Path) -> str | None:
    # Not Path.resolve and Path.exists: they raise for links to themselves and for names that are too long.
    if not Path(os.path.realpath(link)).is_relative_to(os.path.realpath(task)):
        return "leads out of its folder"
    if not os.path.exists(link):  # noqa: PTH110  as above
        return "leads nowhere"
    return "leads to a folder" if link.is_dir() else None  # one to a folder around it would be copied for ever


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in folder.walk():
        yield from (parent / name for name in (*folders, *names))


def _newest(entry: Entry, *, note: Note, limits: GitLimits) -> str:
    """Return the newest commit of the entry's branch; the last one that was kept if the repository cannot be asked."""
    try:
        return newest_commit(entry.github_url, entry.branch, note=note, limits=limits)
    except MissingError as error:
        file = _branch_file(entry)
        if not file.is_file():
            raise
        commit = file.read_text(encoding="utf-8").strip()
        note(f"{entry.label}: taking commit {commit[:12]}, which this machine has: {error}")
        return commit


def _branch_file(entry: Entry) -> Path:
    """Return the file with the newest commit of the entry's branch that this machine has converted."""
    return _folder() / "branches" / _digest(entry.github_url, entry.branch, entry.dataset_path)


def _folder() -> Path:
    return cache_dir() / "terminal-bench"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
