"""Findings about environments that hold the event loop.

Invariant: each line of an environment is told once while the run goes on, and kept with its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from rlkit._util.loop_holds import Hold
from rlkit.metrics.diagnostics import Finding
from rlkit.types import Json

RULE = "blocking"

_MOST = 20
"""Findings of one run; an environment that holds the loop in more places has been told often enough."""

_ACTION = "await what it waits for, or move the work into a thread: `await asyncio.to_thread(...)`"


class BlockingFindings:
    """Makes findings of the holds of an event loop.

    Args:
        step: returns the step in work.
        tell: receives each new finding.
        keep: receives all findings, as JSON, when one is new and now and then when it comes again.
    """

    def __init__(
        self,
        *,
        step: Callable[[], int] = lambda: 0,
        tell: Callable[[Finding], None],
        keep: Callable[[Sequence[Mapping[str, Json]]], None] = lambda findings: None,
    ) -> None:
        self._step = step
        self._tell = tell
        self._keep = keep
        self._found = dict[tuple[str, str], tuple[Finding, int, float]]()

    def add(self, hold: Hold) -> None:
        """Add a hold."""
        key = (hold.env, "a line that was not seen" if hold.place is None else str(hold.place))
        step = self._step()
        new = key not in self._found
        if new and len(self._found) == _MOST:
            return
        finding, times, longest_s = self._found.get(key, (Finding(RULE, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} held the event loop {often}, for {longest_s:.1f} s at most: nothing else could go on"
        finding = replace(finding, last=step, evidence=evidence)
        self._found[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # at the first, second, fourth, … time: each writes a file
            self._keep([asdict(kept) for kept, _, _ in self._found.values()])
        if new:
            self._tell(finding)
