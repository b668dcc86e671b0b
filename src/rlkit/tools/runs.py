"""Deletion and renaming of the folders of runs.

Invariant: the folder of a run that is in progress is never touched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlkit._util.files.run_locks import is_locked
from rlkit.config.loading.run_config import find_run
from rlkit.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # as `name` of a configuration


def find_idle_runs(names: Sequence[str]) -> list[Path]:
    """Return the folders of runs; raise `UsageError` for an unknown name, a link, or a run that is in progress."""
    folders = list(map(find_run, names))
    for folder in folders:
        if folder.is_symlink():
            raise UsageError(f"{folder} is a link to {folder.resolve()}: give that folder, or remove the link with rm")
        _require_idle(folder)
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def remove_run(folder: Path) -> None:
    """Delete the folder of a run. Its checkpoints stay on the service.

    Raises:
        UsageError: the run is in progress, or the folder cannot be deleted.
    """
    _require_idle(folder)
    trash = folder.with_name(f".{folder.name}.removed")  # a deletion that is cut short leaves no half of a run
    try:
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise UsageError(f"{folder} cannot be deleted: {error.strerror}") from error


def rename_run(name: str, new_name: str) -> Path:
    """Rename a run in its folder of runs, and return its new folder.

    Raises:
        UsageError: there is no such run, it is in progress, or the new name is taken, or a folder cannot have it.
    """
    (folder,) = find_idle_runs([name])
    if not _NAME.fullmatch(new_name):
        form = "at most 200 letters, digits and . _ -, with a letter or digit first"
        raise UsageError(f"{new_name!r} cannot be the name of a run: use {form}")
    target = folder.with_name(new_name)
    if target.exists():
        raise UsageError(f"{target} exists already: choose another name")
    folder.rename(target)
    return target


def _require_idle(folder: Path) -> None:
    if is_locked(folder / "lock"):
        raise UsageError(f"the run {folder.name} is in progress: stop it first")
