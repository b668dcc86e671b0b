"""The requests of one step: gradients, optimiser steps and the hand-over of the new weights, in the service's order.

Invariant: a step made of the same groups takes the same optimiser steps on the same data, so that it can be made again
after a failure, or in another process. A step that is requested as a whole holds its data in the order of the draws,
any other in the order in which it is given its groups. Only with `ready_groups` does timing divide it into requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlkit.algorithms.datums import PreparedGroup, UpdateResult
from rlkit.algorithms.losses import Loss
from rlkit.algorithms.lr_schedule import LearningRate
from rlkit.algorithms.schedules import Streaming
from rlkit.config.schema.objective import OptimizerConfig
from rlkit.policy import Sampler
from rlkit.service import Gradient, Learner
from rlkit.service.watch import ServiceWatch
from rlkit.types import Datum

type _Asked = asyncio.Future[Gradient] | asyncio.Future[Mapping[str, float]] | asyncio.Future[Sampler]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a step is made of its groups.

    Args:
        loss: of every sequence.
        optimizer: of every optimiser step.
        rate: of the step.
        groups: of a full step.
        substeps: optimiser steps in it, each on an equal share of the groups.
        streaming: the division of gradients that are requested before the step is complete; None requests them after.
        together: what is left to do once all groups of a step are there; nothing is asked for before.
    """

    loss: Loss
    optimizer: OptimizerConfig
    rate: LearningRate
    groups: int
    substeps: int = 1
    streaming: Streaming | None = None
    together: Callable[[Sequence[PreparedGroup]], Sequence[PreparedGroup]] | None = None

    @property
    def at_once(self) -> bool:
        """Whether something may be asked for before all groups of the step are there."""
        return self.together is None and (self.streaming is not None or self.substeps > 1)


