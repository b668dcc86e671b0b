"""Routes of protocols: from an HTTP request to the session of its rollout and back.

Invariant: a request whose client has left, or whose rollout has ended, samples no longer. An error says that clients
must not repeat the request, because it would be another turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlkit.endpoint.anthropic_messages import AnthropicMessage
from rlkit.endpoint.openai_chat import ChatCompletion
from rlkit.endpoint.openai_responses import ResponseRequest
from rlkit.endpoint.protocol import Exchange
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.endpoint.session import Session
from rlkit.types import Reply

BODY_BYTES = 16 << 20  # limit of a request's body
SIGNS_MAX: Mapping[str, int] = {"{[": 100_000, ",": 500_000}
"""Limits of the brackets and commas in a request's body, and so of the objects and values, in texts as well: to read as
many takes a second, in which nothing else runs. A text with as many commas is longer than any context."""

BODY_S = 60.0  # limit for the arrival of a request's body
KEEP_ALIVE_S = 10.0  # time between two signs of life of a stream that waits for its reply
OPENING_PASSES = 10
"""Passes of the event loop before a stream opens. A request that fails before it is sampled needs six, and so gets an
HTTP status."""

_MODEL = {"object": "model", "created": 0, "owned_by": "rlkit", "type": "model", "created_at": "1970-01-01T00:00:00Z"}
"""Fields of a model, those of OpenAI first; the time of its making is unknown."""

EXCHANGES: Sequence[type[Exchange]] = (ChatCompletion, ResponseRequest, AnthropicMessage)
"""Requests of the protocols that endpoints speak."""

type FindSession = Callable[[str], Session]  # returns the session of an API key, or raises a `Rejection`


def make_routes(find_session: FindSession, list_models: Callable[[], Sequence[str]]) -> list[Route]:
    """Return the routes of all protocols, and those that list the names of models and count Anthropic's tokens."""

    async def list_all(_: Session, request: Request) -> Response:
        models = [{"id": name, **_MODEL, "display_name": name} for name in list_models()]
        return JSONResponse({"object": "list", "data": models, "has_more": False})

    exchanges = [("POST", cls.path, partial(_answer, cls)) for cls in EXCHANGES]
    counting = ("POST", f"{AnthropicMessage.path}/count_tokens", _count_tokens)
    routes = [("GET", "/v1/models", list_all), counting, *exchanges]
    return [Route(path, _with_session(find_session, answer), methods=[method]) for method, path, answer in routes]


def encode_rejection(rejection: Rejection) -> Response:
    """Return the response of a rejected request."""
    return JSONResponse(rejection.encode(), rejection.status, {"x-should-retry": "false"})


def _with_session(
    find_session: FindSession, answer: Callable[[Session, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            return await answer(find_session(_read_key(request.headers)), request)
        except Rejection as rejection:
            return encode_rejection(rejection)

    return respond


def _read_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, as clients of OpenAI or Anthropic send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def _answer(protocol: type[Exchange], session: Session, request: Request) -> Response:
    exchange = parse_body(await _read_body(request, session), protocol)
    replies = asyncio.ensure_future(session.respond(exchange))
    is_streaming = False
    try:
        if exchange.stream:
            for _ in range(OPENING_PASSES):
                await asyncio.sleep(0)
            if not replies.done() or replies.exception() is None:
                is_streaming = True
                return StreamingResponse(_stream(exchange, replies), media_type="text/event-stream")
        # Not a JSONResponse: numbers that are not finite, which a request may hold, would fail it after its turn.
        return Response(json.dumps(exchange.encode(await _finish(replies, request))), media_type="application/json")
    finally:
        if not is_streaming:
            replies.cancel()


async def _count_tokens(session: Session, request: Request) -> Response:
    exchange = parse_body(await _read_body(request, session), AnthropicMessage)
    counting = asyncio.ensure_future(session.count_tokens(exchange))
    return JSONResponse({"input_tokens": await _finish(counting, request)})


async def _finish[T](work: asyncio.Future[T], request: Request) -> T:
    """Return the result of the work of a request; cancel it, and raise a Rejection, once the client is gone."""
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Rejection(400, "the client is gone")
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


async def _stream(exchange: Exchange, replies: asyncio.Future[Sequence[Reply]]) -> AsyncGenerator[str]:
    """Yield server-sent events: a reply comes as a whole, because services return whole completions."""
    try:
        yield "".join(exchange.encode_opening())
        while not (await asyncio.wait([replies], timeout=KEEP_ALIVE_S))[0]:
            yield exchange.keep_alive
        try:
            yield "".join(exchange.encode_events(replies.result()))
        except Rejection as rejection:
            for event in exchange.encode_error_events(rejection):
                yield event
    finally:
        replies.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, session: Session) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Rejection(415, f"Content-Encoding {encoding!r} is not supported; send the body as it is")
    body, size = bytearray(), int(request.headers.get("content-length", BODY_BYTES))
    try:
        async with asyncio.timeout(BODY_S), session.reserve_arrival(min(size, BODY_BYTES)):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise Rejection(413, f"the body is larger than {BODY_BYTES} bytes")
    except TimeoutError:
        raise Rejection(408, f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Rejection(400, "the client is gone") from None
    for signs, limit in SIGNS_MAX.items():
        # Escaped, too: the arguments of tool calls are JSON in strings.
        spellings = [form for sign in signs for form in (sign, f"\\u{ord(sign):04x}", f"\\u{ord(sign):04X}")]
        if sum(body.count(form.encode()) for form in spellings) > limit:
            raise Rejection(413, f"the body has more than {limit} of the signs {' '.join(signs)}")
    return bytes(body)
