"""What is played when, and which groups a step trains on.

Invariant: every group that was started is handed to exactly one step, or is still in play when the run ends; what is
started is never more than the steps ahead can use. Where steps take groups in the order in which they were drawn, a
group is trained on at most `max_staleness` steps after the weights that it was started with, and which groups a step
gets does not depend on timing.

The three schedules are one: they differ in how far ahead of the trained weights tasks may be started, and in the order
in which a step takes what is ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial

from rlkit.algorithms.datums import PlayedGroup, StepGroup
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, RunFailed

# So many groups in a row that are of no use end a run: what is wrong then is not the luck of a rollout.
_UNUSABLE_STEPS = 2
_UNUSABLE_MIN = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is played ahead.

    Args:
        groups: that a step trains on.
        steps: of the run in all; nothing is started that no step would use.
        max_staleness: steps between the weights that a group starts with and those that it trains; 0 is on-policy.
        in_order: a step takes the groups that were drawn first, which makes `max_staleness` a bound. Otherwise it takes
            those that were finished first: as many are kept in play, but one that takes long is trained on when it is
            done.
        replace: a group that teaches nothing does not count, and another one is played for it.
        replaced_max: groups that are replaced in one step; past that, a group that teaches nothing counts.
    """

    groups: int
    steps: int
    max_staleness: int = 0
    in_order: bool = True
    replace: bool = False
    replaced_max: int = 0


class Supply:
    """Keeps groups in play, and hands each step its own.

    Args:
        pace: how much is played ahead.
        draw: gives the next task; None when there are no more.
        play: plays it, with the newest weights.
        done: steps that are trained already.
        waiting: tasks that were drawn before, to be played before any new one.
        dry: whether it is known that there are no more tasks to draw.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        draw: Callable[[], Task | None],
        play: Callable[[Task], Coroutine[object, object, PlayedGroup]],
        done: int = 0,
        waiting: Iterable[Task] = (),
        dry: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pace = pace
        self._draw = draw
        self._play = play
        self._trained = self._handed_out = done
        self._waiting = deque(waiting)
        self._dry = dry
        self._in_play: dict[int, asyncio.Task[PlayedGroup]] = {}
        self._ready: dict[int, PlayedGroup] = {}
        self._taken = 0  # groups of the present step that count
        self._replaced = 0
        self._unusable = 0
        self._exhausted = False
        self._arrival = asyncio.Event()
        self._failure: BaseException | None = None
        self._ended = self._closed = self._cut = False

    @property
    def untrained(self) -> int:
        """Tokens of the groups that no step has got yet."""
        return sum(played.prepared.tokens for played in self._ready.values() if played.is_usable)

    @property
    def exhausted(self) -> bool:
        """Whether every task is drawn, though some of the groups may still be in play."""
        return not self._waiting and (self._exhausted or self._dry())

    def trained(self, step: int) -> None:
        """Say that the weights of `step` are the newest; starts what may be started now."""
        self._trained = step
        self._start()
        self._arrival.set()

    async def next(self) -> StepGroup | None:
        """One more group of the present step, as soon as there is one; None when it has all that it gets.

        Raises:
            RolloutsFailed: too many groups in a row were of no use.
            RunFailed: somebody else cancelled a group.
            Exception: what playing raised.
        """
        if self._taken < self._pace.groups:
            played = await self._played()
            if played is not None:
                return self._take(played)
            self._cut = self._ended
        self._handed_out += 1
        self._taken = self._replaced = 0
        self._start()
        return None

    @property
    def is_cut(self) -> bool:
        """Whether `end` kept the step that asked last from getting all of its groups."""
        return self._cut

    def end(self) -> None:
        """Give no more groups: the present step stays without the rest of its own."""
        self._ended = True
        self._arrival.set()

    async def close(self) -> None:
        """Stop playing."""
        self._closed = True
        tasks = list(self._in_play.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, played: PlayedGroup) -> StepGroup:
        replaced = self._pace.replace and not played.has_signal and self._replaced < self._pace.replaced_max
        counts = played.is_usable and not replaced
        self._taken += counts
        self._replaced += played.is_usable and replaced
        self._unusable = 0 if played.is_usable else self._unusable + 1
        if self._unusable >= self._unusable_max:
            errors = (episode.error for episode in played.prepared.group.episodes if episode.error)
            raise RolloutsFailed(
                f"{self._unusable} groups in a row had too many failed rollouts; the last: {next(errors)}"
            )
        return StepGroup(played, counts)

    async def _played(self) -> PlayedGroup | None:
        self._start()
        while True:
            if self._failure is not None:
                raise self._failure
            draw = min(self._ready, default=None)
            if draw is not None and not (self._pace.in_order and min(self._in_play, default=draw) < draw):
                return self._ready.pop(draw)
            if self._ended or (not self._in_play and self._exhausted):
                return None
            self._arrival.clear()
            await self._arrival.wait()

    def _start(self) -> None:
        """Start tasks while there are steps that could use them; what fails is told to whoever waits for groups."""
        try:
            self._start_tasks()
        except Exception as error:  # a task source may be the user's own
            self._failure = self._failure or error

    def _start_tasks(self) -> None:
        most = self._pace.groups * min(self._trained + self._pace.max_staleness + 1, self._pace.steps)
        while self._failure is None and not self._closed and self._positions() < most and not self._hopeless():
            task = self._waiting.popleft() if self._waiting else None if self._exhausted else self._draw()
            if task is None:
                self._exhausted = True
                return
            playing = asyncio.create_task(self._play(task), name=f"group {task.draw}")
            self._in_play[task.draw] = playing
            playing.add_done_callback(partial(self._arrived, task.draw))

    def _positions(self) -> int:
        """Places in steps that are taken up, those of groups in play included."""
        usable = [played for played in self._ready.values() if played.is_usable]
        idle = sum(not played.has_signal for played in usable)
        # So many of them are replaced for sure; the others take up the places of groups that teach.
        replaced = min(idle, self._pace.replaced_max - self._replaced) if self._pace.replace else 0
        return self._handed_out * self._pace.groups + self._taken + len(usable) - replaced + len(self._in_play)

    def _hopeless(self) -> bool:
        """Whether what is ready will end the run, unless something better comes out of play."""
        return self._unusable + sum(not played.is_usable for played in self._ready.values()) >= self._unusable_max

    @property
    def _unusable_max(self) -> int:
        return max(_UNUSABLE_STEPS * self._pace.groups, _UNUSABLE_MIN)

    def _arrived(self, draw: int, playing: asyncio.Task[PlayedGroup]) -> None:
        del self._in_play[draw]
        if playing.cancelled():
            if not self._closed:  # nobody else would ever bring it
                told = "a group was cancelled in the middle of play: an environment cancels tasks that are not its own"
                self._failure = self._failure or RunFailed(told)
        elif (failure := playing.exception()) is not None:
            self._failure = self._failure or failure
        else:
            self._ready[draw] = playing.result()
            self._start()
        self._arrival.set()
