"""What the tasks of a run's environments were made of when it began, in `tasks.json` of its directory.

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

type Recorded = Callable[[Json], Json]
"""Told what tasks are made of now; gives what they were made of when the run began, which for a new run is the same."""

_FILE = "tasks.json"


class Origins:
    """By the field of its environment, what its tasks are made of.

    Args:
        directory: of a run that goes on; None for a new one.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._known = {} if directory is None else _read(directory / _FILE)

    def recorded(self, field: str) -> Recorded:
        """The function that an environment with a parameter `recorded` is given.

        Args:
            field: that holds the environment: `envs.NAME` or `eval.envs.NAME`.
        """

        def told(now: Json) -> Json:
            return self._known.setdefault(field, now)

        return told

    def write(self, directory: Path) -> None:
        """Keep them in a run's directory.

        Raises:
            OSError: they cannot be written.
        """
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
