"""The supply of groups: when tasks are played, and which groups a step trains on.

Invariant: every started group is assigned to exactly one step, or is still running when the run ends. At most as many
groups are started as the following steps can use. If groups are taken in the order of drawing (`in_order`), a group is
trained on at most `max_staleness` steps after the weights that it was started with, and the assignment of groups to
steps does not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial

from rlkit._util.priority_semaphore import SlotsClosed
from rlkit.algorithms.datums import PreparedGroup, StepGroup
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, RunFailed

# A run ends after this many consecutive unusable groups: those of two steps, at least four.
_UNUSABLE_STEPS = 2
_UNUSABLE_MIN = 4


@dataclass(frozen=True, slots=True)
class SupplyLimits:
    """Limits on the groups that are started before their step: i < groups · (steps_trained + max_staleness + 1)."""

    groups: int  # groups per step
    steps: int  # steps of the whole run; groups beyond the last step are not started
    max_staleness: int = 0  # steps from the weights that a group starts with to those that it trains; 0 is on-policy
    # A step takes the groups that were drawn first, so `max_staleness` is a bound. Otherwise a step takes the groups
    # that finish first, and a slow group may be staler.
    in_order: bool = True
    max_replaced_groups: int = 0  # groups without a training signal to replace per step; further ones are not replaced


@dataclass(eq=False)
class GroupSupply:
    """Running groups, and finished groups that are ready for a step."""

    limits: SupplyLimits
    _: KW_ONLY
    draw: Callable[[], Task | None]  # draws the next task; None if there are no more
    # Plays a task with the newest weights; `SlotsClosed` ends the supply.
    play: Callable[[Task], Coroutine[object, object, PreparedGroup]]
    trained_step: int = 0  # last trained step
    waiting: InitVar[Iterable[Task]] = ()  # tasks that were drawn earlier, to be played before new tasks
    is_exhausted: Callable[[], bool] = lambda: False  # returns whether the sources are known to have no more tasks

    def __post_init__(self, waiting: Iterable[Task]) -> None:
        self._complete_step = self.trained_step
        self._waiting = deque(waiting)
        self._running: dict[int, asyncio.Task[PreparedGroup]] = {}
        self._ready: dict[int, PreparedGroup] = {}
        self._unplayed = set[int]()  # draws without a slot: no task is started after them
        self._trained_groups = self._replaced_groups = 0  # of the present step
        self._unusable_groups = 0  # in a row
        self._has_drawn_all = False
        self._arrival = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_closed = False
        self.is_cut = False  # True if the last step did not get all of its groups, because the slots were closed

    @property
    def untrained_tokens(self) -> int:
        """Tokens of the groups that are in no step yet."""
        return sum(prepared.tokens for prepared in self._ready.values() if prepared.is_usable)

    @property
    def are_all_drawn(self) -> bool:
        """True if all tasks were drawn; some groups may still be running."""
        return not self._waiting and (self._has_drawn_all or self.is_exhausted())

    def advance(self, step: int) -> None:
        """Record that a step is trained, and start the tasks that its weights allow."""
        self.trained_step = step
        self._start()
        self._arrival.set()

    async def next_group(self) -> StepGroup | None:
        """Wait for the next group of the present step, and return it; None if the step gets no more groups.

        An error of `draw` or `play` is raised here, and RolloutsFailed after too many unusable groups in a row.
        """
        if self._trained_groups < self.limits.groups:
            if (prepared := await self._wait_for_group()) is not None:
                return self._take(prepared)
            self.is_cut = bool(self._unplayed)
        self._complete_step += 1
        self._trained_groups = self._replaced_groups = 0
        self._start()
        return None

    async def close(self) -> None:
        """Stop playing."""
        self._is_closed = True
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, prepared: PreparedGroup) -> StepGroup:
        is_replaced = not prepared.has_signal and self._replaced_groups < self.limits.max_replaced_groups
        is_trained = prepared.is_usable and not is_replaced
        self._trained_groups += is_trained
        self._replaced_groups += prepared.is_usable and is_replaced
        self._unusable_groups = 0 if prepared.is_usable else self._unusable_groups + 1
        if self._unusable_groups >= self._max_unusable:
            errors = (episode.error for episode in prepared.group.episodes if episode.error)
            count = f"{self._unusable_groups} groups in a row"
            raise RolloutsFailed(f"{count} had too many failed rollouts; the last: {next(errors)}")
        return StepGroup(prepared, is_trained)

    async def _wait_for_group(self) -> PreparedGroup | None:
        self._start()
        while True:
            if self._failure is not None:
                raise self._failure
            draw = min(self._ready, default=None)
            earlier = (*self._running, *self._unplayed)
            if draw is not None and not (self.limits.in_order and min(earlier, default=draw) < draw):
                return self._ready.pop(draw)
            if not self._running and (self._has_drawn_all or self._unplayed):
                return None
            self._arrival.clear()
            await self._arrival.wait()

    def _start(self) -> None:
        """Start the tasks that the following steps can use; `next_group` raises the exception."""
        limits = self.limits
        positions = limits.groups * min(self.trained_step + limits.max_staleness + 1, limits.steps)
        try:
            while self._may_start() and self._count_taken_positions() < positions:
                task = self._waiting.popleft() if self._waiting else None if self._has_drawn_all else self.draw()
                if task is None:
                    self._has_drawn_all = True
                    return
                playing = asyncio.create_task(self.play(task), name=f"group {task.draw}")
                self._running[task.draw] = playing
                playing.add_done_callback(partial(self._receive, task.draw))
        except Exception as error:  # a task source may be the user's code
            self._failure = self._failure or error

    def _may_start(self) -> bool:
        """Return whether the supply is open; False if unusable groups that are ready will end the run."""
        unusable = self._unusable_groups + sum(not prepared.is_usable for prepared in self._ready.values())
        has_ended = self._is_closed or self._unplayed or self._failure is not None
        return not has_ended and unusable < self._max_unusable

    def _count_taken_positions(self) -> int:
        """Count the positions in steps that are taken, including the positions of running groups."""
        usable = [prepared for prepared in self._ready.values() if prepared.is_usable]
        without_signal = sum(not prepared.has_signal for prepared in usable)
        replaceable = self.limits.max_replaced_groups - self._replaced_groups
        ready = len(usable) - min(without_signal, replaceable)
        return self._complete_step * self.limits.groups + self._trained_groups + ready + len(self._running)

    @property
    def _max_unusable(self) -> int:
        return max(_UNUSABLE_STEPS * self.limits.groups, _UNUSABLE_MIN)

    def _receive(self, draw: int, playing: asyncio.Task[PreparedGroup]) -> None:
        del self._running[draw]
        if playing.cancelled():
            if not self._is_closed:
                message = "a running group was cancelled: an environment cancels asyncio tasks that it did not start"
                self._failure = self._failure or RunFailed(message)
        elif isinstance(error := playing.exception(), SlotsClosed):
            self._unplayed.add(draw)
        elif error is not None:
            self._failure = self._failure or error
        else:
            self._ready[draw] = playing.result()
            self._start()
        self._arrival.set()
