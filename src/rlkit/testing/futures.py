"""Answers of the simulated service: they come when they are due, or go wrong as they should.

Invariant: work whose answer fails is not done.
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
    """Stands in for `tinker.APIFuture`: the request is on its way, and this is awaited.

    What a service does is no work of the rollout that asks, so it has a context of its own, as in the SDK's thread.
    """

    def __init__(self, answer: Awaitable[T]) -> None:
        self._answer = Context().run(asyncio.ensure_future, answer)
        self._answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def __await__(self) -> Generator[Any, None, T]:
        return self._answer.__await__()


def resolve_now[T](value: T) -> SimulatedFuture[T]:
    """An answer that is there already."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return SimulatedFuture(future)


def resolve_later[T](world: World, call: str, seconds: float, work: Callable[[], T]) -> SimulatedFuture[T]:
    """An answer after so many seconds, unless something goes wrong; work that fails is not done."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    world.calls[call] += 1
    kind = world.fault(call, loop.time())

    def answer() -> None:
        if future.done():
            return
        if kind is None:
            try:
                future.set_result(work())
            except Exception as error:  # the caller's mistake, and the caller is told
                future.set_exception(error)
        elif kind == "cancel":
            future.cancel()
        elif kind != "hang":
            future.set_exception(_sdk_error(kind))

    loop.call_later(seconds, answer, context=Context())
    return SimulatedFuture(future)


def _sdk_error(kind: FaultKind) -> tinker.TinkerError:
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
    """What the SDK raises for a path that leads nowhere."""
    return tinker.NotFoundError(message, response=httpx.Response(404, request=_REQUEST), body=None)
