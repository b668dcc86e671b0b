"""Tasks of terminal-bench 1 (`task.yaml`) as tasks of Harbor (`task.toml`), by Harbor's own mapper."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit.envs.harbor.tasks import OLD_TASK_FILE, broken
from rlkit.errors import UsageError


@dataclass(frozen=True)
class Converted:
    """What became of a folder of tasks.

    Args:
        made: the new folders.
        failed: why a task could not be converted, by its name.
        notes: what the mapper said of them.
    """

    made: Sequence[Path]
    failed: Mapping[str, str]
    notes: Sequence[str]


def convert(source: Path, target: Path) -> Converted:
    """Convert a task, or a folder of tasks.

    Args:
        source: holds a `task.yaml`, or folders that do.
        target: a folder that gets a folder for each task; none of those may be there yet.

    Raises:
        UsageError: `source` holds no such task, or `target` is inside it.
    """
    from harbor.mappers.terminal_bench import TerminalBenchMapper

    source, target = source.expanduser().absolute(), target.expanduser().absolute()
    if not source.is_dir():
        raise UsageError(f"{source} is no folder")
    if target.is_relative_to(source):
        raise UsageError(f"--to: {target} is inside {source}; take a folder of its own")
    single = (source / OLD_TASK_FILE).is_file()
    if not single and not list(source.glob(f"*/{OLD_TASK_FILE}")):
        raise UsageError(f"{source} holds no {OLD_TASK_FILE} of terminal-bench 1, nor does a folder in it")
    there = {path.name for path in target.iterdir()} if target.is_dir() else set[str]()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(said):
        folder = source
        if single:  # the mapper takes a folder of tasks
            folder = Path(temporary)
            shutil.copytree(source, folder / source.name, symlinks=True)
        mapped = TerminalBenchMapper().map(folder, target)
    notes = said.getvalue()
    for name, why in mapped.failed:
        notes = notes.replace(f"Failed to map task {name}: {why}\n", "")
    failed = {name: " ".join(why.split()) for name, why in mapped.failed}
    made = sorted(mapped.mapped)
    for path in made:
        if (why := broken(path)) is not None:
            failed[path.name] = why
    for name in failed.keys() - there:  # a half of a task would be in the way of a second try
        shutil.rmtree(target / name, ignore_errors=True)
    good = [path for path in made if path.name not in failed]
    return Converted(good, failed, notes.splitlines())
