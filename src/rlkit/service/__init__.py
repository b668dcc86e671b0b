"""Protocols of a Tinker service: hosted, compatible, or the engine that rlkit embeds.

Invariant: the three differ only by an address and a key. This folder is the only place that knows the Tinker SDK.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rlkit.algorithms.losses import Loss
from rlkit.cost.usage import Usage
from rlkit.policy import Sampler
from rlkit.types import Datum, Floats, Prompt

if TYPE_CHECKING:
    from rlkit.config.schema.objective import LoraConfig, OptimizerConfig


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The result of a backward pass.

    Args:
        logprobs: the trainer's log-probability of each target, [N] float32 for each datum.
        metrics: metrics of the service, under its own names.
    """

    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]


class Learner(Protocol):
    """The weights that are trained.

    Each method submits its request at once and returns an awaitable. The service works in the order of submission, so a
    gradient, an optimiser step and a new sampler can queue together. Awaiting raises `ServiceError` if the service
    fails after retries; whether the request was applied is then unknown.
    """

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        """Accumulate the gradient of the sum of the data's losses."""
        ...

    def step(self, optimizer: OptimizerConfig, *, learning_rate: float) -> Awaitable[Mapping[str, float]]:
        """Take an optimiser step with the accumulated gradient; return the service's metrics."""
        ...

    def sampler(self, version: int) -> Awaitable[Sampler]:
        """Return a sampler of the weights after the requests submitted so far, numbered `version`."""
        ...

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        """Save the training state and the sampler's weights; return their `tinker://` paths."""
        ...


class Scorer(Protocol):
    """A version of the weights, ready to score tokens."""

    async def logprobs(self, prompt: Prompt, *, last: int) -> Floats:
        """Return the log-probability of each of the last tokens of a prompt.

        Args:
            prompt: [P] tokens and images.
            last: number of tokens, 1 … P − 1.

        Returns:
            [last] float32, NaN for positions without a log-probability.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on the service.

    Args:
        path: `tinker://` path.
        kind: training state with the optimiser, weights for sampling, or an adapter to download.
        created: time in seconds since the epoch.
        size_bytes: None if unknown.
        expires: time in seconds since the epoch; None for never.
    """

    path: str
    kind: Literal["training", "sampler", "external"]
    created: float
    size_bytes: int | None = None
    expires: float | None = None


class Service(Protocol):
    """A connection to a Tinker service.

    Its methods raise `ServiceError` if the service fails after retries, and `UsageError` if a checkpoint is missing.
    """

    @property
    def usage(self) -> Usage:
        """Usage so far, with that of its learners, samplers and scorers."""
        ...

    @property
    def is_repeatable(self) -> bool:
        """True if the same requests in the same order get the same answers, bit for bit."""
        ...

    async def learner(self, *, model: str, lora: LoraConfig, seed: int, checkpoint: str | None = None) -> Learner:
        """Return a learner with a fresh adapter, or with that of a checkpoint, optimiser included."""
        ...

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> Sampler:
        """Return a sampler of the base model, or of a checkpoint of sampler weights."""
        ...

    async def scorer(self, *, model: str, checkpoint: str | None = None) -> Scorer:
        """Return a scorer of the base model, or of a checkpoint of sampler weights."""
        ...

    async def delete(self, path: str) -> None:
        """Delete a checkpoint by its `tinker://` path."""
        ...

    async def list_checkpoints(self) -> Sequence[StoredCheckpoint]:
        """Return all checkpoints of the account, newest first."""
        ...

    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire an hour to ten years from now, or never.

        Raises:
            UsageError: there is no such checkpoint, or the service refuses the time.
        """
        ...

    async def model_of(self, path: str) -> str:
        """Return the base model of a checkpoint."""
        ...

    async def context_tokens(self, model: str) -> int | None:
        """Return the longest context that the service offers for the model; None if unknown."""
        ...
