"""Manifest of the data behind a run's tasks: `tasks.json` in its directory.

Invariant: a resumed run builds its environments from the data that was recorded when it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rlkit._util import files
from rlkit._util.files import json_lines
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
        return json_lines.read_object(path) if path.exists() else {}
    except UsageError as error:
        raise UsageError(f"{error}; without this file a run resumes with the current tasks") from error
