"""Hostile clients at an endpoint: malformed, endless and slow requests are errors, and other requests go on."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rlkit.endpoint import Endpoint, http_responses, http_server, session
from rlkit.endpoint.http_responses import EXCHANGES
from rlkit.endpoint.protocol import Exchange
from rlkit.testing import ScriptedPolicy
from tests.limits import HANG_S

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1e99,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"type": "text"},
    {"type": 3},
    [{"a": 1}],
]
USER = {"role": "user", "content": "begin"}
TOOL = {"type": "function", "name": "f", "parameters": {}, "function": {"name": "f"}, "input_schema": {}}
WRONG = list(range(1000))
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER],
    "input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
    "tools": [TOOL],
    "max_tokens": 5,
    "max_output_tokens": 5,
    "temperature": 1,
    "stream": False,
}


def break_value(rng: random.Random, value: Any) -> Any:
    """Return a value with a part replaced, removed, or nested deeply."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: break_value(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], break_value(rng, value[index]), *value[index + 1 :]]
    return rng.choice(VALUES)


def make_body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(100))
    if kind < 0.12:
        return b"[" * 100_000
    body = json.dumps(break_value(rng, BODY)).encode()
    return body[: rng.randrange(len(body))] if kind < 0.2 else body


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_errors_of_the_client(count: int) -> None:
    rng = random.Random(7)
    policy = ScriptedPolicy(lambda prompt: "fine")

    async def main() -> None:
        async with policy.endpoint() as endpoint, httpx.AsyncClient(timeout=60) as client:

            async def send(path: str, body: bytes) -> None:
                key = endpoint.key if rng.random() < 0.95 else "other"
                headers = {"x-api-key": key} if rng.random() < 0.5 else {"authorization": f"Bearer {key}"}
                response = await client.post(f"{endpoint.root}{path}", content=body, headers=headers)
                assert response.status_code == 200 or 400 <= response.status_code < 500, (path, body[:2000])
                assert "error" in response.json() or response.status_code == 200

            for _ in range(count // 20):
                await asyncio.gather(*[send(rng.choice(EXCHANGES).path, make_body(rng)) for _ in range(20)])
            await check_alive(endpoint, client)

    asyncio.run(main())


async def check_alive(endpoint: Endpoint, client: httpx.AsyncClient) -> None:
    headers = {"authorization": f"Bearer {endpoint.key}"}
    response = await client.post(f"{endpoint.url}/chat/completions", json={"messages": [USER]}, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("protocol", EXCHANGES)
@pytest.mark.parametrize(
    "body",
    [
        {"messages": WRONG, "input": WRONG},
        {"messages": [{**USER, "content": WRONG}], "input": [{**USER, "content": WRONG}]},
        {"tools": WRONG},
        {"stop": WRONG, "stop_sequences": WRONG, "include": WRONG},
        {"system": WRONG, "stream_options": dict.fromkeys(map(str, WRONG), 7), "tools": [{"tools": WRONG}]},
    ],
)
def test_a_list_of_wrong_items_is_one_error(protocol: type[Exchange], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        protocol.model_validate_json(json.dumps({"messages": 0, "input": 0, **body}))
    assert caught.value.error_count() < 10


def test_a_body_waits_for_those_that_arrive_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ARRIVING_BYTES", 1000)
    body = json.dumps({"messages": [USER]}).encode().ljust(700)

    async def main() -> bytes:
        async with ScriptedPolicy(["fine"] * 3).endpoint() as endpoint, httpx.AsyncClient() as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {endpoint.key}\r\n"
            port = httpx.URL(endpoint.root).port
            assert port is not None
            (_, first), (reader, second) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            first.write(f"{head}content-length: 700\r\n\r\n{{".encode())
            await asyncio.sleep(0.2)
            second.write(f"{head}content-length: 700\r\n\r\n".encode() + body)
            await check_alive(endpoint, client)  # smaller ones still fit
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.3)
            first.close()
            async with asyncio.timeout(HANG_S):
                answer = await reader.readuntil(b"}}")
            second.close()
            return answer

    assert b" 200 " in asyncio.run(main()).split(b"\r\n", 1)[0]


@pytest.mark.parametrize(
    ("beginning", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ", b"408"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer %s\r\ncontent-length: 9\r\n\r\n{", b"408"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"y" * 100_000, b"431"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer %s\r\ncontent-length: -1\r\n\r\n", b"400"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer %s\r\nconnection: close\r\n"
            b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\n{",
            b"415",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"400"),
    ],
)
def test_a_slow_or_endless_request_ends_while_others_go_on(
    beginning: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_responses, "BODY_S", 0.5)
    monkeypatch.setattr(http_server, "HEADER_S", 0.5)

    async def main() -> bytes:
        async with ScriptedPolicy(["fine"]).endpoint() as endpoint, httpx.AsyncClient() as client:
            port = httpx.URL(endpoint.root).port
            assert port is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(beginning.replace(b"%s", endpoint.key.encode()))
            await check_alive(endpoint, client)
            async with asyncio.timeout(HANG_S):
                answer = await reader.read()
            writer.close()
            return answer.split(b"\r\n", 1)[0]

    assert status in asyncio.run(main())


@pytest.mark.parametrize("kind", ["unread stream", "unread reply", "unfinished upload"])
def test_the_end_of_a_rollout_with_an_open_request_is_quiet(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = ScriptedPolicy(["y" * 10_000_000], max_tokens=1 << 24)  # more than the buffers of the connection
    body = json.dumps({"messages": [USER], "stream": kind == "unread stream"})

    async def main() -> None:
        async with policy.endpoint() as endpoint:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", httpx.URL(endpoint.root).port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {endpoint.key}\r\n"
            length = len(body) + (kind == "unfinished upload")
            client.sendall(f"{head}host: x\r\ncontent-length: {length}\r\n\r\n{body}".encode())
            async with asyncio.timeout(HANG_S):
                while not policy.turns and kind != "unfinished upload":
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
        client.close()

    asyncio.run(main())
    assert not caplog.records


def test_a_process_without_descriptors_reports_it_once_and_answers_later(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, reports = socket.socket.accept, list[object]()

    def fail_until_the_loop_goes_on(listener: socket.socket) -> object:
        if not is_over.is_set():
            asyncio.get_running_loop().call_soon(is_over.set)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
        async with ScriptedPolicy(["fine"]).endpoint() as endpoint, httpx.AsyncClient(timeout=60) as client:
            monkeypatch.setattr(socket.socket, "accept", fail_until_the_loop_goes_on)
            await check_alive(endpoint, client)

    is_over = asyncio.Event()
    asyncio.run(main())
    assert reports == ["socket.accept() out of system resource"]
