"""A judge's files: its verdicts, its spending and the time of its last request, for all processes.

Invariant: an answered request is in the record of spending before its verdict is used. A cached verdict is whole.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit.errors import BudgetReached, UsageError

_MAX_NUMBER = 1e300
_QUEUE_MAX = 1_000  # limit of the requests that wait for their start, in all processes


@dataclass(frozen=True, slots=True)
class JudgeRecords:
    """The folder of a judge's model."""

    folder: Path

    def read_verdict(self, key: str) -> str:
        """Return the text of a cached verdict; "" if there is none, or its file cannot be read."""
        try:
            return str(json_lines.read_object(self._verdict_path(key)).get("text", ""))
        except (OSError, UsageError):
            return ""

    def write_verdict(self, key: str, text: str) -> None:
        """Store the text of a verdict."""
        with self._report_write_errors():
            files.write_text(self._verdict_path(key), json.dumps({"text": text}))

    def start_request(self, limits: Mapping[str, float | None], *, interval_s: float, now_s: float) -> float:
        """Return when a request may start: now, or `interval_s` after the one before.

        Raises:
            BudgetReached: a limit of `tokens` or `usd` is reached.
            UsageError: the record is damaged.
        """
        with self._change_spending() as spending:
            for name, limit in limits.items():
                if limit is not None and spending[name] >= limit:
                    used = f"{spending[name]:,.6g} of {limit:,.6g} {name} are used in {self.folder}"
                    raise BudgetReached(f"judge: budget_{name}: {used}: raise the limit, then resume the run")
            wait_s = spending["start_s"] + interval_s - now_s
            # A clock that was wrong must not delay requests for ever.
            spending["start_s"] = now_s + (wait_s if 0 < wait_s < _QUEUE_MAX * interval_s else 0.0)
            return spending["start_s"]

    def add_spending(self, tokens: int, usd: float) -> None:
        """Record an answered request."""
        with self._change_spending() as spending:
            spending["tokens"] += tokens
            spending["usd"] += usd

    @contextmanager
    def _change_spending(self) -> Generator[dict[str, float]]:
        path = self.folder / "spending.json"
        with self._report_write_errors():
            files.make_folder(self.folder)
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # other processes hold it for milliseconds
                spending = json_lines.read_object(path) if path.exists() else {}
                yield (spending := {name: _number(path, name, spending) for name in ("tokens", "usd", "start_s")})
                files.write_text(path, json.dumps(spending))

    @contextmanager
    def _report_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"judge: folder: {self.folder} cannot be written: {reason}") from error

    def _verdict_path(self, key: str) -> Path:
        return self.folder / "verdicts" / key[:2] / f"{key}.json"


def _number(path: Path, name: str, values: Mapping[str, object]) -> float:
    value = values.get(name, 0)
    if type(value) not in (int, float) or not 0 <= (number := cast("float", value)) < _MAX_NUMBER:
        raise UsageError(
            f"judge: {path}: {name}: {value!r:.100} is no number from 0 on; correct it, or delete the file"
        )
    return float(number)
