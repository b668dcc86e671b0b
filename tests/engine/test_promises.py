"""Answers: when one counts as delivered, and what is counted of it."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from rlkit.engine import EngineServer
from rlkit.engine.server import futures
from rlkit.engine.server.futures import Promises, json_answer
from tests.limits import HANG_S

from .conformance import ask, open_session
from .test_sessions import on_server, service_of


def test_the_newest_result_is_kept_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_DELIVERED_BYTES_MAX", 100)
    table = Promises()
    for name in ("a", "b"):
        promise, _ = table.get_or_make(name)
        promise.resolve(json_answer({"n": "x" * 1000}))
        table.mark_delivered(promise, 1000)
        assert table.get(name) is promise
    assert table.get("a") is None


def test_a_result_counts_with_the_size_of_its_promise() -> None:
    table = Promises()
    promises = [table.get_or_make(f"s:train:0#{i}")[0] for i in range(1000)]
    for promise in promises:
        promise.resolve(json_answer({}))
    assert promises[0].unfetched.bytes >= 1000 * 2000
    for promise in promises[:500]:
        table.mark_delivered(promise, 2)
    for promise in promises[500:]:
        table.forget(promise.request_id)
    assert promises[0].unfetched.bytes == 0


@pytest.mark.parametrize("leaves", [True, False])
def test_a_result_counts_as_delivered_only_if_a_client_received_it(server: EngineServer, leaves: bool) -> None:
    session_id, service = open_session(server), service_of(server)
    name = f"{session_id}:never"
    promise, _ = on_server(server, lambda: service.promises.get_or_make(name))
    body, address = json.dumps({"request_id": name}), urlsplit(server.url)
    head = ["POST /api/v1/retrieve_future HTTP/1.1", "Host: x", f"X-API-Key: {server.api_key}"]
    with socket.create_connection((str(address.hostname), address.port), timeout=HANG_S) as asking:
        asking.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
        while not promise._wakers:  # pyright: ignore[reportPrivateUsage] until it is waited for
            time.sleep(0.01)
        if leaves:
            asking.close()
            ask(server, "healthz", method="GET")  # by now the server has seen that the connection is closed
        promise.resolve(json_answer({}))
        if not leaves:
            assert asking.recv(1000).startswith(b"HTTP/1.1 200")
        while promise._wakers:  # pyright: ignore[reportPrivateUsage] as above
            time.sleep(0.01)
    ask(server, "healthz", method="GET")
    assert (name in service.promises._delivered) != leaves  # pyright: ignore[reportPrivateUsage] it is not seen outside
