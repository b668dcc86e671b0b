"""The requests of one step: gradients, optimiser steps and the new sampler, in the service's order.

Invariant: a step with the same groups takes the same optimiser steps on the same data, so it can be repeated after a
failure or in another process. A streaming step orders its data as its groups are added, any other step by draw. Timing
divides a step into requests only with `ready_groups`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlkit.algorithms.datums import Preparation, PreparedGroup, UpdateResult
from rlkit.algorithms.losses import CrossEntropy, Loss
from rlkit.algorithms.lr_schedule import LearningRate
from rlkit.algorithms.schedules import Streaming
from rlkit.config.schema.objective import OptimizerConfig
from rlkit.policy import Sampler
from rlkit.service import Gradient, Learner
from rlkit.service.watch import ServiceWatch
from rlkit.training.checkpoints import PendingCheckpoint
from rlkit.training.schedule import SupplyLimits
from rlkit.types import Datum

_CROSS_ENTROPY = CrossEntropy()

type _Request = asyncio.Future[Gradient] | asyncio.Future[Mapping[str, float]] | asyncio.Future[Sampler]


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """Settings for the requests of a step."""

    preparation: Preparation  # has estimated the advantages of the groups, but for those that need the whole step
    loss: Loss
    optimizer: OptimizerConfig
    rate: LearningRate
    limits: SupplyLimits  # groups of a full step, and those that are started before it
    substeps: int = 1  # number of optimiser steps, each on an equal share of the groups
    streaming: Streaming | None = None  # requests for gradients before the step is complete; None for none
    supervised: frozenset[str] = frozenset()  # environments of conversations, with the loss `cross_entropy`

    @property
    def is_streaming(self) -> bool:
        """True if gradients may be requested before all groups of the step are added."""
        return not self.preparation.needs_whole_steps and (self.streaming is not None or self.substeps > 1)


class StepUpdate:
    """The requests of a step.

    Args:
        learner: receives the requests; if None, they wait for `resubmit`.
        version: version of the weights after the step.
    """

    def __init__(self, learner: Learner | None, recipe: StepRecipe, *, version: int) -> None:
        self._recipe = recipe
        self.version = version
        self._groups: list[PreparedGroup] = []
        self._tokens = 0
        self.is_finished = False  # True if all groups of the step are added
        self._reset(learner)

    @property
    def has_optimizer_steps(self) -> bool:
        """True if an optimiser step was requested, so the weights may have changed."""
        return bool(self._optimizer_steps)

    @property
    def untrained_tokens(self) -> int:
        """Tokens of the groups whose gradient is not computed yet."""
        return self._tokens - sum(tokens for gradient, tokens in self._gradient_tokens if _has_succeeded(gradient))

    def add(self, prepared: PreparedGroup, *, is_trained: bool) -> None:
        """Add a group; ignore it unless it is trained on."""
        if not is_trained:
            return
        self._groups.append(prepared)
        self._tokens += prepared.tokens
        if self._recipe.is_streaming:
            self._include(prepared)

    def finish(self) -> None:
        """Request the rest of the step; call after the last `add`. EnvironmentFault if the estimator fails."""
        if not self._recipe.is_streaming:
            supervised = self._recipe.supervised  # a request has one loss, so its groups come together
            self._groups.sort(key=lambda prepared: (prepared.group.env not in supervised, prepared.group.draw))
            self._groups = self._recipe.preparation.prepare_step(self._groups)
            self._tokens = sum(prepared.tokens for prepared in self._groups)
            for prepared in self._groups:
                self._include(prepared)
        self.is_finished = True
        self._request_sampler()

    def cancel(self) -> None:
        """Stop requests, and cancel every request without an answer."""
        self._learner = None
        for request in (*self._requests, self._sampler, self.checkpoint):
            if request is not None:
                request.cancel()

    def resubmit(self, learner: Learner) -> None:
        """Repeat all requests to another learner, whose weights do not contain this step."""
        self._reset(learner)
        if self.is_finished or self._recipe.is_streaming:
            for prepared in self._groups:
                self._include(prepared)
        if self.is_finished:
            self._request_sampler()

    async def wait(self, watch: ServiceWatch) -> tuple[Sampler, UpdateResult] | None:
        """Wait for the sampler of the new weights and the result of the step; None if there is nothing to train on.

        `watch` limits each request separately, because the service may answer the requests of a step one by one. After
        a ServiceError, the service may have computed a part of the step.
        """
        if self._sampler is None:
            return None
        for request in self._requests:
            await _wait_for(request, "training", watch)
        await _wait_for(self._sampler, "handing over weights", watch)
        gradients = [gradient.result() for gradient, _ in self._gradient_tokens]
        reports = [step.result() for step in self._optimizer_steps]
        logprobs = [row for gradient in gradients for row in gradient.logprobs]
        weights = [len(gradient.logprobs) for gradient in gradients]
        metrics = _merge([gradient.metrics for gradient in gradients], weights) | _merge(reports, [1] * len(reports))
        rate = self._recipe.rate.at(self.version)
        groups, supervised = tuple(self._groups), self._recipe.supervised
        return self._sampler.result(), UpdateResult(groups, logprobs, metrics, self._recipe.loss, rate, supervised)

    def _reset(self, learner: Learner | None) -> None:
        self._learner = learner
        self._included_groups = self._substeps = 0
        self._unrequested: list[Datum] = []
        self._loss = self._recipe.loss  # of the unrequested data
        self._gradient_tokens: list[tuple[asyncio.Future[Gradient], int]] = []
        self._has_new_gradient = False
        self._requests: list[_Request] = []
        self._optimizer_steps: list[asyncio.Future[Mapping[str, float]]] = []
        self._sampler: asyncio.Future[Sampler] | None = None
        self.checkpoint: PendingCheckpoint | None = None  # checkpoint of the new weights, if the learner requested one

    def _include(self, prepared: PreparedGroup) -> None:
        self._included_groups += 1
        loss = _CROSS_ENTROPY if prepared.group.env in self._recipe.supervised else self._recipe.loss
        if loss is not self._loss:
            self._request_gradient()
            self._loss = loss
        self._unrequested += prepared.data
        share = self._recipe.limits.groups * (self._substeps + 1) / self._recipe.substeps
        ends_substep = self._included_groups >= share and self._substeps < self._recipe.substeps - 1
        is_idle = not self._gradient_tokens or self._gradient_tokens[-1][0].done()
        streaming = self._recipe.streaming
        if ends_substep or streaming == "each_group" or (streaming == "ready_groups" and is_idle):
            self._request_gradient()
        if ends_substep:
            self._request_optimizer_step()

    def _request_sampler(self) -> None:
        self._request_gradient()
        self._request_optimizer_step()
        if self._optimizer_steps and self._learner is not None:
            self._sampler = asyncio.ensure_future(self._learner.sampler(self.version))

    def _request_gradient(self) -> None:
        if not self._unrequested or self._learner is None:
            return
        gradient = asyncio.ensure_future(self._learner.gradient(self._unrequested, self._loss))
        if self._recipe.streaming == "ready_groups":
            gradient.add_done_callback(self._request_next_gradient)
        self._gradient_tokens.append((gradient, sum(len(datum.targets) for datum in self._unrequested)))
        self._requests.append(gradient)
        self._unrequested = []
        self._has_new_gradient = True

    def _request_next_gradient(self, gradient: asyncio.Future[Gradient]) -> None:
        """Request the gradient of the groups that were added while `gradient` was computed."""
        if _has_succeeded(gradient) and any(gradient is requested for requested, _ in self._gradient_tokens):
            self._request_gradient()

    def _request_optimizer_step(self) -> None:
        self._substeps += 1
        if self._has_new_gradient and self._learner is not None:
            rate = self._recipe.rate.at(self.version)
            step = asyncio.ensure_future(self._learner.step(self._recipe.optimizer, learning_rate=rate))
            self._optimizer_steps.append(step)
            self._requests.append(step)
            self._has_new_gradient = False


def _has_succeeded(gradient: asyncio.Future[Gradient]) -> bool:
    return gradient.done() and not gradient.cancelled() and gradient.exception() is None


async def _wait_for(request: _Request, purpose: str, watch: ServiceWatch) -> None:
    if request.done():  # an old answer does not show that the service is available now
        request.result()
    else:
        await watch.call(lambda: request, purpose)


def _merge(reports: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """Merge metrics by their suffix: sums (`:sum`), extremes (`:min`, `:max`), and weighted means of all others."""
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
