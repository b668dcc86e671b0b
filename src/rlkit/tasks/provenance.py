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

type TaskManifest = dict[str, Json]
"""Descriptions of the data of a run's tasks, by configuration field of the environment. `setdefault` returns the
recorded description, or records the current one."""

_FILE = "tasks.json"


def read_manifest(directory: Path) -> TaskManifest:
    """Return the manifest in a run's directory, empty if nothing is recorded; UsageError if the file is damaged."""
    path = directory / _FILE
    try:
        return json_lines.read_object(path) if path.exists() else {}
    except UsageError as error:
        raise UsageError(f"{error}; without this file a run resumes with the current tasks") from error


def write_manifest(directory: Path, manifest: TaskManifest) -> None:
    """Write the manifest to a run's directory; remove the file if nothing is recorded."""
    path = directory / _FILE
    if manifest:
        files.write_text(path, json.dumps(manifest, ensure_ascii=False))
    else:
        path.unlink(missing_ok=True)
