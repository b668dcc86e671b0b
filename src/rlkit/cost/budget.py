"""The budget of a run, over all its processes, and the record of its usage in `usage.json`.

Invariant: the usage of all processes of a run counts, and so does pending usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick
from rlkit._util.threads import in_thread
from rlkit.config.schema import Config
from rlkit.cost.usage import Price, Usage
from rlkit.errors import UsageError

_HOUR_S = 3600.0
_RECORD_INTERVAL_S = 10.0
"""Time between two records within a step; a killed process loses the usage after the last record."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens, money and time that a run has used."""

    tokens: int  # tokens of all kinds
    usd: float | None  # US dollars; None if the price is unknown
    seconds: float  # working time of the run's processes


class Budget:
    """Compare the usage of a run with its limits, and record it in the run's directory.

    If the record of earlier processes is damaged, their usage is lost, because the run can be resumed without it.

    Args:
        config: has the limits `budget_usd`, `budget_tokens` and `max_hours`.
        price: required for `budget_usd`.
        used: returns the usage by this process.
        clock: returns seconds since any fixed time.
        note: receives a message if the record of earlier processes is damaged.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        price: Price | None,
        used: Callable[[], Usage],
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        if config.budget_usd is not None and price is None:
            raise ValueError("a limit in dollars needs a price")
        self._limits = config.budget_tokens, config.budget_usd, config.max_hours
        self._path = directory / "usage.json"
        self._price = price
        self._used = used
        self._clock = clock
        self._began_s = clock()
        try:
            record = json_lines.read_object(self._path) if self._path.exists() else {}
        except UsageError as error:
            note(f"{error}; earlier usage is lost, and the budget restarts at zero")
            record = {}
        self._before = Usage(*(pick(record, field.name, int) or 0 for field in fields(Usage)))
        self._before.other_usd = pick(record, "other_usd", float) or 0.0
        self._before_s = pick(record, "seconds", float) or 0.0
        self._recorded_s = self._before_s  # working time of the run at the last record
        self.pending_usage: Callable[[], Usage] = Usage
        """Returns the usage that is certain to follow, such as training on finished episodes; limits include it."""

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
        tokens_limit, usd_limit, hours_limit = self._limits
        if tokens_limit is usd_limit is hours_limit is None:  # fast path, because every rollout checks
            return None
        pending = self.pending_usage()
        usage, reserved = self.usage + pending, ", or needed to train on finished episodes" if pending.tokens else ""
        if tokens_limit is not None and usage.tokens >= tokens_limit:
            return f"budget_tokens: {usage.tokens:,} of {tokens_limit:,} tokens are used{reserved}"
        if usd_limit is not None and self._price is not None and (usd := self._price.usd(usage)) >= usd_limit:
            return f"budget_usd: about ${usd:,.2f} of ${usd_limit:,.2f} are spent{reserved}"
        if hours_limit is not None and self.seconds >= hours_limit * _HOUR_S:
            return f"max_hours: the run has taken {self.seconds / _HOUR_S:,.2f} of {hours_limit:,.2f} hours"
        return None

    @property
    def spending(self) -> Spending:
        """Tokens, money and time of all processes so far."""
        usage = self.usage
        return Spending(usage.tokens, None if self._price is None else self._price.usd(usage), self.seconds)

    def metrics(self) -> dict[str, float]:
        """Return the usage by all processes under `usage/…`, with dollars if the price is known."""
        usage = self.usage
        counts = {f"usage/{name}": float(value) for name, value in asdict(usage).items() if name != "other_usd"}
        return counts if self._price is None else {**counts, "usage/usd": self._price.usd(usage)}

    def write(self) -> None:
        """Record the usage and the working time; raise `RunFailed` if they cannot be written."""
        self._recorded_s = self.seconds
        with files.report_write_errors(self._path.parent):
            files.write_text(self._path, json.dumps({**asdict(self.usage), "seconds": self.seconds}) + "\n")

    async def write_if_due(self) -> None:
        """Record the usage if the last record is older than `_RECORD_INTERVAL_S`."""
        if self.seconds - self._recorded_s >= _RECORD_INTERVAL_S:
            await in_thread(self.write)
