"""Futures of the simulated service, which resolve after a delay or fail with an injected fault.

Invariant: the work of a future that fails with a fault does not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context
from typing import Any

import httpx
import tinker
from tinker import types

from rlkit.testing.world import FaultKind, World

_REQUEST = httpx.Request("POST", "http://simulated")


class SimulatedFuture[T]:
    """Substitute for `tinker.APIFuture`: a sent request.

    The service's work runs in a separate context, as in the SDK's thread, because it is not part of the rollout.
    """

    def __init__(self, result: Awaitable[T]) -> None:
        self._result = Context().run(asyncio.ensure_future, result)
        self._result.add_done_callback(lambda future: None if future.cancelled() else future.exception())

    def __await__(self) -> Generator[Any, None, T]:
        return self._result.__await__()


def resolve_later[T](world: World, call: str, seconds: float, work: Callable[[], T]) -> SimulatedFuture[T]:
    """Return a future that runs `work` after some seconds, or fails with the world's next fault."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    world.calls[call] += 1
    kind = world.next_fault(call, loop.time())

    def resolve() -> None:
        if future.done():
            return
        if kind is None:
            try:
                future.set_result(work())
            except Exception as error:  # the caller's mistake
                future.set_exception(error)
        elif kind == "cancel":
            future.cancel()
        elif kind != "hang":
            future.set_exception(_make_sdk_error(kind))

    loop.call_later(seconds, resolve, context=Context())
    return SimulatedFuture(future)


def _make_sdk_error(kind: FaultKind) -> tinker.TinkerError:
    response = httpx.Response(int(kind) if kind.isdigit() else 500, request=_REQUEST)
    match kind:
        case "429":
            return tinker.RateLimitError("slow down", response=response, body=None)
        case "408":
            return tinker.APITimeoutError(_REQUEST)
        case "500":
            return tinker.InternalServerError("something broke", response=response, body=None)
        case _:
            return tinker.RequestFailedError(
                "the request was lost", request_id="simulated", category=types.RequestErrorCategory.Server
            )


def make_not_found_error(message: str) -> tinker.NotFoundError:
    """Return the SDK's error for a path that does not exist."""
    return tinker.NotFoundError(message, response=httpx.Response(404, request=_REQUEST), body=None)
