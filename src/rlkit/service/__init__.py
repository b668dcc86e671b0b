"""Protocols of a Tinker service: hosted, compatible, or the engine that rlkit embeds.

Invariant: the three differ only by address and key. Nothing here imports the Tinker SDK, or `tinker_client/`, which
implements the protocols with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlkit.algorithms.losses import Loss
from rlkit.algorithms.references import Score
from rlkit.config.schema.objective import LoraConfig, OptimizerConfig
from rlkit.cost.usage import Usage
from rlkit.policy import Sampler
from rlkit.types import Datum, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The result of a backward pass."""

    logprobs: Sequence[Floats]  # the trainer's log-probability of each target, [N] float32 for each datum
    metrics: Mapping[str, float]  # metrics of the service, under its own names


class Learner(Protocol):
    """A client that trains weights.

    Each method submits its request at once and returns an awaitable. The service works in the order of submission, so a
    gradient, an optimiser step and a new sampler can queue together. Awaiting raises `ServiceError` if the service
    fails after retries; the request may have been applied nevertheless.
    """

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        """Accumulate the gradient of the sum of the data's losses."""
        ...

    def forward(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        """Compute a loss of the service, and the log-probabilities of its data, without a gradient."""
        ...

    def step(self, optimizer: OptimizerConfig, *, learning_rate: float) -> Awaitable[Mapping[str, float]]:
        """Take an optimiser step with the accumulated gradient; return the service's metrics."""
        ...

    def sampler(self, version: int) -> Awaitable[Sampler]:
        """Return a sampler of the weights that result from all requests so far; `version` is its number."""
        ...

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        """Save the training state and the sampler's weights; return their `tinker://` paths."""
        ...


class Service(Protocol):
    """A connection to a Tinker service.

    Methods raise `ServiceError` if the service fails after retries, and `UsageError` if a checkpoint is missing.
    """

    @property
    def usage(self) -> Usage:
        """Usage so far, including learners, samplers and references."""
        ...

    @property
    def is_repeatable(self) -> bool:
        """True if the same requests in the same order get bit-identical answers."""
        ...

    async def learner(self, *, model: str, lora: LoraConfig, seed: int, checkpoint: str | None = None) -> Learner:
        """Return a learner with a new adapter, or with the adapter and optimiser of a checkpoint."""
        ...

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> Sampler:
        """Return a sampler of the base model, or of a checkpoint of sampler weights."""
        ...

    async def scorer(self, *, model: str, checkpoint: str | None = None) -> Score:
        """Return a function that scores the end of a prompt with the base model, or a checkpoint of sampler weights.

        It scores 1 … P − 1 of the prompt's P positions, and returns NaN for positions without a log-probability. An
        empty place among the likeliest tokens has a log-probability below −9,999.
        """
        ...

    async def delete(self, path: str) -> None:
        """Delete a checkpoint by its `tinker://` path."""
        ...

    async def model_of(self, path: str) -> str:
        """Return the base model of a checkpoint."""
        ...

    async def context_tokens(self, model: str) -> int | None:
        """Return the context length of the model on the service; None if unknown."""
        ...
