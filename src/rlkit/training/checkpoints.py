"""Checkpoints of a run: saved behind its back, recorded in their order.

Invariant: a checkpoint is recorded once the service has it, after those of the steps before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rlkit.config.schema.operation import CheckpointConfig
from rlkit.errors import RlkitError, UsageError
from rlkit.service import Learner
from rlkit.service.watch import ServiceWatch
from rlkit.store import RunStore
from rlkit.trackers import Broadcast
from rlkit.training.model_selection import Selection
from rlkit.types import Checkpoint

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
        selection: says which checkpoints are kept.
        delete: deletes what a `tinker://` path names.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: RunStore,
        trackers: Broadcast,
        watch: ServiceWatch,
        *,
        selection: Selection,
        delete: Callable[[str], Awaitable[None]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._every = config.every
        self._ttl_s = None if config.ttl_days is None else round(config.ttl_days * DAY_S)
        self._store = store
        self._trackers = trackers
        self._watch = watch
        self._selection = selection
        self._delete = delete
        self._now = now
        self._asked = Counter[int]()
        self._gone = set[str]()
        self._missed = False
        self._recording: asyncio.Task[None] | None = None
        self._deleting = dict[str, asyncio.Task[None]]()
        self.newest: Checkpoint | None = None
        """The newest one of which the service still has the weights that the run goes on from."""

    def go_on(self, step: int, *, tried: int) -> None:
        """The run goes on from the weights of a step; it could not from a later checkpoint of one up to `tried`."""
        known = self._store.checkpoints()
        self._gone = {saved.state for saved in known if step < saved.step <= tried}
        self.newest = next((saved for saved in reversed(known) if saved.step == step), None)

    def has(self, step: int) -> bool:
        """Whether the weights of a step are saved, as far as is known."""
        return any(saved.step == step for saved in self.usable)

    def ask(self, learner: Learner, step: int) -> Saving:
        """Ask for a checkpoint of the weights as they are when its turn comes."""
        self._asked[step] += 1  # one that failed may have left its name behind
        again = f"-{self._asked[step]}" if self._asked[step] > 1 else ""
        return learner.save(f"step-{step:06d}{again}", ttl_s=self._ttl_s)

    def ask_if_due(self, learner: Learner, step: int, *, evaluated: bool) -> Saving | None:
        """Likewise, if the step is one whose weights are kept, or the last that was could not be saved.

        Args:
            learner: has the weights.
            step: of them.
            evaluated: they may turn out to be the best.
        """
        due = step % self._every == 0 or self._missed if self._every else False
        return self.ask(learner, step) if due or (evaluated and self._selection.aim.metric is not None) else None

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

    def tidy_up(self, *, reported: int) -> None:
        """Delete, behind the run's back, the checkpoints that need not be kept; a failure is told and does no harm.

        Args:
            reported: the last step of which everything is known.
        """
        for saved in self._selection.superfluous(self.usable, reported=reported):
            if saved.state not in self._deleting:
                self._deleting[saved.state] = asyncio.create_task(self._delete_later(saved))

    async def settle(self) -> None:
        """Wait until what was to be deleted is."""
        await asyncio.gather(*self._deleting.values())

    def close(self) -> None:
        """Give up what is not saved, or deleted, yet."""
        for task in (self._recording, *self._deleting.values()):
            if task is not None:
                task.cancel()

    @property
    def usable(self) -> list[Checkpoint]:
        """What was saved, without what the service turned out not to have any more."""
        return [saved for saved in self._store.checkpoints() if saved.state not in self._gone]

    async def _delete_later(self, saved: Checkpoint) -> None:
        try:
            for path in (saved.state, saved.sampler):
                with suppress(UsageError):  # it is gone already
                    await self._watch.call(lambda path=path: self._delete(path), "deleting a checkpoint", retry=True)
            self._store.remove_checkpoint(saved)
        except RlkitError as error:
            self._trackers.note(f"the checkpoint of step {saved.step} could not be deleted: {error}")

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
