"""Lines about a run that has said nothing for a while.

Invariant: while a run lives, no more than `QUIET_MAX_S` pass without a line, whatever the run waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlkit.trackers import Progress

QUIET_S = 15.0
"""Silence after which a line is due: about what people wait before they wonder."""

QUIET_MAX_S = 60.0
"""The longest silence. It doubles from `QUIET_S`, so that an hour's wait is not two hundred lines."""


def progress_line(progress: Progress) -> str:
    """`step 3/20: sampling, 2 of 32 rollouts done; replies in progress: 30, tokens in them: 1,204`."""
    total = progress.queued + progress.live + progress.done
    parts = [progress.phase, *([f"{progress.done} of {total} rollouts done"] if total else [])]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    step = min(progress.step + 1, progress.steps)
    return "; ".join([f"step {step}/{progress.steps}: {', '.join(parts)}", *([progress.work] if progress.work else [])])


class Heartbeat:
    """Says where a run stands whenever nothing else was said.

    Args:
        say: takes a line; called from a thread of its own.
        quiet_s: seconds of silence before the first line; None for `QUIET_S`.
        quiet_max_s: seconds between two lines at most.
    """

    def __init__(
        self, say: Callable[[str], None], *, quiet_s: float | None = None, quiet_max_s: float = QUIET_MAX_S
    ) -> None:
        self._say = say
        self._quiet_s = QUIET_S if quiet_s is None else quiet_s
        self._quiet_max_s = quiet_max_s
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, progress: Callable[[], Progress]) -> None:
        """Begin to watch a run; `progress` may be called from any thread."""
        self._thread = threading.Thread(target=self._run, args=(progress,), name="rlkit-heartbeat", daemon=True)
        self._thread.start()

    def postpone(self) -> None:
        """Start the silence anew: a line was said."""
        self._wake.set()

    def stop(self) -> None:
        """Say no more."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, progress: Callable[[], Progress]) -> None:
        quiet_s = self._quiet_s
        while not self._stopped:
            if self._wake.wait(quiet_s):
                self._wake.clear()
                quiet_s = self._quiet_s
                continue
            try:
                self._say(progress_line(progress()))
            except (OSError, ValueError):  # what it writes to is full, broken or closed: nobody reads its lines
                return
            quiet_s = min(2 * quiet_s, self._quiet_max_s)
