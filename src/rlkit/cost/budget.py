"""The budget of a run, over all its processes, and the record of its usage in `usage.json`.

Invariant: the usage of all processes of a run counts, and so does pending usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit._util.threads import in_thread
from rlkit.cost.usage import Price, Usage
from rlkit.errors import UsageError
from rlkit.types import Json

_HOUR_S = 3600.0
_USAGE_FILE = "usage.json"
_RECORD_INTERVAL_S = 10.0
"""Time between two records within a step; a killed process loses the usage after the last record."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run; None for no limit.

    Args:
        usd: US dollars, by the price of the model.
        tokens: tokens of all kinds.
        hours: working time of the run's processes.
    """

    usd: float | None = None
    tokens: int | None = None
    hours: float | None = None


_UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens, money and time that a run has used.

    Args:
        tokens: tokens of all kinds.
        usd: US dollars; None if the price is unknown.
        seconds: working time of the run's processes.
    """

    tokens: int
    usd: float | None
    seconds: float


class Budget:
    """Compare the usage of a run with its limits.

    Args:
        price: required for `limits.usd`.
        used: returns the usage by this process.
        clock: returns seconds since any fixed time.
        previous: `state_dict` of the previous process.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        price: Price | None,
        used: Callable[[], Usage],
        clock: Callable[[], float],
        previous: Mapping[str, Json],
    ) -> None:
        if limits.usd is not None and price is None:
            raise ValueError("a limit in dollars needs a price")
        self._limits = limits
        self._price = price
        self._used = used
        self._pending = list[Callable[[], Usage]]()
        self._clock = clock
        self._began_s = clock()
        counts = {name: int(value) for name, value in previous.items() if isinstance(value, int)}
        self._before = Usage(**{field.name: counts.get(field.name, 0) for field in fields(Usage)})
        seconds = previous.get("seconds", 0.0)
        self._before_s = float(seconds) if isinstance(seconds, int | float) else 0.0

    def expect(self, pending: Callable[[], Usage]) -> None:
        """Compare committed usage with the limits, too.

        Args:
            pending: returns the usage that is certain to follow, such as training on finished episodes.
        """
        self._pending.append(pending)

    @property
    def usage(self) -> Usage:
        """Usage by all processes so far."""
        return self._before + self._used()

    @property
    def seconds(self) -> float:
        """Working time of all processes so far."""
        return self._before_s + self._clock() - self._began_s

    @property
    def reached_limit(self) -> str | None:
        """Limit that is reached, as a phrase for people; None if no limit is."""
        limits = self._limits
        if limits == _UNLIMITED:  # fast path, because every rollout checks
            return None
        pending = sum((pending() for pending in self._pending), Usage())
        usage, reserved = self.usage + pending, ", or needed to train on finished episodes" if pending.tokens else ""
        if limits.tokens is not None and usage.tokens >= limits.tokens:
            return f"budget_tokens: {usage.tokens:,} of {limits.tokens:,} tokens are used{reserved}"
        if limits.usd is not None and self._price is not None and (usd := self._price.usd(usage)) >= limits.usd:
            return f"budget_usd: about ${usd:,.2f} of ${limits.usd:,.2f} are spent{reserved}"
        if limits.hours is not None and self.seconds >= limits.hours * _HOUR_S:
            return f"max_hours: the run has taken {self.seconds / _HOUR_S:,.2f} of {limits.hours:,.2f} hours"
        return None

    @property
    def spending(self) -> Spending:
        """Tokens, money and time of all processes so far."""
        usage = self.usage
        return Spending(usage.tokens, None if self._price is None else self._price.usd(usage), self.seconds)

    def metrics(self) -> dict[str, float]:
        """Return the usage by all processes under `usage/…`, with dollars if the price is known."""
        usage = self.usage
        counts = {f"usage/{name}": float(value) for name, value in asdict(usage).items()}
        return counts if self._price is None else {**counts, "usage/usd": self._price.usd(usage)}

    def state_dict(self) -> dict[str, Json]:
        """Return usage and working time, for `previous` of the next process."""
        return {**asdict(self.usage), "seconds": self.seconds}


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
            files.write_text(self._directory / _USAGE_FILE, json.dumps(self._budget.state_dict()) + "\n")

    async def write_if_due(self) -> None:
        """Record the usage if the last record is older than `_RECORD_INTERVAL_S`."""
        if self._budget.seconds - self._written_s >= _RECORD_INTERVAL_S:
            await in_thread(self.write)


def read_usage(directory: Path, note: Callable[[str], None]) -> Mapping[str, Json]:
    """Return the usage recorded by earlier processes of a run; report a damaged record and return no usage."""
    path = directory / _USAGE_FILE
    try:
        return json_lines.read_object(path) if path.exists() else {}
    except UsageError as error:  # the file holds only counters, so the run can be resumed
        note(f"{error}; earlier usage is lost, and the budget restarts at zero")
        return {}
