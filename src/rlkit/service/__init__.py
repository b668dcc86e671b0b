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
    """The result of a backward pass.

    Args:
        logprobs: for each datum, [N] float32, the trainer's log-probability of each target.
        metrics: reported by the service, under its own names.
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
        """Return the log-probability of each of the last tokens of a prompt, given those before it.

        Args:
            prompt: [P] tokens and images.
            last: number of tokens, 1 … P − 1.

        Returns:
            [last] float32, NaN at what has no log-probability.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
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
    """A connection to a Tinker service.

    Its methods raise `ServiceError` when the service fails after retries, and `UsageError` for a path of no checkpoint.
    """

    @property
    def usage(self) -> Usage:
        """Usage so far, of its learners, samplers and scorers too."""
        ...

    @property
    def is_repeatable(self) -> bool:
        """True if the same requests in the same order get the same answers, bit for bit."""
        ...

    async def learner(self, *, model: str, lora: LoraConfig, seed: int, checkpoint: str | None = None) -> Learner:
        """Return a fresh adapter, or the one that a checkpoint of training state holds, optimiser included."""
        ...

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> Sampler:
        """Return a sampler of the base model, or of a checkpoint of sampler weights."""
        ...

    async def scorer(self, *, model: str, checkpoint: str | None = None) -> Scorer:
        """Return a scorer, chosen as a sampler is."""
        ...

    async def delete(self, path: str) -> None:
        """Delete the checkpoint that a `tinker://` path names."""
        ...

    async def list_checkpoints(self) -> Sequence[StoredCheckpoint]:
        """Return all checkpoints of the account, newest first."""
        ...

    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire so many seconds from now, an hour to ten years, or never.

        Raises:
            UsageError: there is no such checkpoint, or the service allows no such time.
        """
        ...

    async def model_of(self, path: str) -> str:
        """Return the base model of a checkpoint."""
        ...

    async def context_tokens(self, model: str) -> int | None:
        """Return the longest context that the service offers for the model; None where it does not say."""
        ...
