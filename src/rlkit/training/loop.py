"""The training loop: one loop for every schedule, from tasks to better weights.

Invariant: what a step was made of is on the disk before the weights that it made are sampled from; whatever ends the
run, the directory says how it ended and can be resumed from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from rlkit._util.threads import in_thread
from rlkit.errors import RlkitError, RunFailed
from rlkit.evaluation.evaluate import eval_metrics
from rlkit.metrics.metrics import throughput
from rlkit.policy import Sampler
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler
from rlkit.store.history import Member
from rlkit.trackers import Phase, Progress, RunResult
from rlkit.training.parts import Parts
from rlkit.training.reporter import Reporter
from rlkit.training.weights import Making, Weights

_LAST_SAVE_S = 120.0


class Trainer(Protocol):
    """Makes a model better.

    ::

        result = await rlkit.RLTrainer(config, envs=tasks).train()
        print(result.metrics["env/all/reward/mean"])
    """

    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop."""
        ...


class Loop:
    """The loop itself: one task gathers the groups of each step and asks for its weights, another waits for them.

    A step whose groups are there is submitted behind the one that the service still works on, so that the service does
    not wait between steps; its weights become the newest, and are recorded, in the order of the steps.

    Args:
        parts: what it works with.
        step: the last one whose groups are known; its weights are made again.
        weights: what `Parts.restore` gives for that step.
    """

    def __init__(self, parts: Parts, *, step: int, weights: tuple[Learner, int]) -> None:
        self._parts = parts
        self._first = self._step = step
        self._reporter = Reporter(parts.store, parts.trackers, reported=self._reported)
        self._weights = Weights(parts, *weights, reporter=self._reporter, report=self._report)
        self._started = time.monotonic()
        self._phase: Phase = "preparing"
        self._complete: asyncio.Queue[Making | None] = asyncio.Queue()
        self._reached = step  # the last step that got a group
        self._gathered = False
        self._gathering = asyncio.Event()  # one of the two has changed
        self._used_up = ""
        self._enough = parts.selection.enough

    @property
    def newest(self) -> PatientSampler:
        """The newest weights.

        Raises:
            RuntimeError: the run has not begun.
        """
        if self._weights.newest is None:
            raise RuntimeError("there are no weights yet")
        return self._weights.newest

    async def run(self) -> RunResult:
        """Train until the steps are done, the tasks run out or someone asks to stop, and save what was learned.

        Raises:
            RunFailed: too many rollouts failed, or the disk is full.
            EnvironmentFault: the advantage estimator failed.
            ServiceError: the service failed after retries.
        """
        parts = self._parts
        limited = asyncio.create_task(self._end_with_the_budget())
        try:
            try:
                await self._begin()
                await self._train()
            except Exception:
                await parts.supply.close()  # nothing more is played, and paid for, while the weights are saved
                # What ended the run matters more than that it cannot be saved.
                with suppress(RlkitError, OSError, TimeoutError):
                    if self._first < self._step == self._weights.step:
                        async with asyncio.timeout(_LAST_SAVE_S):
                            await self._save()
                raise
            await parts.supply.close()
            await self._save()
            await self._reporter.drain()
            parts.saver.tidy_up(reported=self._step)
            await parts.saver.settle()
            await parts.store.settle()
        finally:
            limited.cancel()
            self._weights.withdraw()
            with suppress(RlkitError):  # what is known of a step that did not come about is at most missing
                parts.store.keep_used(parts.budget.state_dict())
            await parts.supply.close()
            await self._reporter.close()
            parts.saver.close()
        self._phase = "done"
        metric = parts.selection.aim.metric
        if metric is not None and parts.selection.best is None and self._step:
            parts.trackers.note(f"best.metric: no step had a {metric}")
        cut = "budget" if self._used_up else "interrupted" if parts.stop.requested else "completed"
        return RunResult(
            name=parts.store.directory.name,
            directory=parts.store.directory,
            status=cut if self._step < parts.steps else "completed",
            steps=self._step,
            metrics=self._reporter.last,
            checkpoint=parts.saver.newest,
            reason=self._used_up or self._enough or "",
            best=parts.selection.best_of(parts.saver.usable),
            spent=parts.budget.spent,
        )

    @property
    def untrained(self) -> int:
        """Tokens of what was played and will be trained on."""
        return self._parts.supply.untrained + self._weights.untrained

    def progress(self) -> Progress:
        """Where the run stands; may be called from any thread."""
        parts = self._parts
        counts = (parts.evaluation.player if self._phase == "evaluating" else parts.player).counts
        return Progress(
            step=self._step,
            steps=parts.steps,
            phase=self._phase,
            queued=counts.queued,
            live=counts.live,
            done=counts.done,
            failed=counts.failed,
            tokens=parts.player.counts.tokens + parts.evaluation.player.counts.tokens,
            seconds=time.monotonic() - self._started,
            first_step=self._first,
            work=str(parts.activity),
        )

    async def _begin(self) -> None:
        """Restore the weights, and take the steps again that were taken since."""
        parts, weights = self._parts, self._weights
        parts.saver.go_on(weights.step, tried=parts.store.measured(self._step))
        if weights.step == 0 and parts.evaluation.due(0, last=parts.steps):
            weights.newest = await weights.hand_over()
            if parts.store.first_measured is None:  # an evaluation that is new to the run begins where it is
                self._report(0, {}, weights.newest)
        while weights.newest is None or weights.step < self._step:
            await weights.retake(self._step)
            if parts.stop.requested:  # the steps after this one are on the disk, to be taken another time
                self._step = weights.step
        parts.supply.trained(self._step)

    async def _end_with_the_budget(self) -> None:
        """Once it is used up: what was being played is finished and kept, nothing more is begun, and the run ends."""
        parts = self._parts
        await parts.slots.left()
        self._used_up = str(parts.budget.reached)
        parts.trackers.note(f"{self._used_up}; ending the run")
        self._reporter.give_up()
        parts.supply.end()

    async def _train(self) -> None:
        """Finish the steps as they become complete."""
        gathering = asyncio.create_task(self._gather())
        clock = asyncio.get_running_loop().time
        ended_s, slots = clock(), self._parts.slots
        busy_s = slots.busy_s
        try:
            while True:
                self._phase = "sampling"
                making = await self._complete.get()
                if making is None:
                    await gathering  # says why there are no more
                    return
                self._phase = "training"
                metrics = await self._advance(making)
                now_s, held_s = clock(), slots.busy_s
                metrics |= {
                    "time/sample_s": max(making.complete_s - ended_s, 0.0),
                    "time/train_s": now_s - max(making.complete_s, ended_s),
                    "time/step_s": now_s - ended_s,
                    **throughput(metrics, seconds=now_s - ended_s, busy_s=held_s - busy_s, slots=slots.count),
                }
                ended_s, busy_s = now_s, held_s
                self._report(making.step, metrics, self.newest)
                del making  # or its episodes would be held until the next step is there
                if self._ending and self._complete.empty() and not self._weights.ahead:
                    return
        finally:
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)

    async def _gather(self) -> None:
        """Give each step its groups, and ask for its weights as soon as they are there."""
        parts = self._parts
        clock = asyncio.get_running_loop().time
        try:
            for step in range(self._step + 1, parts.steps + 1):
                if self._ending:
                    return
                parts.player.counts.done = parts.player.counts.failed = 0
                making = self._weights.begin(step)
                while (one := await parts.supply.next()) is not None:
                    making.taken.append(one)
                    making.update.add(one.played.prepared, counts=one.counts)
                    if one.counts and self._reached < step:
                        self._reached = step
                        self._gathering.set()
                    self._reporter.check()
                if self._used_up:
                    return
                if not any(one.counts for one in making.taken):
                    if step == 1 and not making.taken:
                        raise RunFailed("the environments gave no tasks at all")
                    parts.trackers.note(f"the tasks have run out after {step - 1} steps")
                    return
                if not parts.recipe.at_once:  # who finished first then leaves no trace
                    making.taken.sort(key=lambda one: one.played.prepared.group.draw)
                making.complete_s = clock()
                await parts.store.sync()  # nothing is trained on that is not on the disk
                self._weights.finish(making)
                self._complete.put_nowait(making)
                del making, one
        finally:
            self._gathered = True
            self._gathering.set()
            self._complete.put_nowait(None)

    async def _advance(self, making: Making) -> dict[str, float]:
        """Make the weights of the next step, whose groups are there, the newest."""
        parts, step = self._parts, making.step
        members = list[Member]()
        for one in making.taken:
            group = one.played.prepared.group
            parts.tasks.observe(group)
            members.append(Member(group.draw, one.counts, len(group.episodes)))
        of_tasks = parts.tasks.metrics()
        written = parts.store.record_step(members, parts.tasks.state_dict())
        newest, metrics = await self._weights.take(making)
        self._step = step  # the weights have moved, whether or not that can be written down
        await written
        used = parts.budget.metrics()  # before the rollouts of the next step begin, however slow the disk is
        self._weights.newest = newest
        parts.supply.trained(step)
        if making.saving is not None:
            parts.saver.record(step, making.saving)
        await in_thread(parts.store.keep_used, parts.budget.state_dict())
        return metrics | of_tasks | used

    def _report(self, step: int, metrics: Mapping[str, float], sampler: Sampler) -> None:
        """Report a step, once the evaluation of its weights is there, if one is due."""
        parts = self._parts
        evaluation, wanted = None, parts.evaluation.tasks and not parts.store.has_metrics(step) and not self._used_up
        rank = parts.tasks.drawn + parts.recipe.groups  # before the groups of the steps after the next
        if wanted and parts.evaluation.due(step, last=parts.steps):
            if step in (0, parts.steps):
                self._phase = "evaluating"
            evaluation = asyncio.create_task(self._evaluated(step, sampler, rank=rank))
        elif wanted and parts.supply.exhausted:
            evaluation = asyncio.create_task(self._evaluated_if_last(step, sampler, rank=rank))
        self._reporter.add(step, {**parts.budget.metrics(), **metrics}, evaluation)

    async def _evaluated(self, step: int, sampler: Sampler, *, rank: int) -> Mapping[str, float]:
        tried = await self._parts.evaluation.play(sampler, rank=rank)
        await self._parts.store.keep_evaluation(step, [(one.group, one.attempts) for one in tried])
        return await eval_metrics(tried)

    async def _evaluated_if_last(self, step: int, sampler: Sampler, *, rank: int) -> Mapping[str, float]:
        """Evaluate a step if none of the groups that are still in play makes another one."""
        while self._reached <= step and not self._gathered:
            self._gathering.clear()
            await self._gathering.wait()
        if self._reached > step or self._ending or self._used_up:
            return {}
        self._phase = "evaluating"
        return await self._evaluated(step, sampler, rank=rank)

    def _reported(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = self._parts
        parts.selection.tell(step, metrics)
        parts.saver.tidy_up(reported=step)
        if self._enough is None and (reason := parts.selection.enough) is not None:
            self._enough = reason
            parts.trackers.note(f"{reason}; ending the run")

    @property
    def _ending(self) -> bool:
        """Whether no further step is to be begun."""
        return self._parts.stop.requested or self._enough is not None

    async def _save(self) -> None:
        self._phase = "saving"
        await self._weights.save()
