"""Trackers: listeners of a run, such as the console or an experiment-tracking service.

Invariant: a tracker cannot stop or block its run. Its methods are called on a thread of its own, in order, one at a
time, and once per event.
"""

from __future__ import annotations

import html
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit.errors import RlkitError

if TYPE_CHECKING:
    from rlkit._util.threads import DaemonThreadPool
    from rlkit.cost.budget import Spending
    from rlkit.cost.estimate import Estimate
    from rlkit.types import Checkpoint
    from rlkit.view.server import RunView

CALL_S = 0.5  # seconds that a run waits for one call of a tracker before it continues
MAX_WAITING_CALLS = 10_000
"""Limit of queued calls of a slow tracker; further calls are dropped. A full queue takes tens of megabytes."""

_LAST_S = 40.0  # seconds that the end of a run waits for all its trackers; the built-in trackers give up earlier
_BEHIND_S = 5.0  # seconds that the end of a run waits for a tracker with unfinished calls

type Phase = Literal["preparing", "sampling", "training", "evaluating", "saving", "done"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The current state of a run.

    Args:
        step: number of finished steps.
        steps: number of steps of the whole run.
        queued: rollouts of this step that are not running yet.
        running: rollouts in progress.
        finished: rollouts that finished since the last new weights.
        failed: episodes that failed since the last new weights, retried or not.
        tokens: tokens sampled since the process started.
        newest_error: reason of the last failed episode; "" for none.
        seconds: time since the run was started or resumed.
        first_step: number of steps that were finished before the run was resumed.
        warm_up_s: time until the first step of this process was finished; it compiles and fills caches.
        activity: counts of the work in progress, as a phrase; "" for none.
    """

    step: int = 0
    steps: int = 0
    phase: Phase = "preparing"
    queued: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    newest_error: str = ""
    seconds: float = 0.0
    first_step: int = 0
    warm_up_s: float = 0.0
    activity: str = ""

    @property
    def seconds_left(self) -> float | None:
        """The estimated remaining time, at the average speed since the first step; None without a second step."""
        timed = self.step - self.first_step - 1
        is_known = timed > 0 and self.phase != "done"
        return (self.seconds - self.warm_up_s) / timed * (self.steps - self.step) if is_known else None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run that starts.

    Args:
        service: description of the service that runs the model.
        progress: returns the current `Progress`, from any thread.
        earlier: steps and metrics from before the run was resumed.
    """

    name: str
    directory: Path
    model: str
    envs: tuple[str, ...]
    service: str
    progress: Callable[[], Progress]
    earlier: Sequence[tuple[int, Mapping[str, float]]] = ()


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The end of a run.

    Args:
        status: `interrupted` and `budget` runs have saved a checkpoint, and can be resumed.
        steps: number of finished steps.
        metrics: metrics of the last step.
        checkpoint: last checkpoint, if any was saved.
        reason: limit that a `budget` run reached, or the reason why a `completed` run stopped early.
        best_checkpoint: checkpoint with the best value of `best.metric`, if any has a value.
        spending: tokens, money and time that the run used.
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

    def view(self) -> RunView:
        """Return the run's page, served by this process; a notebook shows it."""
        from rlkit.view.server import view_run

        return view_run(self.directory)

    def __repr__(self) -> str:
        from rlkit.metrics.rewards import draw_bars

        return f"<RunResult {self._describe()} {draw_bars(self.rewards('env'))}".rstrip() + ">"

    def _repr_html_(self) -> str:
        from rlkit.metrics.rewards import draw_line_chart

        rewards = self.rewards("env")
        chart = draw_line_chart(rewards) if len(rewards) > 1 else ""
        return f"<p>{html.escape(self._describe())}</p>{chart}"

    def _describe(self) -> str:
        return f"{self.name}: {self.status}: {self.describe_gain()}"

    def describe_gain(self) -> str:
        """Describe reward, evaluation and divergence from a teacher at both ends of the run, and what it took."""
        from rlkit.trackers.rendering import render_gain, render_spending

        divergences = [metrics["teacher/v1"] for metrics in self._read_metrics() if "teacher/v1" in metrics]
        curves = {"reward": self.rewards("env"), "evaluation": self.rewards("eval"), "KL to the teacher": divergences}
        gains = [f"{name} {render_gain(values)}" for name, values in curves.items() if values]
        used = [] if self.spending is None else [render_spending(self.spending)]
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        return ", ".join([f"{', '.join(gains)} in {steps}" if gains else steps, *used])

    def rewards(self, prefix: Literal["env", "eval"]) -> list[float]:
        """Return the mean rewards of the steps (`env`) or of the evaluations (`eval`); none if they cannot be read."""
        from rlkit.metrics.rewards import mean_reward

        rewards = (mean_reward(metrics, prefix) for metrics in self._read_metrics())
        return [reward for reward in rewards if reward is not None]

    def count_failures(self, prefix: Literal["env", "eval"]) -> int:
        """Return the number of failed rollouts of the steps (`env`) or of the evaluations (`eval`)."""
        return round(sum(metrics.get(f"{prefix}/all/failed", 0) for metrics in self._read_metrics()))

    def _read_metrics(self) -> list[Mapping[str, float]]:
        from rlkit.store.history import read_metrics

        with suppress(RlkitError, OSError):
            return [metrics for _, metrics in read_metrics(self.directory / "metrics.jsonl")]
        return []


class Tracker:
    """A listener of a run.

    Override the methods that you need. They are called on a thread of the tracker's own, one at a time. An exception is
    reported once, and the run continues.
    """

    def on_start(self, run: RunInfo) -> None:
        """Handle the start of the run."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle a finished step; step 0 is the evaluation before the first step."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle a saved checkpoint."""

    def on_note(self, message: str) -> None:
        """Handle a message for the user."""

    def on_status(self, message: str) -> None:
        """Handle a message about the run's preparation, which the next one replaces; by default it is a note."""
        self.on_note(message)

    def on_finish(self, result: RunResult | None) -> None:
        """Handle the end of the run; `result` is None if the run failed."""


class Broadcast(Tracker):
    """Forward each event to several trackers, without failing or waiting for a slow tracker.

    The first exception of a tracker is reported to all trackers; later ones are dropped. A call that takes longer than
    `CALL_S` continues in the background, and later calls of that tracker queue behind it.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._listeners = [_Listener(tracker) for tracker in trackers]
        self._reported: set[str] = set()

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_start(run))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_step(step, metrics))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_checkpoint(checkpoint))

    def on_note(self, message: str) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_note(message))

    def on_status(self, message: str) -> None:  # noqa: D102  inherited
        self._call_each(lambda tracker: tracker.on_status(message))

    def on_finish(self, result: RunResult | None) -> None:
        """Tell all trackers concurrently that the run is over, and wait for them for a limited time."""
        limits_s = [_BEHIND_S if listener.is_behind else _LAST_S for listener in self._listeners]
        self._call_each(lambda tracker: tracker.on_finish(result), within_s=0)
        ended_s = time.monotonic()
        for listener, limit_s in zip(self._listeners, limits_s, strict=True):
            self._report_error(listener, listener.catch_up(ended_s + limit_s - time.monotonic()))
        for listener in self._listeners:
            listener.close()

    def _call_each(self, call: Callable[[Tracker], None], *, within_s: float | None = None) -> None:
        for listener in self._listeners:
            self._report_error(listener, listener.call(call, within_s=CALL_S if within_s is None else within_s))

    def _report_error(self, listener: _Listener, error: BaseException | None) -> None:
        if error is not None and listener.name not in self._reported:
            self._reported.add(listener.name)
            self.on_note(f"the tracker {listener.name} failed and may be incomplete: {type(error).__name__}: {error}")


class TooSlow(Exception):
    """A tracker is slower than its run can wait for."""


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
        """True if a call is unfinished."""
        return bool(self._calls) and not self._calls[-1].done()

    def call(self, call: Callable[[Tracker], None], *, within_s: float) -> BaseException | None:
        """Call the tracker in the caller's context, and wait for the result unless the tracker is behind.

        Returns:
            The exception of this or an earlier call, if it was not returned before.
        """
        from rlkit._util.threads import DaemonThreadPool  # needs asyncio, which reading a configuration does not

        with self._lock:
            should_wait = not self.is_behind
            if len(self._calls) > MAX_WAITING_CALLS:
                return TooSlow("it is too slow, so further events are dropped")
            self._thread = self._thread or DaemonThreadPool(1, name=f"rlkit-{self.name}")
            future = self._thread.submit(copy_context().run, call, self._tracker)
            self._calls.append(future)
        if should_wait:
            wait([future], within_s)
        return self._take_error()

    def catch_up(self, within_s: float) -> BaseException | None:
        """Wait for all calls, for a limited time; return TooSlow after a timeout, else an exception as `call` does."""
        _, unfinished = wait(self._calls, max(within_s, 0.0))
        return TooSlow("it had not finished when the run ended") if unfinished else self._take_error()

    def close(self) -> None:
        """End the thread unless a call is unfinished; a later call starts a new thread."""
        if self._thread is not None and not self.is_behind:
            self._thread.shutdown()
            self._thread = None

    def _take_error(self) -> BaseException | None:
        error = None
        with self._lock:
            while self._calls and self._calls[0].done():
                error = self._calls.popleft().exception() or error
        return error
