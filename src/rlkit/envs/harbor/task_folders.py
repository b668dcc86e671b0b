"""The folders of generated tasks: Harbor plays what is on the disk.

Invariant: a folder of tasks is there whole or not at all, also where two processes write it at one time.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlkit.envs.harbor.file_tasks import FileTasks, file_tasks, task_files
from rlkit.errors import UsageError
from rlkit.paths import cache_dir


def cached_file_tasks(settings: FileTasks) -> Path:
    """Return the folder in rlkit's cache that holds the tasks, which are written unless they are there."""
    texts = _texts(settings)
    digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
    target = cache_dir() / "file-tasks" / digest
    if not target.is_dir():
        with suppress(FileExistsError):  # another process was faster
            _write(texts, target)
    return target


def write_file_tasks(settings: FileTasks, target: Path) -> int:
    """Write the tasks to a folder that is not there yet, or is empty, and return how many they are.

    Raises:
        UsageError: the folder holds something.
    """
    target = target.expanduser().absolute()
    try:
        return _write(_texts(settings), target)
    except FileExistsError:
        raise UsageError(f"--to: {target} is there and not empty; take another folder") from None
    except NotADirectoryError:
        raise UsageError(f"--to: {target} is or lies in a file; take another folder") from None


def _texts(settings: FileTasks) -> Mapping[str, Mapping[str, str]]:
    return {task.task_id: task_files(task) for task in file_tasks(settings)}


def _write(texts: Mapping[str, Mapping[str, str]], target: Path) -> int:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        for name, files in texts.items():
            for path, text in files.items():
                file = temporary / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        try:
            temporary.rename(target)
        except OSError as error:
            if target.is_dir() and any(os.scandir(target)):
                raise FileExistsError(target) from error
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(texts)
