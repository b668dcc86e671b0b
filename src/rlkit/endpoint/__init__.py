"""Endpoints: addresses at which the policy of a rollout answers the requests of any client.

Invariant: a request is one turn of the policy, recorded with its exact tokens. An endpoint is reached by its own key,
from this machine only unless its host is named, and is dead after its block.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlkit.errors import LimitReached

if TYPE_CHECKING:
    from rlkit.endpoint.session import ChatPolicy, Session


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of a rollout's policy."""

    root: str  # base address for clients of Anthropic, `http://127.0.0.1:PORT`
    key: str = field(repr=False)  # API key of the rollout, a secret of its own
    _session: Session | None = field(default=None, repr=False)  # None for an address that nothing serves

    @property
    def url(self) -> str:
        """Base address for clients of OpenAI, `http://127.0.0.1:PORT/v1`."""
        return f"{self.root}/v1"

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables in which clients look for the address and the key."""
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.key,
        }

    @property
    def limit(self) -> LimitReached | None:
        """The first limit of the rollout that a request met."""
        return None if self._session is None else self._session.limit


@asynccontextmanager
async def open_endpoint(
    policy: ChatPolicy, *, host: str | None = None, max_turns: int | None = None
) -> AsyncGenerator[Endpoint]:
    """Serve a policy on loopback until the end of the block; running requests are cancelled there.

    ::

        async with policy.endpoint() as endpoint:
            client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key)

    Each request is a turn, as of `Policy.chat`.

    Args:
        host: name or address of this machine for clients on others; the endpoint then listens on all interfaces.
        max_turns: limit of the replies, in addition to those of the policy.

    Raises:
        ServiceError, MissingError: a request failed so; raised at the end of the block, in place of what the client
            made of it.
        EnvironmentFault: likewise, if the client's messages have no reply, as a text model has none to an image.
    """
    from rlkit.endpoint.server import ALL_INTERFACES, LOOPBACK, serve_session
    from rlkit.endpoint.session import RolloutSession

    session = RolloutSession(policy, max_turns=max_turns)
    try:
        async with serve_session(session, ALL_INTERFACES if host else LOOPBACK) as (port, key):
            yield Endpoint(f"http://{host or LOOPBACK}:{port}", key, session)
    finally:
        if session.fault is not None and not isinstance(sys.exception(), asyncio.CancelledError):
            raise session.fault
