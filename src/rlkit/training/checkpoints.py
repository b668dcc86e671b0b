"""Checkpoints of a run: requested right behind a step, recorded in the background, deleted when superfluous.

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
from rlkit.training.model_selection import ModelSelection
from rlkit.types import Checkpoint

DAY_S = 24 * 3600

type PendingCheckpoint = Awaitable[tuple[str, str]]
"""A requested checkpoint; gives its `tinker://` paths, of the training state and of the sampler's weights."""


class CheckpointSaver:
    """The checkpoints of a run.

    Args:
        config: steps between checkpoints, and their lifetime.
        store: directory of the run.
        trackers: receive each recorded checkpoint.
        watch: retries and limits calls to the service.
        selection: decides which checkpoints to keep.
        delete: deletes the weights at a `tinker://` path.
        now: returns seconds since the epoch.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: RunStore,
        trackers: Broadcast,
        watch: ServiceWatch,
        *,
        selection: ModelSelection,
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
        self._requests = Counter[int]()
        self._lost_states = set[str]()
        self._has_missed = False
        self._recording: asyncio.Task[None] | None = None
        self._deletions = dict[str, asyncio.Task[None]]()
        self.newest: Checkpoint | None = None
        """Newest checkpoint that the service has; its weights are those that the run trains."""

    def resume_from(self, step: int, *, newest_tried: int) -> None:
        """Take note that weights of a step were loaded; the service lost later checkpoints up to `newest_tried`."""
        recorded = self._store.checkpoints()
        self._lost_states |= {saved.state for saved in recorded if step < saved.step <= newest_tried}
        self.newest = next((saved for saved in reversed(self.usable) if saved.step == step), None)

    def is_recorded(self, step: int) -> bool:
        """Return whether a usable checkpoint of a step is recorded."""
        return any(saved.step == step for saved in self.usable)

    def request(self, learner: Learner, step: int) -> PendingCheckpoint:
        """Request a checkpoint of the weights that the learner has when the request's turn comes."""
        self._requests[step] += 1  # a failed request may have left its name behind
        suffix = f"-{self._requests[step]}" if self._requests[step] > 1 else ""
        return learner.save(f"step-{step:06d}{suffix}", ttl_s=self._ttl_s)

    def request_if_due(self, learner: Learner, step: int, *, is_evaluated: bool) -> PendingCheckpoint | None:
        """Request a checkpoint if one is due at this step, or if the last one that was due failed.

        Args:
            learner: handle of the weights.
            step: step of the weights.
            is_evaluated: the weights are evaluated, so they may turn out to be the best.
        """
        is_due = bool(self._every) and (step % self._every == 0 or self._has_missed)
        is_candidate = is_evaluated and self._selection.criterion.metric is not None
        return self.request(learner, step) if is_due or is_candidate else None

    def record(self, step: int, pending: PendingCheckpoint) -> None:
        """Record a requested checkpoint once it is saved; a failure is reported and does no harm."""
        self._has_missed = False
        self._recording = asyncio.create_task(self._record_later(self._recording, step, pending))

    async def is_saved(self, step: int) -> bool:
        """Wait for the checkpoints that are being recorded; return whether the newest one is of a step."""
        if self._recording is not None:
            await self._recording
        return self.newest is not None and self.newest.step == step

    async def save(self, learner: Learner, step: int) -> None:
        """Save the weights of a step.

        Raises:
            RlkitError: the service failed after retries, or refused.
            RunFailed: the checkpoint cannot be recorded.
        """
        paths = await self._watch.call(lambda: self.request(learner, step), "saving a checkpoint", retry=True)
        self._record(step, *paths)

    def delete_superfluous(self, *, last_step: int) -> None:
        """Delete superfluous checkpoints in the background; a failure is reported and does no harm.

        Args:
            last_step: last reported step.
        """
        for saved in self._selection.superfluous(self.usable, last_step=last_step):
            if saved.state not in self._deletions:
                self._deletions[saved.state] = asyncio.create_task(self._delete_later(saved))

    async def wait_for_deletions(self) -> None:
        """Wait for the deletions in the background."""
        await asyncio.gather(*self._deletions.values())

    def close(self) -> None:
        """Cancel recordings and deletions in the background."""
        for task in (self._recording, *self._deletions.values()):
            if task is not None:
                task.cancel()

    @property
    def usable(self) -> list[Checkpoint]:
        """Recorded checkpoints without those that the service turned out to have lost."""
        return [saved for saved in self._store.checkpoints() if saved.state not in self._lost_states]

    async def _delete_later(self, saved: Checkpoint) -> None:
        try:
            for path in (saved.state, saved.sampler):
                with suppress(UsageError):  # deleted already
                    await self._watch.call(lambda path=path: self._delete(path), "deleting a checkpoint", retry=True)
            self._store.remove_checkpoint(saved)
        except RlkitError as error:
            self._trackers.on_note(f"the checkpoint of step {saved.step} could not be deleted: {error}")

    async def _record_later(self, previous: asyncio.Task[None] | None, step: int, pending: PendingCheckpoint) -> None:
        if previous is not None:
            await previous
        try:
            self._record(step, *await self._watch.call(lambda: pending, "saving a checkpoint"))
        except RlkitError as error:
            self._has_missed = True
            self._trackers.on_note(f"the checkpoint of step {step} could not be saved: {error}")

    def _record(self, step: int, state: str, sampler: str) -> None:
        expires = None if self._ttl_s is None else self._now() + self._ttl_s
        saved = Checkpoint(step, state, sampler, expires)
        self._store.add_checkpoint(saved)
        self.newest = saved
        self._trackers.on_checkpoint(saved)
