"""Record of what the tasks of a run were made of when it began: `tasks.json` of its directory.

Invariant: what was recorded when a run began is what its environments are told whenever it goes on.
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
"""Function from what tasks are made of now to what they were made of when the run began; for a new run, the same."""

_FILE = "tasks.json"


class TaskManifest:
    """What the tasks of each environment are made of, by its field.

    Args:
        directory: the directory of a run that goes on; None for a new one.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._known = {} if directory is None else _read(directory / _FILE)

    def recorded(self, field: str) -> PinTasks:
        """Return the argument `recorded` of an environment in the field `envs.NAME` or `eval.envs.NAME`."""
        return lambda now: self._known.setdefault(field, now)

    def write(self, directory: Path) -> None:
        """Keep them in a run's directory."""
        path = directory / _FILE
        if not self._known:
            path.unlink(missing_ok=True)
            return
        text = json.dumps(self._known, ensure_ascii=False)
        if not (path.is_file() and path.read_text(encoding="utf-8") == text):
            files.write_text(path, text)


def _read(path: Path) -> dict[str, Json]:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # no environment had anything to record
        return {}
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}; without this file a run goes on with the tasks that there are now"
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: it must hold an object, by the fields of the environments")
    return cast("dict[str, Json]", found)
