"""Findings about environments that hold the event loop.

Invariant: each line of an environment is reported once during the run, and recorded with its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from rlkit._util.loop_holds import Hold
from rlkit.metrics.diagnostics import Finding
from rlkit.types import Json

RULE = "blocking"

_FINDINGS_MAX = 20
"""Largest number of findings of one run; more places of one environment would say nothing new."""

_ACTION = "await what it waits for, or move the work into a thread: `await asyncio.to_thread(...)`"


class BlockingFindings:
    """Turns the holds of an event loop into findings.

    Args:
        step: returns the current step.
        tell: receives each new finding.
        record: receives all findings as JSON, when one is new and at every doubling of its count.
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
        """Add a hold."""
        key = (hold.env, "a line that was not seen" if hold.place is None else str(hold.place))
        step = self._step()
        new = key not in self._findings
        if new and len(self._findings) == _FINDINGS_MAX:
            return
        finding, times, longest_s = self._findings.get(key, (Finding(RULE, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} held the event loop {often}, for {longest_s:.1f} s at most: nothing else could go on"
        finding = replace(finding, last=step, evidence=evidence)
        self._findings[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # at the first, second, fourth, … time: each writes a file
            self._record([asdict(recorded) for recorded, _, _ in self._findings.values()])
        if new:
            self._tell(finding)
