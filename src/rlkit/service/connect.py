"""The choice of a service, and the connection to it.

Invariant: the hosted service, a compatible server and the embedded engine differ only by an address and a key.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit._util.activity import current_activity
from rlkit._util.threads import in_thread
from rlkit.errors import ConfigError
from rlkit.service import Service

if TYPE_CHECKING:
    from rlkit.config.schema import ServiceConfig
    from rlkit.service.connector import Connector


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


def choose_service(config: ServiceConfig, *, environ: Mapping[str, str] = os.environ) -> ServiceChoice:
    """Choose a given address first, then the hosted service, if there is a credential, then the embedded engine.

    Raises:
        ConfigError: something is set of the embedded engine, which is not the one that is chosen.
    """
    if config.base_url:
        choice = ServiceChoice("url", config.base_url, "service.base_url is set")
    elif url := environ.get("TINKER_BASE_URL"):
        choice = ServiceChoice("url", url, "TINKER_BASE_URL is set")
    elif source := find_credential(environ=environ):
        choice = ServiceChoice("hosted", None, f"{source} is set")
    else:
        return ServiceChoice("engine", None, "there is neither a Tinker credential nor TINKER_BASE_URL")
    for name in ("engine_threads", "engine_device"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"service.{name} has no effect: {choice.reason}, so the embedded engine is not started; leave it out"
            )
    return choice


def find_credential(*, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return where the Tinker SDK would find a credential, or None; the credential itself is not read."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environ.get(name):
            return name
    stored = Path.home() / ".tinker" / "credentials.json"
    return str(stored) if stored.exists() else None


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a service is.

    Args:
        base_url: None for the SDK's own default.
        api_key: None for the SDK's own look-up.
        embedded: it is the engine that rlkit started, which ends with the connection.
        connector: limits the time until it has opened a session; None for the engine, which is in this process.
    """

    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    embedded: bool = False
    connector: Connector | None = None


@asynccontextmanager
async def reach_service(
    config: ServiceConfig, *, choice: ServiceChoice | None = None, note: Callable[[str], None] = lambda message: None
) -> AsyncGenerator[ServiceAddress]:
    """Wait until the chosen service answers, and yield where it is; the engine is started and stopped with it.

    Args:
        config: says which service, and how long to wait for it.
        choice: the service that was chosen already.
        note: receives one line for the user while the service does not answer.

    Raises:
        ConfigError: its address is no URL.
        MissingError: it does not answer within `connect_timeout_s`.
    """
    chosen = choice or choose_service(config)
    if chosen.kind != "engine":
        from tinker.lib.base_url import resolve_base_url

        from rlkit.service.connector import Connector

        url = resolve_base_url(chosen.base_url)
        connector = Connector(url, chosen.reason, config.connect_timeout_s, note)
        await connector.wait_for_answer()
        yield ServiceAddress(chosen.base_url, connector=connector)
        return
    note("starting the embedded engine")
    from rlkit.engine import EngineServer

    engine = EngineServer(threads=config.engine_threads, device=config.engine_device, activity=current_activity())
    await in_thread(engine.start)
    try:
        yield ServiceAddress(engine.url, engine.api_key, embedded=True)
    finally:
        await in_thread(engine.stop)


@asynccontextmanager
async def connect(
    config: ServiceConfig,
    *,
    choice: ServiceChoice | None = None,
    note: Callable[[str], None] = lambda message: None,
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
        reach_service(config, choice=choice, note=note) as at,
        TinkerService(
            base_url=at.base_url, api_key=at.api_key, embedded=at.embedded, connector=at.connector
        ) as service,
    ):
        if session and at.connector is not None:
            await service.open_session()
        yield service


def describe_service(choice: ServiceChoice) -> str:
    """Return the chosen service as a phrase for people."""
    match choice.kind:
        case "hosted":
            return f"the hosted Tinker service ({choice.reason})"
        case "url":
            return f"the Tinker service at {choice.base_url} ({choice.reason})"
        case "engine":
            return f"the embedded engine ({choice.reason})"
