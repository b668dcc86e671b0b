"""Checkpoints of a run: requested right after a step, recorded in the background, deleted when superfluous.

Invariant: checkpoints are recorded in the order of their steps, each once the service has saved it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field

from rlkit.config.schema.operation import CheckpointConfig
from rlkit.errors import RlkitError, UsageError
from rlkit.service import Learner
from rlkit.service.watch import ServiceWatch
from rlkit.store import RunStore, checkpoints
from rlkit.trackers import Broadcast
from rlkit.training.model_selection import ModelSelection
from rlkit.types import Checkpoint

DAY_S = 24 * 3600

type PendingCheckpoint = asyncio.Future[tuple[str, str]]
"""A requested checkpoint; gives the `tinker://` paths of the training state and of the sampler's weights."""


@dataclass(slots=True, eq=False)
class CheckpointSaver:
    """The checkpoints of a run."""

    config: CheckpointConfig
    store: RunStore
    trackers: Broadcast
    watch: ServiceWatch
    _: KW_ONLY
    selection: ModelSelection
    delete: Callable[[str], Awaitable[None]]  # deletes the weights at a `tinker://` path
    now: Callable[[], float] = time.time  # returns seconds since the epoch
    newest: Checkpoint | None = None  # newest checkpoint of this training, without those that the service lost
    _requests: Counter[int] = field(default_factory=Counter[int])
    _lost_states: set[str] = field(default_factory=set[str])
    _last_save_failed: bool = False
    _recording: asyncio.Task[None] | None = None
    _settled_step: int = 0  # all saves up to this step are recorded, or have failed
    _settling: asyncio.Event = field(default_factory=asyncio.Event)
    _deletions: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])

    def resume_from(self, step: int, *, newest_tried: int) -> None:
        """Record that the weights of `step` were loaded, and that later checkpoints up to `newest_tried` are lost."""
        recorded = checkpoints(self.store.directory)
        self._lost_states |= {saved.state for saved in recorded if step < saved.step <= newest_tried}
        self.newest = next((saved for saved in reversed(self.usable) if saved.step == step), None)
        self._settled_step = max(self._settled_step, step)

    def is_recorded(self, step: int) -> bool:
        """Return whether a usable checkpoint of a step is recorded."""
        return any(saved.step == step for saved in self.usable)

    def request(self, learner: Learner, step: int) -> PendingCheckpoint:
        """Request a checkpoint of the learner's weights after its earlier requests."""
        self._requests[step] += 1  # a failed request may have used its name
        suffix = f"-{self._requests[step]}" if self._requests[step] > 1 else ""
        return asyncio.ensure_future(learner.save(f"step-{step:06d}{suffix}", ttl_s=self._ttl_s))

    def request_if_due(self, learner: Learner, step: int, *, is_evaluated: bool) -> PendingCheckpoint | None:
        """Request a checkpoint if `checkpoint.every` says so, or if the last due checkpoint failed.

        Weights that are evaluated are saved, too, if the run selects the best weights.
        """
        every = self.config.every
        is_due = bool(every) and (step % every == 0 or self._last_save_failed)
        is_candidate = is_evaluated and self.selection.criterion.metric is not None
        return self.request(learner, step) if is_due or is_candidate else None

    def record(self, step: int, pending: PendingCheckpoint) -> None:
        """Record a requested checkpoint once it is saved; a failure is only reported."""
        self._last_save_failed = False
        self._recording = asyncio.create_task(self._record_later(self._recording, step, pending))

    async def find_saved(self, step: int) -> Checkpoint | None:
        """Wait for the due checkpoint of a step; return it, or the newest before it if its save failed; else None."""
        while step > self._settled_step and not self.is_recorded(step):
            self._settling.clear()
            await self._settling.wait()
        oldest = step if self.config.keep_last else 1  # it may be deleted
        candidates = [saved for saved in self.usable if oldest <= saved.step <= step]
        return max(candidates, key=lambda saved: saved.step, default=None)

    async def is_saved(self, step: int) -> bool:
        """Wait for pending records, and return whether the newest checkpoint is from this step."""
        if self._recording is not None:
            await self._recording
        return self.newest is not None and self.newest.step == step

    async def save(self, learner: Learner, step: int) -> None:
        """Save the weights of a step and record the checkpoint; RlkitError if the service or the disk fails."""
        paths = await self.watch.call(lambda: self.request(learner, step), "saving a checkpoint", retry=True)
        self._record(step, *paths)

    def delete_superfluous(self, *, last_step: int) -> None:
        """Delete superfluous checkpoints up to the last reported step in the background; failures are only reported."""
        for saved in self.selection.superfluous(self.usable, last_step=last_step):
            if saved.state not in self._deletions:
                self._deletions[saved.state] = asyncio.create_task(self._delete_later(saved))

    async def wait_for_deletions(self) -> None:
        """Wait until the deletions are done."""
        await asyncio.gather(*self._deletions.values())

    def close(self) -> None:
        """Cancel pending records and deletions."""
        for task in (self._recording, *self._deletions.values()):
            if task is not None:
                task.cancel()

    @property
    def usable(self) -> list[Checkpoint]:
        """Recorded checkpoints that the service is not known to have lost."""
        return [saved for saved in checkpoints(self.store.directory) if saved.state not in self._lost_states]

    async def _delete_later(self, saved: Checkpoint) -> None:
        try:
            for path in (saved.state, saved.sampler):
                with suppress(UsageError):  # already deleted
                    await self.watch.call(lambda path=path: self.delete(path), "deleting a checkpoint", retry=True)
            self.store.remove_checkpoint(saved)
        except RlkitError as error:
            self.trackers.on_note(f"the checkpoint of step {saved.step} could not be deleted: {error}")

    async def _record_later(self, previous: asyncio.Task[None] | None, step: int, pending: PendingCheckpoint) -> None:
        if previous is not None:
            await previous
        try:
            self._record(step, *await self.watch.call(lambda: pending, "saving a checkpoint"))
        except RlkitError as error:
            self._last_save_failed = True
            self.trackers.on_note(f"the checkpoint of step {step} could not be saved: {error}")
        self._settled_step = max(self._settled_step, step)
        self._settling.set()

    def _record(self, step: int, state: str, sampler: str) -> None:
        expires = None if self._ttl_s is None else self.now() + self._ttl_s
        saved = Checkpoint(step, state, sampler, expires)
        self.store.add_checkpoint(saved)
        self.newest = saved
        self.trackers.on_checkpoint(saved)

    @property
    def _ttl_s(self) -> int | None:
        return None if self.config.ttl_days is None else round(self.config.ttl_days * DAY_S)