class StepUpdate:
    """A step in the making.

    Args:
        learner: takes the requests; without one they wait for `submit_again`.
        recipe: how a step is made.
        version: of the weights that it makes.
    """

    def __init__(self, learner: Learner | None, recipe: Recipe, *, version: int) -> None:
        self._recipe = recipe
        self._version = version
        self._waiting: list[PreparedGroup] = []
        self._groups: list[Sequence[Datum]] = []
        self._finished = False
        self._begin(learner)

    @property
    def finished(self) -> bool:
        """Whether all its groups are there."""
        return self._finished

    @property
    def stepped(self) -> bool:
        """Whether the weights may have moved."""
        return bool(self._steps)

    @property
    def untrained(self) -> int:
        """Tokens of its groups of which the service has not yet computed a gradient."""
        known = sum(tokens for gradient, tokens in self._sizes if _succeeded(gradient))
        given = sum(len(datum.targets) for data in self._groups for datum in data)
        return given - known + sum(prepared.tokens for prepared in self._waiting if not self._finished)

    def add(self, prepared: PreparedGroup, *, counts: bool) -> None:
        """One more group; one that does not count teaches nothing."""
        if counts and self._recipe.at_once:
            self._groups.append(prepared.data)
            self._include(prepared.data)
        elif counts:
            self._waiting.append(prepared)

    def finish(self) -> None:
        """No more groups come: submit what is left, and ask for the new weights right behind it.

        Raises:
            EnvironmentFault: the advantage estimator failed.
        """
        if not self._recipe.at_once:
            waiting: Sequence[PreparedGroup] = sorted(self._waiting, key=lambda prepared: prepared.group.draw)
            if self._recipe.together is not None:
                waiting = self._recipe.together(waiting)
            self._groups = [prepared.data for prepared in waiting]
            for data in self._groups:
                self._include(data)
        self._finished = True
        self._end()

    def withdraw(self) -> None:
        """Ask the learner for nothing more, since it failed, and wait for none of its answers."""
        self._learner = None
        for asked in (*self._asked, self._sampler):
            if asked is not None:
                asked.cancel()

    def submit_again(self, learner: Learner) -> None:
        """Ask for everything anew, of weights that know nothing of this step."""
        self._begin(learner)
        for data in self._groups:
            self._include(data)
        if self._finished:
            self._end()

    async def result(self, watch: ServiceWatch) -> tuple[Sampler, UpdateResult] | None:
        """The sampler of the new weights, and what came of the step; None if there was nothing to train on.

        Args:
            watch: over each request by itself, since a step may have many that the service answers one after another.

        Raises:
            ServiceError: a request failed; how much of the step was taken is then not known.
        """
        if self._sampler is None:
            return None
        for asked in self._asked:
            await _answered(asked, "training", watch)
        await _answered(self._sampler, "handing over weights", watch)
        gradients = [gradient.result() for gradient in self._gradients]
        reports = [step.result() for step in self._steps]
        logprobs = [row for gradient in gradients for row in gradient.logprobs]
        weights = [len(gradient.logprobs) for gradient in gradients]
        metrics = {
            **_merged([gradient.metrics for gradient in gradients], weights),
            **_merged(reports, [1] * len(reports)),
        }
        rate = self._recipe.rate.at(self._version)
        return self._sampler.result(), UpdateResult(tuple(self._data), logprobs, metrics, self._recipe.loss, rate)

    def _begin(self, learner: Learner | None) -> None:
        self._learner = learner
        self._included = self._substeps = 0
        self._part: list[Datum] = []
        self._data: list[Datum] = []
        self._gradients: list[asyncio.Future[Gradient]] = []
        self._sizes: list[tuple[asyncio.Future[Gradient], int]] = []
        self._fresh = False
        self._asked: list[_Asked] = []
        self._steps: list[asyncio.Future[Mapping[str, float]]] = []
        self._sampler: asyncio.Future[Sampler] | None = None

    def _include(self, data: Sequence[Datum]) -> None:
        self._included += 1
        self._part += data
        share = self._recipe.groups * (self._substeps + 1) / self._recipe.substeps
        full = self._included >= share and self._substeps < self._recipe.substeps - 1
        match self._recipe.streaming:
            case "each_group":
                ready = True
            case "ready_groups":
                ready = not self._gradients or self._gradients[-1].done()
            case None:
                ready = False
        if full or ready:
            self._submit()
        if full:
            self._end_substep()

    def _end(self) -> None:
        self._submit()
        self._end_substep()
        if self._steps and self._learner is not None:
            self._sampler = asyncio.ensure_future(self._learner.sampler(self._version))

    def _submit(self) -> None:
        if not self._part or self._learner is None:
            return
        gradient = asyncio.ensure_future(self._learner.gradient(self._part, self._recipe.loss))
        if self._recipe.streaming == "ready_groups":
            gradient.add_done_callback(self._go_on)
        self._gradients.append(gradient)
        self._sizes.append((gradient, sum(len(datum.targets) for datum in self._part)))
        self._asked.append(gradient)
        self._data += self._part
        self._part = []
        self._fresh = True

    def _go_on(self, gradient: asyncio.Future[Gradient]) -> None:
        """Ask for the gradient of what has come meanwhile."""
        if _succeeded(gradient) and gradient in self._gradients:
            self._submit()

    def _end_substep(self) -> None:
        self._substeps += 1
        if self._fresh and self._learner is not None:
            rate = self._recipe.rate.at(self._version)
            step = asyncio.ensure_future(self._learner.step(self._recipe.optimizer, learning_rate=rate))
            self._steps.append(step)
            self._asked.append(step)
            self._fresh = False


def _succeeded(gradient: asyncio.Future[Gradient]) -> bool:
    return gradient.done() and not gradient.cancelled() and gradient.exception() is None


async def _answered(asked: _Asked, what: str, watch: ServiceWatch) -> None:
    if asked.done():  # an answer that came long ago says nothing about whether the service is there now
        asked.result()
    else:
        await watch.call(lambda: asked, what)


def _merged(reports: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """Several reports as one: sums of what is named `:sum`, the extremes of `:min` and `:max`, means of the rest."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        pairs = [(report[name], weight) for report, weight in zip(reports, weights, strict=True) if name in report]
        values = [value for value, _ in pairs]
        if len(values) == 1:
            merged[name] = values[0]
        elif name.endswith(":sum"):
            merged[name] = float(sum(values))
        elif name.endswith((":min", ":max")):
            merged[name] = min(values) if name.endswith(":min") else max(values)
        else:
            merged[name] = float(np.average(values, weights=[weight for _, weight in pairs]))
    return merged
