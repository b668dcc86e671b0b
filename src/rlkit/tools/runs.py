"""Deletion and renaming of the folders of runs.

Invariant: the folder of a run that is in progress is never touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlkit._util.files.run_locks import is_locked
from rlkit.config.loading.run_config import find_run
from rlkit.errors import UsageError


def find_idle_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of runs; raise `UsageError` if there is none of a name, or if it is in progress."""
    folders = list(dict.fromkeys(map(find_run, names)))
    for folder in folders:
        if is_locked(folder / "lock"):
            raise UsageError(f"the run {folder.name} is in progress: stop it first")
    return folders


def remove_run(folder: Path) -> None:
    """Delete the folder of a run. Its checkpoints stay on the service."""
    doomed = folder.with_name(f".{folder.name}.removed")  # a deletion that is cut short leaves no half of a run
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def rename_run(name: str, new_name: str) -> Path:
    """Rename a run in its folder of runs, and return its new folder.

    Raises:
        UsageError: there is no such run, it is in progress, or the new name is taken or no name of a folder.
    """
    (folder,) = find_idle_runs([name])
    if new_name in ("", ".", "..") or Path(new_name).name != new_name or new_name.startswith("."):
        raise UsageError(f"{new_name!r} cannot be the name of a run: give the name of a folder, without a path")
    target = folder.with_name(new_name)
    if target.exists():
        raise UsageError(f"{target} exists already: choose another name")
    folder.rename(target)
    return target
