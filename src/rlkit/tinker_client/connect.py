"""Choose a service and connect to it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit._util.activity import current_activity
from rlkit._util.threads import in_thread
from rlkit.config.schema import ServiceConfig
from rlkit.errors import ConfigError
from rlkit.tinker_client.connector import Connector, ServiceAddress

if TYPE_CHECKING:
    from rlkit.tinker_client.sdk import TinkerService


@dataclass(frozen=True, slots=True)
class ServiceChoice:
    """The service that a run uses."""

    kind: Literal["hosted", "url", "engine"]  # `url` is a server at an address that the user set
    base_url: str | None  # None for the hosted service and the engine
    reason: str  # reason of the choice, as a phrase for messages


def choose_service(config: ServiceConfig, *, environ: Mapping[str, str] = os.environ) -> ServiceChoice:
    """Choose the address that the user set, else the hosted service if there is a credential, else the engine.

    Raises:
        ConfigError: a setting of the embedded engine has no effect.
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
    """Return the variable or file that holds the Tinker SDK's credential, or None; the credential is not read."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environ.get(name):
            return name
    path = Path.home() / ".tinker" / "credentials.json"
    return str(path) if path.exists() else None


@asynccontextmanager
async def reach_service(
    config: ServiceConfig, *, choice: ServiceChoice | None = None, note: Callable[[str], None] = lambda message: None
) -> AsyncGenerator[ServiceAddress]:
    """Wait until the chosen service answers and yield its address; arguments and errors as in `connect`."""
    choice = choice or choose_service(config)
    if choice.kind != "engine":
        from tinker.lib.base_url import resolve_base_url

        url = resolve_base_url(choice.base_url)
        connector = Connector(url, choice.reason, config.connect_timeout_s, note)
        await connector.wait_for_answer()
        yield ServiceAddress(choice.base_url, connector=connector)
        return
    note(f"starting the embedded engine: {choice.reason}")
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
    warn: Callable[[str], None] = lambda warning: None,
    session: bool = True,
) -> AsyncGenerator[TinkerService]:
    """Connect to the chosen service; the engine runs while the context is open.

    Args:
        choice: result of `choose_service`; by default it is called.
        note: receives one line for the user while the service does not answer.
        warn: receives the first line of each warning of the SDK.
        session: open a session, which training and sampling need and the management of checkpoints does not.

    Raises:
        ConfigError: the address is no URL.
        MissingError: the service does not answer within `connect_timeout_s`, or rejected the key.
    """
    from rlkit.tinker_client.sdk import TinkerService, capture_warnings

    async with (
        reach_service(config, choice=choice, note=note) as address,
        TinkerService(address) as service,
    ):
        if session and address.connector is not None:
            await service.open_session()
        with capture_warnings(warn):
            yield service


def name_service(choice: ServiceChoice) -> str:
    """Return a phrase for the chosen service."""
    names = {"hosted": "the hosted Tinker service", "engine": "the embedded engine"}
    return names.get(choice.kind, f"the Tinker service at {choice.base_url}")


def describe_service(choice: ServiceChoice) -> str:
    """Describe the chosen service and the reason of the choice as a phrase for messages."""
    return f"{name_service(choice)} ({choice.reason})"
