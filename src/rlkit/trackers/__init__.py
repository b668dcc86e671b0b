"""Who is told about a run: the console, a tracking service, a file.

Invariant: a tracker only listens. Whatever it does or raises, and however long it takes, the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rlkit.trackers.patience import PATIENCE_S, Patient
from rlkit.types import Checkpoint

if TYPE_CHECKING:
    from rlkit.cost.budget import Spent
    from rlkit.cost.estimate import Estimate

_LAST_S = 40.0
"""What the end of a run waits for trackers, all together; those that rlkit has give up before."""

_BEHIND_S = 5.0
"""The same for one that had not even taken what it was told before."""

type Phase = Literal["preparing", "sampling", "training", "evaluating", "saving", "done"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands at this moment.

    Args:
        step: optimiser steps taken.
        steps: optimiser steps of the whole run.
        phase: what it is doing.
        queued: rollouts of this step that wait to be played.
        live: rollouts that are being played.
        done: rollouts of this step that are finished.
        failed: episodes of this step that failed, played again or not.
        tokens: tokens sampled since the run started.
        seconds: since the run started, or was resumed.
        first_step: steps that were taken before it was resumed.
        work: counts of the work under way, as a phrase; "" for none.
    """

    step: int = 0
    steps: int = 0
    phase: Phase = "preparing"
    queued: int = 0
    live: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_step: int = 0
    work: str = ""

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before the first step is done."""
        done = self.step - self.first_step
        return self.seconds / done * (self.steps - self.step) if done > 0 else None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker is told when a run starts.

    Args:
        name: of the run.
        directory: its folder.
        model: that is trained.
        envs: names of the environments.
        service: where the model runs, as a phrase for people.
        progress: gives the current `Progress` from any thread.
    """

    name: str
    directory: Path
    model: str
    envs: tuple[str, ...]
    service: str
    progress: Callable[[], Progress]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Args:
        name: of the run.
        directory: its folder.
        status: `interrupted` and `budget` runs have saved a checkpoint of what they did, and can be gone on with.
        steps: optimiser steps taken.
        metrics: of the last step.
        checkpoint: the last one, if any was saved.
        reason: the limit that was reached, of a `budget` run; why a `completed` one took fewer steps than it might.
        best: the checkpoint with the best value of what weights are compared by, if any has one.
        spent: what it used in all.
        estimate: what a dry run of the same configuration had expected; None if there was none.
    """

    name: str
    directory: Path
    status: Literal["completed", "interrupted", "budget"]
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    checkpoint: Checkpoint | None = None
    reason: str = ""
    best: Checkpoint | None = None
    spent: Spent | None = None
    estimate: Estimate | None = None


class Tracker(Protocol):
    """Told about a run as it happens, from a thread of its own; a method may take its time, and the next call waits."""

    def started(self, run: RunInfo) -> None:
        """The run begins."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step (or, as step 0, the evaluation before the first one) is done."""
        ...

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was saved."""
        ...

    def note(self, message: str) -> None:
        """Something a person should read."""
        ...

    def finished(self, result: RunResult | None) -> None:
        """The run is over; None when it failed."""
        ...


class Broadcast(Tracker):
    """Several trackers as one that cannot fail, and whom a slow one does not hold up.

    What one of them raises is told to the others, once, and dropped. Each is told from a thread of its own, in order.
    A call is waited for; one that takes longer than a moment goes on behind the caller's back, and so do those after
    it until the tracker has caught up.
    """

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = [(tracker, Patient(f"rlkit-{type(tracker).__name__}")) for tracker in trackers]
        self._complained: set[str] = set()

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._each(lambda tracker: tracker.started(run))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        self._each(lambda tracker: tracker.step(step, metrics))

    def checkpoint(self, checkpoint: Checkpoint) -> None:  # noqa: D102  inherited
        self._each(lambda tracker: tracker.checkpoint(checkpoint))

    def note(self, message: str) -> None:  # noqa: D102  inherited
        self._each(lambda tracker: tracker.note(message))

    def finished(self, result: RunResult | None) -> None:
        """The run is over. All are waited for at once, for a limited time."""
        limits_s = [_BEHIND_S if patient.behind else _LAST_S for _, patient in self._trackers]
        self._each(lambda tracker: tracker.finished(result), within_s=0)
        ended_s = time.monotonic()
        for (tracker, patient), limit_s in zip(self._trackers, limits_s, strict=True):
            self._complain(tracker, patient.catch_up(ended_s + limit_s - time.monotonic()))
        for _, patient in self._trackers:
            patient.close()

    def _each(self, tell: Callable[[Tracker], None], *, within_s: float = PATIENCE_S) -> None:
        for tracker, patient in self._trackers:
            self._complain(tracker, patient.tell(partial(tell, tracker), within_s=within_s))

    def _complain(self, tracker: Tracker, error: Exception | None) -> None:
        name = type(tracker).__name__
        if error is not None and name not in self._complained:
            self._complained.add(name)
            self.note(f"the tracker {name} failed and will miss things: {type(error).__name__}: {error}")
