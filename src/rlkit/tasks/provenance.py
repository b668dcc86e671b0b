"""Manifest of the data that the tasks of a run were made from when it began: `tasks.json` of its directory.

Invariant: a run that is resumed gives its environments what was recorded when it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from rlkit._util import files
from rlkit.errors import UsageError
from rlkit.types import Json

type PinTasks = Callable[[Json], Json]
"""Function from a description of the data of tasks to the one recorded when the run began; in a new run, the same."""

_FILE = "tasks.json"


class TaskManifest:
    """Descriptions of the data of a run's tasks, by the field of the environment.

    Args:
        directory: the directory of a run that is resumed; None for a new one.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._records = {} if directory is None else _read_records(directory / _FILE)

    def pin(self, field: str, current: Json) -> Json:
        """Return the recorded description of the field `envs.NAME` or `eval.envs.NAME`; record the first one."""
        return self._records.setdefault(field, current)

    def write(self, directory: Path) -> None:
        """Write the manifest to a run's directory; remove the file if there is nothing to record."""
        path = directory / _FILE
        if not self._records:
            path.unlink(missing_ok=True)
            return
        text = json.dumps(self._records, ensure_ascii=False)
        if not (path.is_file() and path.read_text(encoding="utf-8") == text):
            files.write_text(path, text)


def _read_records(path: Path) -> dict[str, Json]:
    try:
        records: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # no environment had anything to record
        return {}
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}; without this file a run resumes with the tasks that there are now"
        ) from error
    if not isinstance(records, dict):
        raise UsageError(f"{path}: it must hold an object, by the fields of the environments")
    return cast("dict[str, Json]", records)
