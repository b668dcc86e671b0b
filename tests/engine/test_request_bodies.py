"""Bodies of requests: what is kept of them, and how long they hold anybody up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zstandard
from starlette.requests import Request
from starlette.types import Message

from rlkit.endpoint.rejection import Rejection
from rlkit.engine import EngineServer
from rlkit.engine.server import http_requests
from rlkit.engine.server.http_requests import BodyReader, read_body
from rlkit.engine.server.service import Service
from tests.limits import HANG_S

from .conformance import ask, open_model, open_session, train_request

TEXT = [72, 101, 108, 108, 111]


def coming(pieces: Iterator[bytes], **headers: str) -> Request:
    """A request whose body comes in pieces."""

    async def receive() -> Message:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": encoded}, receive)


def cut(body: bytes, step: int) -> Iterator[bytes]:
    return (body[start : start + step] for start in range(0, len(body), step))


@pytest.mark.parametrize("step", [1, 7, 100, 1000])
def test_the_kept_part_of_an_oversized_body_does_not_depend_on_chunking(step: int) -> None:
    body = bytes(range(200)) * 5
    pieces = cut(body, step)
    with pytest.raises(Rejection, match="larger than 150 bytes") as refusal:
        asyncio.run(read_body(coming(pieces), bytes_max=150))
    assert refusal.value.body == body[:150]
    assert next(pieces, None) is None  # all was read, so that the client comes to read the answer


def test_an_endless_body_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "_DISCARDED_BYTES_MAX", 1000)

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(100)

    with pytest.raises(Rejection, match="larger than 150 bytes"):
        asyncio.run(read_body(coming(endless()), bytes_max=150))


def test_a_request_that_is_too_large_may_be_sent_again(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = open_model(server, open_session(server))
    read = http_requests.read_body

    async def reading(request: Request, *, bytes_max: int) -> bytearray:
        try:
            return await read(request, bytes_max=bytes_max)
        except Rejection as refused:  # as much as had arrived, which is another part each time
            read_sizes.append(len(refused.body) - 5 * len(read_sizes))
            raise Rejection(refused.status, str(refused), body=refused.body[: read_sizes[-1]]) from None

    read_sizes: list[int] = []
    monkeypatch.setattr(http_requests, "read_body", reading)
    with monkeypatch.context() as patch:
        patch.setattr(http_requests, "_BODY_BYTES_MAX", 100)
        for _ in range(3):
            assert (
                ask(server, "forward_backward", train_request(model_id, 1), media_type="application/x-protobuf").status
                == 200
            )
    assert len(set(read_sizes)) == 3
    assert b"larger than 100 bytes" in ask(server, "retrieve_future", {"request_id": f"{model_id}#1"}).body


def test_json_bodies_have_a_smaller_limit(server: EngineServer) -> None:
    session_id = open_session(server)
    long = {"session_id": session_id, "type": "session_heartbeat", "padding": " " * (2 << 20)}
    reply = ask(server, "session_heartbeat", long)
    assert reply.status == 413
    assert "larger than" in reply.json["detail"]
    assert ask(server, "telemetry", long).status == 200  # nobody parses it


def test_a_prompt_that_fills_the_longest_context_is_small_enough() -> None:
    tokens = json.dumps([151_643] * 131_072, separators=(",", ":"))
    assert len(tokens) < http_requests.JSON_BYTES_MAX / 2


def test_a_sampling_request_is_recognised_by_its_bytes(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prints: list[bytes] = []
    sample = Service.sample
    monkeypatch.setattr(
        Service,
        "sample",
        lambda self, request, fingerprint: (prints.append(fingerprint), sample(self, request, fingerprint))[1],
    )
    sampling = {"session_id": open_session(server), "sampling_session_seq_id": 0, "base_model": "llama"}
    sample_body = {
        "sampling_session_id": ask(server, "create_sampling_session", sampling).json["sampling_session_id"],
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]},
        "sampling_params": {"max_tokens": 2},
    }
    assert [ask(server, "asample", sample_body).status for _ in range(2)] == [200, 200]
    assert ask(server, "asample", sample_body | {"num_samples": 3}).status == 400
    assert prints[0] == prints[1] != prints[2]


def test_a_compressed_body_is_unpacked_outside_of_the_servers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    unpack = http_requests.unpack_body

    def unpack_body(body: bytearray, *, bytes_max: int) -> bytes:
        threads.append(threading.current_thread())
        return unpack(body, bytes_max=bytes_max)

    monkeypatch.setattr(http_requests, "unpack_body", unpack_body)
    request = coming(cut(zstandard.compress(b"hello"), 5), content_encoding="zstd")
    assert asyncio.run(BodyReader().read(request)) == b"hello"
    assert threads[0] is not threading.current_thread()


def test_a_stalled_upload_does_not_delay_the_stop(
    resolve: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EngineServer(root=tmp_path, resolve=resolve, device="cpu") as server:
        address = urlsplit(server.url)
        with socket.create_connection((str(address.hostname), address.port), timeout=HANG_S) as upload:
            head = ["POST /api/v1/telemetry HTTP/1.1", "Host: x", f"X-API-Key: {server.api_key}", "Content-Length: 100"]
            upload.sendall("\r\n".join([*head, "", "abc"]).encode())
            while not server._bodies._timeouts:  # pyright: ignore[reportPrivateUsage] that it is being read is not seen outside
                time.sleep(0.01)
            server.stop()
            assert upload.recv(1000).startswith(b"HTTP/1.1 503")
    assert caplog.records == []
