"""Listeners of a run: the console, a service that shows runs, a file.

Invariant: a tracker only listens. Whatever it does or raises, and however long it takes, the run goes on. Its calls
come one after the other and in order, from a thread of its own, and each once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlkit._util.threads import DaemonThreadPool
    from rlkit.cost.budget import Spending
    from rlkit.cost.estimate import Estimate
    from rlkit.types import Checkpoint

CALL_S = 0.5
"""Seconds that a run waits for one call of a tracker before it goes on."""

MAX_WAITING_CALLS = 10_000
"""Calls that wait for a slow tracker; more are dropped. Metrics of so many steps take some tens of megabytes."""

_LAST_S = 40.0
"""Seconds that the end of a run waits for its trackers, all together; those of rlkit give up before."""

_BEHIND_S = 5.0
"""The same for a tracker that is behind with earlier calls."""

type Phase = Literal["preparing", "sampling", "training", "evaluating", "saving", "done"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at this moment.

    Args:
        step: optimiser steps taken.
        steps: optimiser steps of the whole run.
        queued: rollouts of this step that wait to be played.
        running: rollouts that are being played.
        finished: finished rollouts of this step.
        failed: failed episodes of this step, played again or not.
        tokens: tokens sampled since the run started.
        seconds: time since the run started, or was resumed.
        first_step: steps taken before the run was resumed.
        activity: counts of the work under way, as a phrase; "" for none.
    """

    step: int = 0
    steps: int = 0
    phase: Phase = "preparing"
    queued: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_step: int = 0
    activity: str = ""

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the pace so far; None before the first step is done."""
        done = self.step - self.first_step
        return self.seconds / done * (self.steps - self.step) if done > 0 else None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that starts.

    Args:
        service: place where the model runs, as a phrase for people.
        progress: returns the current `Progress`, from any thread.
    """

    name: str
    directory: Path
    model: str
    envs: tuple[str, ...]
    service: str
    progress: Callable[[], Progress]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run.

    Args:
        status: `interrupted` and `budget` runs have saved a checkpoint, and can be resumed.
        steps: optimiser steps taken.
        metrics: metrics of the last step.
        checkpoint: last checkpoint, if any was saved.
        reason: limit that a `budget` run reached; why a `completed` run took fewer steps than it might.
        best_checkpoint: checkpoint with the best value of the metric that weights are compared by, if any has one.
        spending: everything that the run used.
        estimate: the expectation of a dry run of the same configuration; None if there was none.
    """

    name: str
    directory: Path
    status: Literal["completed", "interrupted", "budget"]
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    checkpoint: Checkpoint | None = None
    reason: str = ""
    best_checkpoint: Checkpoint | None = None
    spending: Spending | None = None
    estimate: Estimate | None = None


class Tracker:
    """A listener of a run.

    A subclass overrides the methods that it needs. They are called from one thread, which is the tracker's own; while
    one takes its time, the next call waits. An exception is reported once, and the run goes on.
    """

    def on_start(self, run: RunInfo) -> None:
        """Hear that the run begins."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear that a step is done; step 0 is the evaluation before the first one."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hear that a checkpoint was saved."""

    def on_note(self, message: str) -> None:
        """Hear something that a person should read."""

    def on_finish(self, result: RunResult | None) -> None:
        """Hear that the run is over; None when it failed."""


class Broadcast(Tracker):
    """Several trackers as one that cannot fail, and that a slow one does not hold up.

    An exception of one is told to the others, once, and dropped. A call that takes longer than `CALL_S` goes on behind
    the caller's back, and so do those after it until the tracker has caught up.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._listeners = [_Listener(tracker) for tracker in trackers]
        self._complained: set[str] = set()

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_start(run))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_step(step, metrics))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_checkpoint(checkpoint))

    def on_note(self, message: str) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_note(message))

    def on_finish(self, result: RunResult | None) -> None:
        """End the run for all trackers at once, and wait for them for a limited time."""
        limits_s = [_BEHIND_S if listener.is_behind else _LAST_S for listener in self._listeners]
        self._call_each(lambda tracker: tracker.on_finish(result), within_s=0)
        ended_s = time.monotonic()
        for listener, limit_s in zip(self._listeners, limits_s, strict=True):
            self._complain(listener, listener.catch_up(ended_s + limit_s - time.monotonic()))
        for listener in self._listeners:
            listener.close()

    def _call_each(self, call: Callable[[Tracker], None], *, within_s: float | None = None) -> None:
        for listener in self._listeners:
            self._complain(listener, listener.call(call, within_s=CALL_S if within_s is None else within_s))

    def _complain(self, listener: _Listener, error: BaseException | None) -> None:
        if error is not None and listener.name not in self._complained:
            self._complained.add(listener.name)
            self.on_note(f"the tracker {listener.name} failed and will miss things: {type(error).__name__}: {error}")


class TooSlow(Exception):
    """A tracker takes longer than its run can wait."""


class _Listener:
    """A tracker and its thread."""

    def __init__(self, tracker: Tracker) -> None:
        self.name = type(tracker).__name__
        self._tracker = tracker
        self._thread: DaemonThreadPool | None = None
        self._calls = deque[Future[None]]()
        self._lock = threading.Lock()

    @property
    def is_behind(self) -> bool:
        """Whether a call is not finished."""
        return bool(self._calls) and not self._calls[-1].done()

    def call(self, call: Callable[[Tracker], None], *, within_s: float) -> BaseException | None:
        """Call the tracker in the caller's context, and wait unless it is behind.

        Returns:
            The exception of this call or of an earlier one, once.
        """
        from rlkit._util.threads import DaemonThreadPool  # needs asyncio, which reading a configuration does not

        with self._lock:
            waits = not self.is_behind
            if len(self._calls) > MAX_WAITING_CALLS:
                return TooSlow("it is so slow that it is told no more")
            self._thread = self._thread or DaemonThreadPool(1, name=f"rlkit-{self.name}")
            future = self._thread.submit(copy_context().run, call, self._tracker)
            self._calls.append(future)
        if waits:
            wait([future], within_s)
        return self._take_error()

    def catch_up(self, within_s: float) -> BaseException | None:
        """Wait for all calls, for a limited time; return an exception as `call` does, or that time is over."""
        _, late = wait(self._calls, max(within_s, 0.0))
        return TooSlow("it had not taken everything when the run was over") if late else self._take_error()

    def close(self) -> None:
        """End the thread unless it is behind; a later call starts another one."""
        if self._thread is not None and not self.is_behind:
            self._thread.shutdown()
            self._thread = None

    def _take_error(self) -> BaseException | None:
        error = None
        with self._lock:
            while self._calls and self._calls[0].done():
                error = self._calls.popleft().exception() or error
        return error
