"""The usage of a run, written down for the process that goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit._util.threads import in_thread
from rlkit.cost.budget import Budget
from rlkit.errors import UsageError
from rlkit.store import RunStore
from rlkit.types import Json

_EVERY_S = 10.0
"""Time between two records in the middle of a step; a kill loses the count of what came after the last one."""


class UsageLog:
    """Records the usage that a budget counts in the run's folder."""

    def __init__(self, store: RunStore, budget: Budget) -> None:
        self._store = store
        self._budget = budget
        self._kept_s = budget.seconds

    def keep(self) -> None:
        """Write down the usage up to now; a RunFailed says that it cannot be written."""
        self._kept_s = self._budget.seconds
        self._store.keep_used(self._budget.state_dict())

    async def keep_now_and_then(self) -> None:
        """Do so if it was last done some seconds ago."""
        if self._budget.seconds - self._kept_s >= _EVERY_S:
            await in_thread(self.keep)


def recorded_usage(store: RunStore, note: Callable[[str], None]) -> Mapping[str, Json]:
    """Return the usage of the processes that worked on a run before; a damaged record is noted and counts as none."""
    try:
        return store.used
    except UsageError as error:  # it holds counters only: no reason not to go on
        note(f"{error}; what was used before is not counted, and a budget counts from here")
        return {}
