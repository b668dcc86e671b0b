"""Connections to servers: one pool per event loop and server.

Invariant: the key of the OpenReward platform is sent to the platform, and to a server with a URL only if configured.
The clients of a pool are closed when its event loop ends.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from rlkit._util.threads import in_thread
from rlkit.envs.openreward.connection import sdk
from rlkit.envs.openreward.connection.target import Target
from rlkit.errors import MissingError

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncEnvironment, AsyncEnvironmentsAPI

KEY_VARIABLE = "OPENREWARD_API_KEY"


@dataclass(frozen=True)
class Access:
    """Access to a server; `send_key` also sends the platform's key to a server with a URL."""

    target: Target
    send_key: bool = False

    @property
    def key(self) -> str | None:
        """API key for the server, or None; MissingError if it is required and not set."""
        if self.target.base_url is not None and not self.send_key:
            return None
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise MissingError(
                f"{KEY_VARIABLE} is not set, but {self.target.name} needs it: create a key at "
                "https://openreward.ai/keys and set it in the environment or in .env"
            )
        return key


_pools = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Access, "AsyncEnvironmentsAPI"]]()
_keepers = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]]()


async def environment(access: Access) -> AsyncEnvironment:
    """Return the SDK's handle of an environment, on this event loop."""
    await in_thread(sdk.load)
    loop = asyncio.get_running_loop()
    pool = _pools.setdefault(loop, {})
    if access not in pool:
        pool[access] = _make_api(access)
    if (keeper := _keepers.get(loop)) is None or keeper.done():
        _keepers[loop] = loop.create_task(_close_at_the_end(loop))
    target = access.target
    return pool[access].get(target.name, variant=target.variant, base_url=target.base_url)


def _make_api(access: Access) -> AsyncEnvironmentsAPI:
    from openreward import AsyncOpenReward
    from openreward.api.environments.client import AsyncEnvironmentsAPI

    if access.target.base_url is not None:
        # Created directly, because the SDK's client would read the key from the environment and send it.
        return AsyncEnvironmentsAPI(base_url=access.target.base_url, api_key=access.key)  # pyright: ignore[reportArgumentType]  without a key it sends none
    return AsyncOpenReward(api_key=access.key).environments


async def _close_at_the_end(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until this task is cancelled, by the end of the run or its event loop, and close the clients."""
    try:
        await asyncio.Event().wait()
    finally:
        _keepers.pop(loop, None)
        for api in _pools.pop(loop, {}).values():
            with suppress(OSError):
                await api.aclose()
