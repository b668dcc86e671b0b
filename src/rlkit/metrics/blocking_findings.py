"""Findings about environments that block the event loop.

Invariant: each blocking line of an environment is reported once during the run, and recorded with its count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from rlkit._util.loop_holds import Hold
from rlkit.metrics.diagnostics import Finding
from rlkit.types import Json

RULE = "blocking"

_FINDINGS_MAX = 20
"""Maximum number of findings of one run."""

_ACTION = "await slow calls, or run the work in a thread: `await asyncio.to_thread(...)`"


class BlockingFindings:
    """Convert holds of the event loop (`Hold`) to findings.

    Args:
        step: function that returns the current step.
        tell: receives each new finding.
        record: receives all findings as JSON, for each new finding and whenever the count of a finding doubles.
    """

    def __init__(
        self,
        *,
        step: Callable[[], int] = lambda: 0,
        tell: Callable[[Finding], None],
        record: Callable[[Sequence[Mapping[str, Json]]], None] = lambda findings: None,
    ) -> None:
        self._step = step
        self._tell = tell
        self._record = record
        self._findings = dict[tuple[str, str], tuple[Finding, int, float]]()

    def add(self, hold: Hold) -> None:
        """Record a hold, and report it if its line is new."""
        key = (hold.env, "an unknown line" if hold.place is None else str(hold.place))
        step = self._step()
        new = key not in self._findings
        if new and len(self._findings) == _FINDINGS_MAX:
            return
        finding, times, longest_s = self._findings.get(key, (Finding(RULE, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} blocked the event loop {often}, for at most {longest_s:.1f} s: nothing else could run"
        finding = replace(finding, last=step, evidence=evidence)
        self._findings[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # powers of two, because each record writes a file
            self._record([asdict(recorded) for recorded, _, _ in self._findings.values()])
        if new:
            self._tell(finding)
