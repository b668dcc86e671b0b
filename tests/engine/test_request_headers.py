"""Headers that never end, over raw sockets: the server holds little of them, says why, and closes the connection."""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tinker

from rlkit.endpoint import http_server
from rlkit.engine import EngineServer

HOST = b"host: engine\r\n"
GET = b"GET /api/v1/healthz HTTP/1.1\r\n" + HOST
POST = b"POST /api/v1/create_session HTTP/1.1\r\n" + HOST
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
MIB = 1 << 20
SENT_MAX = 96 * MIB


def connected(server: EngineServer) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=60)


def resident_bytes() -> int:
    """Memory of this process, in which the server runs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def send_until_refused(connection: socket.socket, parts: Iterator[bytes]) -> tuple[int, str]:
    """Send until the headers are refused or the connection is closed; how many bytes were sent, and what came."""
    sent, received = 0, b""
    try:
        for part in parts:
            while select.select([connection], [], [], 0)[0]:
                more = connection.recv(MIB)
                received += more
                if not more or b"HTTP/1.1 431 " in received:
                    return sent, (received + rest_of(connection)).decode()
            if sent > SENT_MAX:
                break
            connection.sendall(part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent, received.decode()


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    try:
        while part := connection.recv(MIB):
            received += part
    except ConnectionResetError:
        pass
    return received


ENDLESS = {
    "a header": chain([GET + b"x: "], repeat(b"a" * MIB)),
    "a name": chain([GET], repeat(b"a" * MIB)),
    "a path": chain([b"GET /"], repeat(b"a" * MIB)),
    "headers": chain([GET], (b"x-%d: y\r\n" % number for number in count())),
    "empty lines": repeat(b"\r\n" * 1000),
}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_headers_are_rejected_before_they_are_buffered(name: str, server: EngineServer) -> None:
    before = resident_bytes()
    with connected(server) as connection:
        sent, reply = send_until_refused(connection, ENDLESS[name])
        grown = resident_bytes() - before
    assert sent < SENT_MAX
    assert grown < 48 * MIB
    assert reply.startswith("HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert "connection: close" in reply
    assert reply.endswith(("longer than 65536 bytes", "more than 128 headers"))


@pytest.mark.parametrize(
    "part", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 100, b"1;x="], ids=["trailer", "trailers", "chunk"]
)
def test_a_body_whose_framing_never_ends_closes_the_connection(part: bytes, server: EngineServer) -> None:
    key = b"x-api-key: " + server.api_key.encode() + b"\r\n"
    more = b"x: y\r\n" * 10_000 if part.endswith(b"\n") else b"a" * MIB
    with connected(server) as connection:
        sent, reply = send_until_refused(connection, chain([POST + key + CHUNKED + part], repeat(more)))
    assert sent < SENT_MAX
    assert reply == ""  # the request waits for its body, and has no answer yet


def test_slow_headers_are_rejected(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.5)
    with connected(server) as connection:
        connection.sendall(GET)
        while not select.select([connection], [], [], 0.02)[0]:
            connection.sendall(b"x")
        assert rest_of(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_connection_without_a_request_is_closed(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.2)
    with connected(server) as connection:
        assert rest_of(connection) == b""


def test_many_and_long_headers_within_the_limits_are_accepted_for_any_chunking(server: EngineServer) -> None:
    key = b"x-api-key: " + server.api_key.encode() + b"\r\n"
    many = b"".join(b"x-%d: y\r\n" % number for number in range(100))
    long = b"cookie: " + b"a" * 48_000 + b"\r\n"
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for request in (GET + key + many + b"\r\n", GET + long + key + b"\r\n", GET + key + b"\r\n"):
            for start in range(0, len(request), 1 + len(request) // 300):
                connection.sendall(request[start : start + 1 + len(request) // 300])
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(MIB)
            assert received.startswith(b"HTTP/1.1 200 ")


def test_the_sdk_works_beside_a_connection_that_never_ends(server: EngineServer, rest: tinker.RestClient) -> None:
    with connected(server) as connection:
        connection.sendall(GET)
        assert rest.get_server_capabilities().result().supported_models
