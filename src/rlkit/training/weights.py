"""The weights of a run: made step by step, and made again from a checkpoint when the service fails.

Invariant: steps are made of the same groups, in the same order, however often they are made; the learner never holds
more than its step and the substeps of those in the making.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlkit._util.threads import in_thread
from rlkit.algorithms.records import Played, Taken
from rlkit.errors import ServiceError
from rlkit.metrics.metrics import batch_metrics, group_metrics, update_metrics
from rlkit.policy import Sampler
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler
from rlkit.training.parts import Parts
from rlkit.training.reporter import Reporter
from rlkit.training.step import StepUpdate

_RECOVERIES_MAX = 20

type Report = Callable[[int, Mapping[str, float], Sampler], None]
"""Takes a step, its numbers and a sampler of its weights."""


@dataclass(slots=True, eq=False)
class Making:
    """A step in the making: its groups are gathered, or the service works on it.

    Args:
        step: its number.
        update: its requests.
        taken: its groups so far.
        saving: the checkpoint of its weights, if one was asked for.
        complete_s: when the last of them was there.
    """

    step: int
    update: StepUpdate
    taken: list[Taken] = field(default_factory=list[Taken])
    saving: asyncio.Future[tuple[str, str]] | None = None
    complete_s: float = 0.0


class Weights:
    """The learner, and the steps that it is asked for.

    Args:
        parts: what it works with.
        learner: has the weights of `step`.
        step: the last one that the learner has taken whole.
        reporter: knows which steps are told already.
        report: tells one that is made again and was not told.
    """

    def __init__(self, parts: Parts, learner: Learner, step: int, *, reporter: Reporter, report: Report) -> None:
        self._parts = parts
        self._learner = learner
        self._reporter = reporter
        self._report = report
        self._making: deque[Making] = deque()
        self._recovering = False
        self.step = step
        self.newest: PatientSampler | None = None
        """Samples from the newest weights that may be sampled from."""

    @property
    def untrained(self) -> int:
        """Tokens of the steps in the making of which the service has not yet computed a gradient."""
        return sum(making.update.untrained for making in self._making)

    @property
    def ahead(self) -> bool:
        """Whether the learner may be further than its step."""
        return any(making.update.stepped for making in self._making)

    def begin(self, step: int) -> Making:
        """A step to give groups to; steps are begun in their order."""
        learner = None if self._recovering else self._learner
        self._making.append(Making(step, StepUpdate(learner, self._parts.recipe, version=step)))
        return self._making[-1]

    def finish(self, making: Making) -> None:
        """Its groups are there: ask for its weights, and for a checkpoint of them right behind, if one is due.

        Raises:
            EnvironmentFault: the advantage estimator failed.
        """
        making.update.finish()
        if not self._recovering:
            making.saving = self._asked_to_save(making.step)

    async def take(self, making: Making) -> tuple[PatientSampler, dict[str, float]]:
        """Wait for the weights of the first step in the making; what samples from them, and the step's numbers.

        Raises:
            ServiceError: the service failed, again and again or for too long.
        """
        after = making.step - 1
        taken = await self._insist(
            lambda: self._made(making.step, making.taken, making.update, self.newest), after=after
        )
        self._making.popleft()
        self.step = making.step  # they have moved, whether or not that can be written down
        return taken

    async def retake(self, upto: int) -> None:
        """Take the next step again, but none after `upto`, from what is on the disk; save it if that is due.

        Raises:
            ServiceError: the service failed, again and again or for too long.
            UsageError: its groups are not on the disk any more.
        """
        step = min(self.step + 1, upto)
        repeated = step > self.step
        self.newest = await self._insist(lambda: self._repeat(step, self.newest), after=step)
        saver = self._parts.saver
        if repeated and not saver.has(step) and (saving := self._asked_to_save(step)) is not None:
            saver.record(step, saving)  # or an interruption would cost all of them once more

    async def hand_over(self) -> PatientSampler:
        """A sampler of the learner's weights.

        Raises:
            ServiceError: the service failed.
        """
        learner, step, watch = self._learner, self.step, self._parts.watch
        sampler = await watch.call(lambda: learner.sampler(step), "handing over weights", retry=True)
        return PatientSampler(sampler, watch, step)

    async def save(self) -> None:
        """Save the weights of the last whole step; what was begun after it is given up.

        Raises:
            RlkitError: the service failed after retries, or refused.
            RunFailed: the checkpoint cannot be written down.
        """
        if self.ahead:  # by some substeps of a step that does not come about
            self.withdraw()
            self._making.clear()
            await self._recover(
                self.step, reports=False
            )  # what cannot be written down must not keep it from being saved
        await self._parts.saver.save(self._learner, self.step)

    def withdraw(self) -> None:
        """Ask for nothing more of the steps in the making, and wait for nothing that they asked for.

        The learner is of no use after that: what it is asked for next may wait for the turn of what was given up.
        """
        for making in self._making:
            making.update.withdraw()
            if making.saving is not None:
                making.saving.cancel()
                making.saving = None

    async def _insist[T](self, train: Callable[[], Awaitable[T]], *, after: int) -> T:
        """Train from the weights of step `after` on; when the service fails, make them again, and try once more."""
        for failures in range(_RECOVERIES_MAX + 1):
            try:
                if failures:
                    self._parts.trackers.note(
                        f"going back to the last checkpoint, to go on after step {after} from there"
                    )
                    await self._recover(after)
                return await train()
            except ServiceError as error:
                if failures == _RECOVERIES_MAX or self._parts.watch.gone:
                    raise
                self._parts.trackers.note(str(error))
        raise AssertionError("the last failure is raised")

    async def _recover(self, upto: int, *, reports: bool = True) -> None:
        """Make the weights of a step again from a checkpoint, and ask anew for the steps behind it."""
        self._recovering = True
        self.withdraw()
        known = self._reporter.known_through(upto)
        self._learner, self.step = await self._parts.watch.call(
            lambda: self._parts.restore(known), "loading weights", retry=True
        )
        self.newest = await self._repeat(upto, None, reports=reports)  # until then rollouts go on with what they have
        self._recovering = False
        for making in self._making:
            making.update.submit_again(self._learner)
            if making.update.finished:
                making.saving = self._asked_to_save(making.step)

    async def _repeat(self, upto: int, newest: PatientSampler | None, *, reports: bool = True) -> PatientSampler:
        """Take the steps up to `upto` again, from the learner's weights, which `newest` has if it is there."""
        parts = self._parts
        for step in range(self.step + 1, upto + 1):
            parts.trackers.note(f"taking step {step} again, without sampling")
            update, taken = StepUpdate(self._learner, parts.recipe, version=step), list[Taken]()
            try:
                for kept in await parts.store.groups(step):
                    usable = int(kept.group.valid.sum()) >= parts.min_valid[kept.group.env]
                    taken.append(Taken(Played(await parts.preparation.prepare(kept.group), usable), kept.counts))
                    update.add(taken[-1].played.prepared, counts=kept.counts)
                update.finish()
                newest, metrics = await self._made(step, taken, update, newest)
            finally:
                update.withdraw()
            self.step = step
            if reports and not self._reporter.knows(step):
                self._report(step, metrics | dict(parts.of_tasks.get(step, {})), newest)
        return newest or await self.hand_over()

    async def _made(
        self, step: int, taken: Sequence[Taken], update: StepUpdate, before: PatientSampler | None
    ) -> tuple[PatientSampler, dict[str, float]]:
        """Wait for the weights of a step; without anything to learn they are those of the step before."""
        groups = [one.played.prepared.group for one in taken]
        # Of a million tokens, either would hold the event loop.
        of_groups = await in_thread(lambda: group_metrics(groups, prefix="env"))
        metrics = of_groups | await in_thread(lambda: batch_metrics(taken, version=step - 1))
        watch = self._parts.watch
        result = await update.result(watch)
        if result is None:
            self._parts.trackers.note(f"step {step}: every group's rewards are equal, so there is nothing to learn")
            same = before or await self.hand_over()
            return PatientSampler(same.of, watch, step), {**metrics, "optim/skipped": 1.0}
        sampler, done = result
        agreement = await in_thread(update_metrics, done)
        return PatientSampler(sampler, watch, step), {**metrics, "optim/skipped": 0.0, **agreement}

    def _asked_to_save(self, step: int) -> asyncio.Future[tuple[str, str]] | None:
        evaluated = self._parts.evaluation.due(step, last=self._parts.steps)
        saving = self._parts.saver.ask_if_due(self._learner, step, evaluated=evaluated)
        return None if saving is None else asyncio.ensure_future(saving)
