"""SDK of OpenReward, with patches for its defects.

A patch is not applied if the SDK has moved its code, or if a probe (of the parser and of blocks) shows no defect.

    stream parser     loses spaces between the chunks of a long answer
    tool calls        retried after a failure, although the tool may already have run
    prompt requests   retried after a failure, although a request may reset the environment
    content blocks    dropped if their type is unknown

Other defects (leaked sessions, missing time limits, an API key sent to any server) are handled in `session` and
`clients`.

Invariant: importing rlkit does not import the SDK, which takes seconds.
"""

from __future__ import annotations

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

from rlkit._util.threads import run_in_new_loop
from rlkit.envs.openreward.connection.faults import BUSY

NEWEST_TESTED = "0.1.167"  # newest version of the SDK that rlkit was tested with
_QUIET = {"OPENREWARD_DISABLE_UPDATE_CHECK": "1", "OPENREWARD_LOG_LEVEL": "ERROR"}
"""Environment variables that stop the SDK from querying a package registry and logging to stdout on import."""

_HTTP_MODULE = "openreward.api._session.http"
_CLIENT_MODULE = "openreward.api.environments.client"

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
    for patch in (patch_parser, patch_tool_calls, patch_prompts, patch_blocks):
        try:
            patch()
        except (ImportError, AttributeError, TypeError) as error:
            _log.warning(
                "openreward %s differs from the version that rlkit was tested with (%s), so %s is not applied: %s",
                version("openreward"),
                NEWEST_TESTED,
                patch.__name__,
                error,
            )
    return sdk


def patch_parser() -> None:
    """Replace the stream parser if it loses spaces."""
    module = import_module(_HTTP_MODULE)
    if not _keeps_spaces(cast("_Parser", module._parse_sse_events)):
        setattr(module, "_parse_sse_events", parse_events)  # noqa: B010  private name of the SDK's module


def patch_tool_calls() -> None:
    """Disable retries of tool calls."""
    module = import_module(_CLIENT_MODULE)
    request = cast("_Request", module.resumable_sse)
    if "resumable_only" not in inspect.signature(request).parameters:
        raise TypeError("requests have no option resumable_only")

    async def patched_request(client: object, path: str, *args: object, **options: object) -> object:
        if path.endswith("/call"):
            # Retry only calls to which the server has assigned an id, because it resumes these without another run.
            options.setdefault("resumable_only", True)
        return await request(client, path, *args, **options)

    setattr(module, "resumable_sse", patched_request)  # noqa: B010  private name of the SDK's module


def patch_prompts() -> None:
    """Disable retries of prompt requests, except those that were not executed."""
    from tenacity import retry_if_exception

    module, http = import_module(_CLIENT_MODULE), import_module(_HTTP_MODULE)
    request = cast("_Request", module.request_retryable)
    retry_with = http._request_retryable_env_server.retry_with
    request_without_retry = cast("_Request", retry_with(retry=retry_if_exception(_was_not_executed)))

    async def patched_request(client: object, method: str, path: str, *args: object, **options: object) -> object:
        chosen = request_without_retry if path.endswith(("/prompt", "/messages")) else request
        return await chosen(client, method, path, *args, **options)

    setattr(module, "request_retryable", patched_request)  # noqa: B010  private name of the SDK's module


def _was_not_executed(error: BaseException) -> bool:
    """Return whether a request was not executed, because the server was busy or not started."""
    return getattr(error, "status", None) == BUSY or bool(getattr(error, "backend_starting", False))


@dataclass(frozen=True)
class UnknownBlock:
    """Part of a message with an unknown type."""

    type: str


def patch_blocks() -> None:
    """Keep blocks of unknown types as `UnknownBlock`, if the SDK drops them."""
    module = import_module(_CLIENT_MODULE)
    read = cast("_Reader", module._parse_blocks)
    if read([{"type": "rlkit-unknown"}]):
        return

    def all_blocks(raw: Sequence[Mapping[str, object]]) -> list[object]:
        return [parsed for block in raw for parsed in read([block]) or [UnknownBlock(str(block.get("type")))]]

    setattr(module, "_parse_blocks", all_blocks)  # noqa: B010  private name of the SDK's module


async def parse_events(response: _Stream) -> AsyncIterator[tuple[str, str]]:
    """Yield the name and data of each server-sent event, without the one optional space after the colon."""
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

    return run_in_new_loop(parsed()) == [("chunk", "  two")]
