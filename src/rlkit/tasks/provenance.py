"""Manifest of the data behind a run's tasks: `tasks.json` in its directory.

Invariant: a resumed run builds its environments from the data that was recorded when it began.
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
"""Function from the current description of tasks' data to the recorded one; the first call records its argument."""

_FILE = "tasks.json"


class TaskManifest:
    """Descriptions of the data of a run's tasks, by configuration field of the environment.

    Args:
        directory: directory of a resumed run; None for a new run.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._records = {} if directory is None else _read_records(directory / _FILE)

    def pin(self, field: str, current: Json) -> Json:
        """Return the recorded description of `envs.NAME` or `eval.envs.NAME`; record `current` if there is none."""
        return self._records.setdefault(field, current)

    def write(self, directory: Path) -> None:
        """Write the manifest to a run's directory; remove the file if nothing is recorded."""
        path = directory / _FILE
        if not self._records:
            path.unlink(missing_ok=True)
            return
        files.write_text(path, json.dumps(self._records, ensure_ascii=False))


def _read_records(path: Path) -> dict[str, Json]:
    try:
        records: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # nothing was recorded
        return {}
    except ValueError as error:
        raise UsageError(f"{path}: {error}; without this file a run resumes with the current tasks") from error
    if not isinstance(records, dict):
        raise UsageError(f"{path}: expected an object with a key for each environment")
    return cast("dict[str, Json]", records)
