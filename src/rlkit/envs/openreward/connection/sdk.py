"""SDK of OpenReward, with patches for its defects.

What is replaced is replaced only while a look at it says that it is broken, and while it has the shape that is known:
with a version that has mended it itself, or has moved it, nothing is touched.

    stream parser     loses spaces at the borders of the pieces that a long answer comes in
    calls of tools    made again after a failure, though the tool may have run
    prompts           asked for again after a failure, though environments begin anew when they are asked
    blocks            passed over where their type is not known

What is broken besides (sessions that stay behind, missing time limits, a key that is sent to any server) is dealt with
where sessions are opened; see `session` and `clients`.

Invariant: importing rlkit does not import the SDK, which takes seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast

NEWEST_TESTED = "0.1.167"
"""Newest version of the SDK that was checked."""

_QUIET = {"OPENREWARD_DISABLE_UPDATE_CHECK": "1", "OPENREWARD_LOG_LEVEL": "ERROR"}
"""Variables set before the import: it would query a package registry, and log to stdout."""

_HTTP = "openreward.api._session.http"
_CLIENT = "openreward.api.environments.client"

_BUSY = 429

_log = logging.getLogger("rlkit.openreward")


class _Stream(Protocol):
    @property
    def content(self) -> AsyncIterator[bytes]: ...


type _Parser = Callable[[_Stream], AsyncIterator[tuple[str, str]]]
type _Request = Callable[..., Awaitable[object]]
type _Reader = Callable[[Sequence[Mapping[str, object]]], list[object]]


@cache
def load() -> ModuleType:
    """Return the SDK, imported and patched; the first import takes seconds."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    sdk = import_module("openreward")
    for mend in (mend_parser, mend_calls, mend_prompts, mend_blocks):
        try:
            mend()
        except (ImportError, AttributeError, TypeError) as error:
            _log.warning(
                "openreward %s is not the version that rlkit knows (%s), and is used as it is: %s",
                version("openreward"),
                NEWEST_TESTED,
                error,
            )
    return sdk


def mend_parser() -> bool:
    """Replace the stream parser if it loses spaces; return whether it did."""
    module = import_module(_HTTP)
    if _keeps_spaces(cast("_Parser", module._parse_sse_events)):
        return False
    setattr(module, "_parse_sse_events", parse_events)  # noqa: B010  of another's module
    return True


def mend_calls() -> bool:
    """Have calls of tools made once, if the SDK makes them again; return whether it did."""
    module = import_module(_CLIENT)
    request = cast("_Request", module.resumable_sse)
    if getattr(request, "once", False):
        return False
    if "resumable_only" not in inspect.signature(request).parameters:
        raise TypeError("requests have no option resumable_only")

    async def once(client: object, path: str, *args: object, **options: object) -> object:
        if path.endswith("/call"):
            # Only a call that has a number yet can be taken up again without running the tool again.
            options.setdefault("resumable_only", True)
        return await request(client, path, *args, **options)

    once.once = True  # pyright: ignore[reportFunctionMemberAccess]  seen by the next look
    setattr(module, "resumable_sse", once)  # noqa: B010  of another's module
    return True


def mend_prompts() -> bool:
    """Have prompts asked for once, if the SDK asks again; return whether it did."""
    from tenacity import retry, retry_if_exception

    module, http = import_module(_CLIENT), import_module(_HTTP)
    request = cast("_Request", module.request_retryable)
    if getattr(request, "once", False):
        return False
    request_once = cast(
        "_Request",
        retry(
            retry=retry_if_exception(_untouched),
            wait=http._env_server_wait,
            stop=http._env_server_stop,
            reraise=True,
        )(http._do_request),
    )

    async def once(client: object, method: str, path: str, *args: object, **options: object) -> object:
        chosen = request_once if path.endswith(("/prompt", "/messages")) else request
        return await chosen(client, method, path, *args, **options)

    once.once = True  # pyright: ignore[reportFunctionMemberAccess]  seen by the next look
    setattr(module, "request_retryable", once)  # noqa: B010  of another's module
    return True


def _untouched(error: BaseException) -> bool:
    """Tell whether a server was busy or not started, so that nothing was executed."""
    return getattr(error, "status", None) == _BUSY or bool(getattr(error, "backend_starting", False))


@dataclass(frozen=True)
class UnknownBlock:
    """Part of a message with an unknown type."""

    type: str


def mend_blocks() -> bool:
    """Have blocks of unknown types kept, if the SDK drops them; return whether it did."""
    module = import_module(_CLIENT)
    read = cast("_Reader", module._parse_blocks)
    if read([{"type": "rlkit-unknown"}]):
        return False

    def all_blocks(raw: Sequence[Mapping[str, object]]) -> list[object]:
        return [parsed for block in raw for parsed in read([block]) or [UnknownBlock(str(block.get("type")))]]

    setattr(module, "_parse_blocks", all_blocks)  # noqa: B010  of another's module
    return True


async def parse_events(response: _Stream) -> AsyncIterator[tuple[str, str]]:
    """Yield the name and data of each event; as the standard has it, one space after the colon is not part of them."""
    event, data = "", list[str]()
    async for raw in response.content:
        line = raw.decode("utf-8", "ignore").rstrip("\r\n")
        if not line:
            if event:
                yield event, "\n".join(data)
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "data":
            data.append(value)


def _keeps_spaces(parser: _Parser) -> bool:
    async def lines() -> AsyncIterator[bytes]:
        for line in (b"event: chunk\r\n", b"data:   two\r\n", b"\r\n"):
            yield line

    async def parsed() -> list[tuple[str, str]]:
        return [event async for event in parser(cast("_Stream", SimpleNamespace(content=lines())))]

    return _run(parsed) == [("chunk", "  two")]


def _run[T](function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine that waits for nothing, whether or not an event loop runs in this thread."""
    coroutine = function().__await__()
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    raise RuntimeError("it waits for something")


def blocking[T](function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end on an event loop of its own, in a thread of its own.

    An environment is loaded by an ordinary function, which may be called while an event loop runs.
    """
    from concurrent.futures import ThreadPoolExecutor

    async def run() -> T:
        return await function()

    with ThreadPoolExecutor(1, thread_name_prefix="rlkit-openreward") as pool:
        return pool.submit(asyncio.run, run()).result()
