"""Where the model runs: the hosted Tinker service, a compatible server, or the engine that rlkit embeds.

Invariant: the three differ only by an address and a key. This folder is the only place that knows the Tinker SDK.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rlkit.activity import running_activity
from rlkit.concurrency import in_thread
from rlkit.errors import ConfigError
from rlkit.losses import Loss
from rlkit.policy import Sampler
from rlkit.types import Datum, Floats, Prompt
from rlkit.usage import Usage

if TYPE_CHECKING:
    from rlkit.config.objective import OptimizerConfig
    from rlkit.config.schema import LoraConfig, ServiceConfig
    from rlkit.service.connecting import Connector


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


@dataclass(frozen=True, slots=True)
class ServiceChoice:
    """Which service a run uses.

    Args:
        kind: `url` is any server whose address was given.
        base_url: None for the hosted service's own address and for the engine, which has none before it starts.
        reason: one phrase that says why.
    """

    kind: Literal["hosted", "url", "engine"]
    base_url: str | None
    reason: str


def choose(config: ServiceConfig, *, environ: Mapping[str, str] = os.environ) -> ServiceChoice:
    """An address that was given wins; then the hosted service, if there is a credential; then the embedded engine.

    Raises:
        ConfigError: something is set of the embedded engine, which is not the one that is chosen.
    """
    chosen = _chosen(config, environ)
    for name in ("engine_threads", "engine_device"):
        if chosen.kind != "engine" and getattr(config, name) is not None:
            raise ConfigError(
                f"service.{name} has no effect: {chosen.reason}, so the embedded engine is not started; leave it out"
            )
    return chosen


def _chosen(config: ServiceConfig, environ: Mapping[str, str]) -> ServiceChoice:
    if config.base_url:
        return ServiceChoice("url", config.base_url, "service.base_url is set")
    if url := environ.get("TINKER_BASE_URL"):
        return ServiceChoice("url", url, "TINKER_BASE_URL is set")
    if found := credential(environ=environ):
        return ServiceChoice("hosted", None, f"{found} is set")
    return ServiceChoice("engine", None, "there is neither a Tinker credential nor TINKER_BASE_URL")


def credential(*, environ: Mapping[str, str] = os.environ) -> str | None:
    """Where the Tinker SDK would find a credential, or None; the credential itself is not read."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environ.get(name):
            return name
    stored = Path.home() / ".tinker" / "credentials.json"
    return str(stored) if stored.exists() else None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service is.

    Args:
        base_url: None for the SDK's own default.
        api_key: None for the SDK's own look-up.
        embedded: it is the engine that rlkit started, which ends with whoever asked for it.
        connector: limits the time until it has opened a session; None for the engine, which is in this process.
    """

    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    embedded: bool = False
    connector: Connector | None = None


def _ignore(message: str) -> None:
    """Tell nobody."""


@asynccontextmanager
async def reachable(
    config: ServiceConfig, *, choice: ServiceChoice | None = None, note: Callable[[str], None] = _ignore
) -> AsyncGenerator[Address]:
    """Wait until the chosen service answers, and yield where it is; the engine is started and stopped with it.

    Args:
        config: says which service, and how long to wait for it.
        choice: the service that was chosen already.
        note: receives one line for the user while the service does not answer.

    Raises:
        ConfigError: its address is no URL.
        MissingError: it does not answer within `connect_timeout_s`.
    """
    chosen = choice or choose(config)
    if chosen.kind != "engine":
        from tinker.lib.base_url import resolve_base_url

        from rlkit.service.connecting import Connector

        url = resolve_base_url(chosen.base_url)
        connector = Connector(url, chosen.reason, config.connect_timeout_s, note)
        await connector.wait_for_answer()
        yield Address(chosen.base_url, connector=connector)
        return
    note("starting the embedded engine")
    from rlkit.engine import EngineServer

    engine = EngineServer(threads=config.engine_threads, device=config.engine_device, activity=running_activity())
    await in_thread(engine.start)
    try:
        yield Address(engine.url, engine.api_key, embedded=True)
    finally:
        await in_thread(engine.stop)


@asynccontextmanager
async def connect(
    config: ServiceConfig,
    *,
    choice: ServiceChoice | None = None,
    note: Callable[[str], None] = _ignore,
    session: bool = True,
) -> AsyncGenerator[Service]:
    """Connect to the chosen service; the engine is started and stopped with the connection.

    Args:
        config: says which service, and how long to wait for it.
        choice: the service that was chosen already.
        note: receives one line for the user while the service does not answer.
        session: open a session for training or sampling; checkpoints need none.

    Raises:
        ConfigError: the address is no URL.
        MissingError: the service cannot be reached within `connect_timeout_s`, or it refused the key.
    """
    from rlkit.service.sdk import TinkerService

    async with (
        reachable(config, choice=choice, note=note) as at,
        TinkerService(
            base_url=at.base_url, api_key=at.api_key, embedded=at.embedded, connector=at.connector
        ) as service,
    ):
        if session and at.connector is not None:
            await service.open_session()
        yield service
