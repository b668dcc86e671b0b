"""Chats with the models of an engine, in the protocols of the endpoint.

Invariant: a request is sampled from the model that it names: a base model, or the `tinker://` path of weights. Nothing
is recorded.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, override

from rlkit.endpoint.rejection import Rejection, explain
from rlkit.endpoint.session import ChatPolicy, Session
from rlkit.errors import MissingError, RlkitError, UsageError
from rlkit.serving.model import ServedModel, open_model
from rlkit.types import Sampling

if TYPE_CHECKING:
    from starlette.routing import Route

    from rlkit.engine import EngineServer
    from rlkit.service import Service

MODELS_MAX = 32  # number of models whose samplers and formats are kept
MAX_TOKENS = 1 << 15
"""Limit of the tokens of a reply; the context may leave fewer."""


class ChatModels(Session):
    """The chats at an engine; each request of a client is a conversation of its own::

        with EngineServer(extension=ChatModels) as engine:
            client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key=engine.api_key)
            client.chat.completions.create(model="tinker://…", messages=[…])

    Clients of Anthropic take `engine.url`.
    """

    def __init__(self, engine: EngineServer) -> None:
        super().__init__()
        self._engine = engine
        self._exits = AsyncExitStack()
        self._service: asyncio.Task[Service] | None = None
        self._models = OrderedDict[str, asyncio.Task[ServedModel]]()

    def routes(self) -> Sequence[Route]:
        """Return the routes of all protocols."""
        from rlkit.endpoint.http_responses import make_routes

        return make_routes(self._find_session, lambda: list(dict.fromkeys([*self._engine.models, *self._models])))

    @override
    async def close(self) -> None:
        """Cancel the running requests and end the connection to the engine."""
        await super().close()
        await self._exits.aclose()

    def _find_session(self, key: str) -> Session:
        if not hmac.compare_digest(key.encode(), self._engine.api_key.encode()):
            raise Rejection(401, "the API key is not that of the engine", code="invalid_api_key")
        return self

    @override
    async def find_policy(self, model: str) -> ChatPolicy:
        """Return a policy of a model; a `Rejection` if there is none of that name."""
        served = await self._get_model(model)
        return served.make_policy(Sampling(MAX_TOKENS), seed=lambda turn: secrets.randbits(31))

    async def _get_model(self, name: str) -> ServedModel:
        """Return a model, which is loaded at its first request."""
        if (task := self._models.get(name)) is None:
            task = self._models[name] = asyncio.create_task(self._load(name))
            if len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)
        self._models.move_to_end(name)
        try:
            return await asyncio.shield(task)  # other requests wait for it too
        except (MissingError, UsageError) as error:
            raise Rejection(404, f"model {name!r}: {error}", code="not_found", field="model") from error
        except RlkitError as error:
            raise explain(error) from error

    async def _load(self, name: str) -> ServedModel:
        try:
            self._service = self._service or asyncio.create_task(self._connect())
            return await open_model(await self._service, name, with_weights=True)
        except BaseException:
            self._models.pop(name, None)  # the next request tries again
            raise

    async def _connect(self) -> Service:
        from rlkit.tinker_client.connector import ServiceAddress
        from rlkit.tinker_client.sdk import TinkerService

        service = TinkerService(ServiceAddress(base_url=self._engine.url, api_key=self._engine.api_key, embedded=True))
        return await self._exits.enter_async_context(service)
