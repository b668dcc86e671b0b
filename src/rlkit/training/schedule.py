"""The supply of groups: which tasks are played when, and which groups a step trains on.

Invariant: every group that was started is handed to exactly one step, or is still in play when the run ends; what is
started is never more than the steps ahead can use. Where steps take groups in the order in which they were drawn, a
group is trained on at most `max_staleness` steps after the weights that it was started with, and which groups a step
gets does not depend on timing.

The schedules differ in how far ahead of the trained weights tasks may be started, and in the order in which a step
takes the groups that are ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial

from rlkit._util.priority_semaphore import SlotsClosed
from rlkit.algorithms.datums import PlayedGroup, StepGroup
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, RunFailed

# So many unusable groups in a row end a run: the cause is not the luck of a rollout.
_UNUSABLE_STEPS = 2
_UNUSABLE_MIN = 4


@dataclass(frozen=True, slots=True)
class SupplyLimits:
    """Limits on what is played ahead of the trained weights.

    Args:
        groups: groups of a step.
        steps: steps of the whole run; nothing is started that no step would use.
        max_staleness: steps between the weights that a group starts with and those that it trains; 0 is on-policy.
        in_order: a step takes the groups that were drawn first, which makes `max_staleness` a bound. Otherwise it takes
            those that were finished first: as many are kept in play, but one that takes long is trained on when it is
            done.
        replace: play another group for one that teaches nothing.
        max_replaced_groups: groups to replace in one step; past that, a group that teaches nothing counts.
    """

    groups: int
    steps: int
    max_staleness: int = 0
    in_order: bool = True
    replace: bool = False
    max_replaced_groups: int = 0


class GroupSupply:
    """Groups in play, and those that are ready for a step.

    Args:
        limits: limits on what is played ahead.
        draw: draws the next task; None when there are no more.
        play: plays a task with the newest weights; `SlotsClosed` ends the supply.
        trained_step: last step that is trained already.
        waiting: tasks that were drawn before, to be played before any new one.
        is_exhausted: returns whether the sources are known to have no more tasks.
    """

    def __init__(
        self,
        limits: SupplyLimits,
        *,
        draw: Callable[[], Task | None],
        play: Callable[[Task], Coroutine[object, object, PlayedGroup]],
        trained_step: int = 0,
        waiting: Iterable[Task] = (),
        is_exhausted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._limits = limits
        self._draw = draw
        self._play = play
        self._trained_step = self._complete_step = trained_step
        self._waiting = deque(waiting)
        self._is_exhausted = is_exhausted
        self._in_play: dict[int, asyncio.Task[PlayedGroup]] = {}
        self._ready: dict[int, PlayedGroup] = {}
        self._unplayed = set[int]()  # draws that got no slots: no task is started after that
        self._trained_groups = 0  # of the present step
        self._replaced_groups = 0
        self._unusable_groups = 0  # in a row
        self._has_drawn_all = False
        self._arrival = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_closed = self._is_cut = False

    @property
    def untrained_tokens(self) -> int:
        """Tokens of the groups that are in no step yet."""
        return sum(played.prepared.tokens for played in self._ready.values() if played.is_usable)

    @property
    def are_all_drawn(self) -> bool:
        """True where there is no further task, though some groups may still be in play."""
        return not self._waiting and (self._has_drawn_all or self._is_exhausted())

    @property
    def is_cut(self) -> bool:
        """True if the step that asked last did not get all of its groups since there were no more slots."""
        return self._is_cut

    def advance(self, step: int) -> None:
        """Take note that the weights of a step are the newest, and start the tasks that may be played with them."""
        self._trained_step = step
        self._start()
        self._arrival.set()

    async def next_group(self) -> StepGroup | None:
        """Return one more group of the present step, as soon as there is one; None when it has all that it gets.

        Raises:
            RolloutsFailed: too many groups in a row were unusable.
            RunFailed: an environment cancelled a group.
            Exception: playing failed.
        """
        if self._trained_groups < self._limits.groups:
            played = await self._next_played()
            if played is not None:
                return self._take(played)
            self._is_cut = bool(self._unplayed)
        self._complete_step += 1
        self._trained_groups = self._replaced_groups = 0
        self._start()
        return None

    async def close(self) -> None:
        """Stop playing."""
        self._is_closed = True
        tasks = list(self._in_play.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, played: PlayedGroup) -> StepGroup:
        is_replaced = (
            self._limits.replace and not played.has_signal and self._replaced_groups < self._limits.max_replaced_groups
        )
        is_trained = played.is_usable and not is_replaced
        self._trained_groups += is_trained
        self._replaced_groups += played.is_usable and is_replaced
        self._unusable_groups = 0 if played.is_usable else self._unusable_groups + 1
        if self._unusable_groups >= self._max_unusable:
            errors = (episode.error for episode in played.prepared.group.episodes if episode.error)
            raise RolloutsFailed(
                f"{self._unusable_groups} groups in a row had too many failed rollouts; the last: {next(errors)}"
            )
        return StepGroup(played, is_trained)

    async def _next_played(self) -> PlayedGroup | None:
        self._start()
        while True:
            if self._failure is not None:
                raise self._failure
            draw = min(self._ready, default=None)
            earlier = (*self._in_play, *self._unplayed)
            if draw is not None and not (self._limits.in_order and min(earlier, default=draw) < draw):
                return self._ready.pop(draw)
            if not self._in_play and (self._has_drawn_all or self._unplayed):
                return None
            self._arrival.clear()
            await self._arrival.wait()

    def _start(self) -> None:
        """Start tasks while there are steps that could use them; whoever waits for groups gets the exception."""
        try:
            self._start_tasks()
        except Exception as error:  # a task source may be the user's own
            self._failure = self._failure or error

    def _start_tasks(self) -> None:
        limits = self._limits
        positions = limits.groups * min(self._trained_step + limits.max_staleness + 1, limits.steps)
        while self._may_start() and self._taken_positions() < positions:
            task = self._waiting.popleft() if self._waiting else None if self._has_drawn_all else self._draw()
            if task is None:
                self._has_drawn_all = True
                return
            playing = asyncio.create_task(self._play(task), name=f"group {task.draw}")
            self._in_play[task.draw] = playing
            playing.add_done_callback(partial(self._receive, task.draw))

    def _may_start(self) -> bool:
        """Return whether a new task may be of use: not if groups that are ready will end the run."""
        unusable = self._unusable_groups + sum(not played.is_usable for played in self._ready.values())
        has_ended = self._is_closed or self._unplayed or self._failure is not None
        return not has_ended and unusable < self._max_unusable

    def _taken_positions(self) -> int:
        """Return the number of places in steps that are taken, those of groups in play included."""
        usable = [played for played in self._ready.values() if played.is_usable]
        useless = sum(not played.has_signal for played in usable)
        # So many of them are replaced for sure; the others take the places of groups that teach.
        replaced = min(useless, self._limits.max_replaced_groups - self._replaced_groups) if self._limits.replace else 0
        ready = len(usable) - replaced
        return self._complete_step * self._limits.groups + self._trained_groups + ready + len(self._in_play)

    @property
    def _max_unusable(self) -> int:
        return max(_UNUSABLE_STEPS * self._limits.groups, _UNUSABLE_MIN)

    def _receive(self, draw: int, playing: asyncio.Task[PlayedGroup]) -> None:
        del self._in_play[draw]
        if playing.cancelled():
            if not self._is_closed:  # nobody else would ever bring it
                message = "a group was cancelled while it was played: an environment cancels tasks that are not its own"
                self._failure = self._failure or RunFailed(message)
        elif isinstance(error := playing.exception(), SlotsClosed):
            self._unplayed.add(draw)
        elif error is not None:
            self._failure = self._failure or error
        else:
            self._ready[draw] = playing.result()
            self._start()
        self._arrival.set()
