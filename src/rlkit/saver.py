"""Checkpoints of a run: saved behind its back, recorded in their order.

Invariant: a checkpoint is recorded once the service has it, after those of the steps before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from rlkit.config.schema import CheckpointConfig
from rlkit.errors import RlkitError
from rlkit.service import Learner
from rlkit.service.watch import Watch
from rlkit.store import RunStore
from rlkit.trackers import Broadcast, Checkpoint

DAY_S = 24 * 3600

type Saving = Awaitable[tuple[str, str]]
"""A checkpoint that was asked for; gives its `tinker://` paths, of the training state and of the sampler's weights."""


class Saver:
    """Saves weights.

    Args:
        config: when, and for how long they are kept.
        store: records them.
        trackers: are told.
        watch: over the calls to the service.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: RunStore,
        trackers: Broadcast,
        watch: Watch,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._every = config.every
        self._ttl_s = None if config.ttl_days is None else round(config.ttl_days * DAY_S)
        self._store = store
        self._trackers = trackers
        self._watch = watch
        self._now = now
        self._asked = Counter[int]()
        self._missed = False
        self._recording: asyncio.Task[None] | None = None
        self.newest: Checkpoint | None = None
        """The newest one of which the service still has the weights that the run goes on from."""

    def ask(self, learner: Learner, step: int) -> Saving:
        """Ask for a checkpoint of the weights as they are when its turn comes."""
        self._asked[step] += 1  # one that failed may have left its name behind
        again = f"-{self._asked[step]}" if self._asked[step] > 1 else ""
        return learner.save(f"step-{step:06d}{again}", ttl_s=self._ttl_s)

    def ask_if_due(self, learner: Learner, step: int) -> Saving | None:
        """Likewise, if the step is one whose weights are kept, or the last that was could not be saved."""
        return self.ask(learner, step) if self._every and (step % self._every == 0 or self._missed) else None

    def record(self, step: int, saving: Saving) -> None:
        """Record a checkpoint once it is there; a failure is told and does no harm."""
        self._missed = False
        self._recording = asyncio.create_task(self._record_later(self._recording, step, saving))

    async def save(self, learner: Learner, step: int) -> None:
        """Save the weights of a step, unless they are saved.

        Raises:
            RlkitError: the service failed after retries, or refused.
            RunFailed: the checkpoint cannot be written down.
        """
        if self._recording is not None:
            await self._recording
        if self.newest is None or self.newest.step != step:
            paths = await self._watch.call(lambda: self.ask(learner, step), "saving a checkpoint", retry=True)
            self._record(step, *paths)

    def close(self) -> None:
        """Give up what is not saved yet."""
        if self._recording is not None:
            self._recording.cancel()

    async def _record_later(self, earlier: asyncio.Task[None] | None, step: int, saving: Saving) -> None:
        if earlier is not None:
            await earlier
        try:
            self._record(step, *await self._watch.call(lambda: saving, "saving a checkpoint"))
        except RlkitError as error:
            self._missed = True
            self._trackers.note(f"the checkpoint of step {step} could not be saved: {error}")

    def _record(self, step: int, state: str, sampler: str) -> None:
        expires = None if self._ttl_s is None else self._now() + self._ttl_s
        saved = Checkpoint(step, state, sampler, expires)
        self._store.add_checkpoint(saved)
        self.newest = saved
        self._trackers.checkpoint(saved)
