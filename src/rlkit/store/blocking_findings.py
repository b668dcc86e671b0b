"""Findings about environments that hold the event loop.

Invariant: each line of an environment is told once while the run goes on, and kept with its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rlkit._util.loop_holds import Hold
from rlkit.errors import UsageError
from rlkit.metrics.diagnostics import Finding
from rlkit.store import lines
from rlkit.types import Json

NAME = "blocking"

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
        finding, times, longest_s = self._found.get(key, (Finding(NAME, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} held the event loop {often}, for {longest_s:.1f} s at most: nothing else could go on"
        finding = replace(finding, last=step, evidence=evidence)
        self._found[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # at the first, second, fourth, … time: each writes a file
            self._keep([asdict(kept) for kept, _, _ in self._found.values()])
        if new:
            self._tell(finding)


def recorded_findings(directory: Path) -> list[Finding]:
    """Return the findings that a run has kept in its folder, because they cannot be read off its metrics.

    Raises:
        UsageError: run.json is damaged.
    """
    path = directory / "run.json"
    try:
        return [Finding(**finding) for finding in lines.read_object(path).get("findings") or ()]
    except TypeError as error:
        raise UsageError(f"{path} is damaged: findings: {error}") from error
