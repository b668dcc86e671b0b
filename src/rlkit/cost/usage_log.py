"""Record of a run's usage, for the process that resumes the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit._util.threads import in_thread
from rlkit.cost.budget import Budget
from rlkit.errors import UsageError
from rlkit.types import Json

_FILE = "usage.json"
_INTERVAL_S = 10.0
"""Time between two records within a step; a killed process loses the usage after the last record."""


class UsageLog:
    """Writes a budget's usage to the run's directory."""

    def __init__(self, directory: Path, budget: Budget) -> None:
        self._directory = directory
        self._budget = budget
        self._written_s = budget.seconds  # working time of the run at the last record

    def write(self) -> None:
        """Record the usage; raise `RunFailed` if it cannot be written."""
        self._written_s = self._budget.seconds
        with files.report_write_errors(self._directory):
            files.write_text(self._directory / _FILE, json.dumps(self._budget.state_dict()) + "\n")

    async def write_if_due(self) -> None:
        """Record the usage if the last record is older than `_INTERVAL_S`."""
        if self._budget.seconds - self._written_s >= _INTERVAL_S:
            await in_thread(self.write)


def read_usage(directory: Path, note: Callable[[str], None]) -> Mapping[str, Json]:
    """Return the usage recorded by earlier processes of a run; report a damaged record and return no usage."""
    path = directory / _FILE
    try:
        return json_lines.read_object(path) if path.exists() else {}
    except UsageError as error:  # the file holds only counters, so the run can be resumed
        note(f"{error}; earlier usage is lost, and the budget restarts at zero")
        return {}
