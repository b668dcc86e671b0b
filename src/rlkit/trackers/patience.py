"""Telling somebody who may be slow.

Invariant: what is told arrives one after the other and in order, and each once; who tells waits for a moment at most,
and only for a listener that has kept up so far.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field

PATIENCE_S = 0.5
"""What a listener may take for one call before it is told the next one behind the caller's back."""

MOST_WAITING = 10_000
"""Calls that wait for a slow listener; more are not told. Metrics of so many steps take some tens of megabytes."""


@dataclass(slots=True, eq=False)
class _Call:
    tell: Callable[[], object]
    context: Context
    done: threading.Event = field(default_factory=threading.Event)


class Patient:
    """One listener, told from a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = deque[_Call]()
        self._changed = threading.Condition()
        self._behind: _Call | None = None
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = None

    def tell(self, call: Callable[[], object], *, within_s: float = PATIENCE_S) -> Exception | None:
        """Tell it, and wait for it unless it is behind.

        Returns:
            What this call or an earlier one raised, once.
        """
        asked = _Call(call, copy_context())
        with self._changed:
            if len(self._calls) >= MOST_WAITING:
                return TooSlow("it is so slow that it is told no more")
            self._calls.append(asked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        if not self.behind:
            self._behind = None if asked.done.wait(within_s) else asked
        found, self._failed = self._failed, None
        return found

    @property
    def behind(self) -> bool:
        """Whether there is something that it was not told yet."""
        return self._behind is not None and not self._behind.done.is_set()

    def catch_up(self, within_s: float) -> Exception | None:
        """Wait until it was told everything, for a while.

        Returns:
            What a call raised, once; or that it is not done.
        """
        with self._changed:
            last = self._calls[-1] if self._calls else None
        if last is not None and not last.done.wait(max(within_s, 0.0)):
            return TooSlow("it had not taken everything when the run was over")
        found, self._failed = self._failed, None
        return found

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                call = self._calls[0]
            try:
                call.context.run(call.tell)
            except Exception as error:  # a listener may raise anything
                self._failed = error
            with self._changed:
                self._calls.popleft()
            call.done.set()


class TooSlow(Exception):
    """A listener takes longer than its caller can wait."""
