"""Where the model runs: the hosted Tinker service, a compatible server, or the engine that rlkit embeds.

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
    """What the computation of a gradient gave back.

    Args:
        logprobs: for each datum, [N] float32, the trainer's log-probability of each target.
        metrics: what the service reported, names as it gave them.
    """

    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]


class Learner(Protocol):
    """The weights that are trained.

    Every method submits its request at once, and the service works in the order of submission; what comes back is to be
    awaited. So a gradient, an optimiser step and the hand-over of the weights can stand in its queue together.
    Awaiting raises `ServiceError` when the service fails after retries; what was applied is then not known.
    """

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        """Add the gradient of the sum of the data's losses to what has accumulated since the last step."""
        ...

    def step(self, optimizer: OptimizerConfig, *, learning_rate: float) -> Awaitable[Mapping[str, float]]:
        """One optimiser step with the accumulated gradient, at this rate; what the service reported."""
        ...

    def sampler(self, version: int) -> Awaitable[Sampler]:
        """A sampler of the weights as they are when its turn comes, known as `version`."""
        ...

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        """Save the training state and the sampler's weights; their `tinker://` paths."""
        ...


class Scorer(Protocol):
    """One version of the weights, to be asked how likely given tokens are."""

    async def logprobs(self, prompt: Prompt, *, last: int) -> Floats:
        """The log-probability of each of the last tokens of a prompt, given those before it.

        Args:
            prompt: [P] tokens and images.
            last: how many tokens, 1 … P − 1.

        Returns:
            [last] float32, NaN at what has no log-probability.

        Raises:
            ServiceError: the service failed after retries.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that the service keeps.

    Args:
        path: `tinker://` path.
        kind: training state with the optimiser, weights for sampling, or an adapter for downloading.
        created: seconds since the epoch.
        size_bytes: None where the service does not say.
        expires: seconds since the epoch; None for never.
    """

    path: str
    kind: Literal["training", "sampler", "external"]
    created: float
    size_bytes: int | None = None
    expires: float | None = None


class Service(Protocol):
    """A connection to a Tinker service."""

    @property
    def usage(self) -> Usage:
        """What it was asked for so far, through everything that it gave."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether the same requests in the same order get the same answers, bit for bit."""
        ...

    async def learner(self, *, model: str, lora: LoraConfig, seed: int, checkpoint: str | None = None) -> Learner:
        """A fresh adapter, or the one that a checkpoint of training state holds, optimiser included."""
        ...

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> Sampler:
        """A sampler of the base model, or of a checkpoint of sampler weights."""
        ...

    async def scorer(self, *, model: str, checkpoint: str | None = None) -> Scorer:
        """As `sampler`, to ask for the log-probabilities of given tokens."""
        ...

    async def delete(self, path: str) -> None:
        """Delete the checkpoint that a `tinker://` path names.

        Raises:
            UsageError: there is none.
            ServiceError: the service failed.
        """
        ...

    async def stored(self) -> Sequence[Stored]:
        """All checkpoints of the account, newest first.

        Raises:
            ServiceError: the service failed.
        """
        ...

    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire so many seconds from now, an hour to ten years, or never.

        Raises:
            UsageError: there is none, or the service allows no such time.
            ServiceError: the service failed.
        """
        ...

    async def model_of(self, path: str) -> str:
        """The base model of a checkpoint.

        Raises:
            UsageError: there is no such checkpoint.
            ServiceError: the service failed.
        """
        ...

    async def context_tokens(self, model: str) -> int | None:
        """The longest context that the service offers for the model; None where it does not say."""
        ...
