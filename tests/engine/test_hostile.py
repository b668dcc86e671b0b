"""Malformed requests by the thousand over one keep-alive connection: each is answered, and the server goes on.

1,000 requests by default; 10,000 with RLKIT_TEST_EXHAUSTIVE=1 in the environment.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import resource
import socket
import threading
from copy import deepcopy
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import tinker
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from rlkit.engine import EngineServer
from rlkit.engine.server import routes
from tests.limits import HANG_S

from .conftest import connect
from .helpers import ce_datum, prompt

REQUESTS = 10_000 if os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1" else 1_000
TEXT = [72, 101, 108, 108, 111]
QUIET_S = 20.0
BATCH = 20
THREADS = 16
"""What pools may grow by; a thread lost for each bad request would be hundreds."""

ODD_NUMBERS = [-1, 0, 1, 2**31, 2**63, -(2**63), 2**200, 1e308, float("nan"), float("inf")]
ODD_TEXTS = ["", "x", "\0", "../..", "é", "a" * 5000]
ODD_CONTAINERS = [[], {}, [[[[]]]], [1, "2", None], {"type": "nothing"}, ["\u2028"] * 50]
ODD_VALUES = [None, True, *ODD_NUMBERS, *ODD_TEXTS, *ODD_CONTAINERS]


def real_bodies(session: str) -> dict[str, dict[str, object]]:
    """A body that each route takes, by path."""
    model, sampler = f"{session}:train:0", f"{session}:sample:0"
    chunks = {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}
    asample = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 2,
        "prompt": chunks,
        "sampling_params": {"max_tokens": 2, "temperature": 0.7, "seed": 1, "top_p": 0.9, "top_k": 5, "stop": ["x"]},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
    }
    return {
        "client/config": {"sdk_version": "0"},
        "client/dynamic_config": {"sdk_version": "0"},
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"},
        "session_heartbeat": {"session_id": session, "type": "session_heartbeat"},
        "telemetry": {"events": [], "session_id": session},
        "get_info": {"model_id": model, "type": "get_info"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/none"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "llama"},
        "asample": asample,
        "retrieve_future": {"request_id": f"{model}#create", "allow_metadata_only": True},
        "cancel_future": {"request_id": f"{sampler}#1"},
        "create_custom_loss": {"session_id": session, "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {}},
        "create_model": {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "llama",
            "lora_config": {"rank": 2, "seed": 0, "train_mlp": True, "train_attn": True, "train_unembed": False},
            "user_metadata": {"a": "b"},
        },
        "load_weights": {
            "session_id": session,
            "model_seq_id": 1,
            "path": f"tinker://{model}/weights/none",
            "optimizer": True,
        },
        "optim_step": {
            "model_id": model,
            "seq_id": 1,
            "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "eps": 1e-8},
        },
        "save_weights": {"model_id": model, "seq_id": 2, "path": "one", "overwrite": False, "ttl_seconds": 3600},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 9, "kind": "snapshot"},
        "unload_model": {"model_id": f"{session}:train:3"},
        "sessions/nobody/finish": {"reason": {"type": "success"}, "detail": None},
    }


GETS = [
    "healthz",
    "get_server_capabilities",
    "samplers/x:sample:0",
    "training_runs",
    "checkpoints",
    "sessions",
    "nowhere",
]


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, part in inner for p in [(*path, key), *leaves(part, (*path, key))]]


def mutated(rng: random.Random, body: dict[str, object]) -> bytes:
    """A real body with some fields replaced, removed or added; or cut, or with bytes changed."""
    copy = json.loads(json.dumps(body))
    for _ in range(rng.randint(0, 3)):
        paths = leaves(copy)
        if not paths:
            break
        *way, last = rng.choice(paths)
        place = copy
        for key in way:
            place = place[key]
        action = rng.choice(["replace", "replace", "remove", "add"])
        if action == "replace":
            place[last] = deepcopy(rng.choice(ODD_VALUES))
        elif action == "remove":
            del place[last]
        else:
            copy[rng.choice(["type", "extra", "seq_id", "model_id", "base_model"])] = deepcopy(rng.choice(ODD_VALUES))
    return mangled(rng, json.dumps(copy).encode())


def mangled(rng: random.Random, body: bytes) -> bytes:
    """Usually as it is; else cut short, or with some bytes changed."""
    how = rng.choice(["whole", "whole", "whole", "cut", "changed"])
    if how == "cut":
        return body[: rng.randint(0, len(body))]
    if how == "changed" and body:
        changed = bytearray(body)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    return body


def train_body(model: str, seq_id: int) -> bytes:
    data = types.ForwardBackwardInput(data=[ce_datum(TEXT)] * 2, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


DEEP = [
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"request_id":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    b"\xff" * 1000,
    b"",
]
ODD_PATHS = ["a" * 9000, "%00", "../../etc/passwd", "samplers/%2e%2e%2f", "?" + "q=1&" * 2000, "%ff%fe"]
KINDS = ["json", "proto", "raw", "deep", "get", "method", "type", "zstd", "url"]

type Request = tuple[str, str, bytes, dict[str, str]]
"""Method, path, body and headers."""


def forged(kind: str, rng: random.Random, session: str) -> Request:
    valid_bodies = real_bodies(session)
    path = rng.choice(sorted(valid_bodies))
    headers = {"Content-Type": "application/json"}
    method, body = "POST", json.dumps(valid_bodies[path]).encode()
    if kind == "json":
        body = mutated(rng, valid_bodies[path])
    elif kind in ("proto", "zstd"):
        path = "forward_backward"
        model = rng.choice([f"{session}:train:0", f"{session}:train:9", "nobody:train:0", ""])
        body = mangled(rng, train_body(model, rng.choice([0, 1, 2, 7, 4000, 2**31 - 1])))
        headers = {"Content-Type": "application/x-protobuf"}
        if kind == "zstd":
            body = mangled(rng, zstandard.compress(body))
            headers["Content-Encoding"] = rng.choice(["zstd", "gzip", "zstd, zstd", ""])
    elif kind == "raw":
        body = rng.randbytes(rng.randint(0, 300))
        path = rng.choice([*valid_bodies, "forward_backward"])
    elif kind == "deep":
        body = rng.choice(DEEP)
    elif kind == "get":
        method, path, body = "GET", rng.choice(GETS), b""
    elif kind == "method":
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"])
        path = rng.choice([*valid_bodies, *GETS, f"training_runs/{session}:train:0/checkpoints/weights/%2e%2e"])
    elif kind == "type":
        headers = {"Content-Type": rng.choice(["", "text/html", "application/x-protobuf", "a/b; charset=\xe9"])}
    else:
        path = rng.choice(ODD_PATHS)
    return method, path, body, headers


class Wire:
    """Connection that is opened again when the server closes it."""

    def __init__(self, server: EngineServer) -> None:
        address = urlsplit(server.url)
        self._host, self._port, self._key = str(address.hostname), address.port, server.api_key
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of the reply."""
        for attempt in (1, 2):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=HANG_S)
            try:
                self._connection.request(method, f"/api/v1/{path}", body, headers | {"X-API-Key": self._key})
                reply = self._connection.getresponse()
                raw = reply.read()
            except (http.client.RemoteDisconnected, ConnectionError):
                self.close()
                if attempt == 2:
                    raise
            else:
                if reply.will_close:
                    self.close()
                return reply.status, raw
        raise AssertionError("unreachable")

    def send(self, raw: bytes) -> bytes:
        """Bytes that need not be HTTP, over a connection of their own; what comes back until it is closed or quiet."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=QUIET_S)
        connection.connect()
        with connection.sock as sock:
            sock.sendall(raw)
            parts: list[bytes] = []
            with contextlib.suppress(OSError):  # the server may have closed it already
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(65536):
                    parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def check_answer(status: int, raw: bytes) -> None:
    assert 200 <= status < 500, (status, raw[:200])
    if status >= 400 and raw.startswith(b"{"):
        assert set(json.loads(raw)) & {"detail", "type"}


@pytest.fixture
def session(server: EngineServer) -> str:
    """A session with a model and a sampling session, made over bare HTTP."""
    wire = Wire(server)
    headers = {"Content-Type": "application/json"}
    bodies = real_bodies("")
    _, raw = wire.ask("POST", "create_session", json.dumps(bodies["create_session"]).encode(), headers)
    session = str(json.loads(raw)["session_id"])
    for path in ("create_model", "create_sampling_session"):
        assert wire.ask("POST", path, json.dumps(real_bodies(session)[path]).encode(), headers)[0] == 200
    wire.close()
    return session


def works(client: tinker.ServiceClient) -> tuple[object, ...]:
    """Return a client's results for a new model and for the base model."""
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=5).result()
    losses: list[float] = []
    for _ in range(2):
        losses.append(trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sequences = sampler.sample(prompt(*TEXT), 2, types.SamplingParams(max_tokens=8, seed=3)).result().sequences
    return *losses, *(tuple(s.tokens) for s in sequences), *(tuple(np.asarray(s.logprobs)) for s in sequences)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_malformed_requests_do_not_harm_the_server(
    server: EngineServer, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_LONG_POLL_S", 0.05)  # answers that never come are asked for too
    wire = Wire(server)
    with connect(server) as client:
        expected = works(client)
    counts: dict[int, int] = {}
    threads: list[int] = []
    memory: list[int] = []

    # Nothing is shrunk: what a request meets depends on those before it.
    @settings(
        max_examples=REQUESTS // BATCH,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(KINDS), min_size=BATCH, max_size=BATCH), st.integers(0, 2**64 - 1))
    def attack(kinds: list[str], seed: int) -> None:
        rng = random.Random(seed)
        for kind in kinds:
            status, raw = wire.ask(*forged(kind, rng, session))
            check_answer(status, raw)
            counts[status] = counts.get(status, 0) + 1
        if not memory and sum(counts.values()) >= REQUESTS // 2:
            memory.append(resident_bytes())
            threads.append(threading.active_count())

    attack()
    wire.close()
    with connect(server) as client:
        assert works(client) == expected
    assert sum(counts.values()) >= REQUESTS
    assert {200, 400, 404, 422} <= counts.keys()
    service = server._service  # pyright: ignore[reportPrivateUsage] what is left is seen nowhere else
    answers = [promise._future.result().body for promise in service.promises.with_prefix(session) if promise.done]  # pyright: ignore[reportPrivateUsage] as above
    assert [raw for raw in answers if b'"category": "server"' in raw] == []
    wire.ask("POST", f"sessions/{session}/finish", b"{}", {})
    wire.close()
    gc.collect()
    assert service.promises.with_prefix(session) == []
    assert threading.active_count() <= threads[0] + THREADS
    assert resident_bytes() - memory[0] < 64 << 20


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 100,
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\nabc",
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nabc",
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /api/v1/telemetry HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /api/v1/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=range(13),
)
def test_bytes_that_are_not_http_get_a_4xx_or_a_closed_connection(server: EngineServer, raw: bytes) -> None:
    answer = Wire(server).send(raw)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    wire = Wire(server)
    assert wire.ask("GET", "healthz", b"", {})[0] == 200
    wire.close()


TWICE = {
    "data": [1, 2],
    "dtype": "int64",
    "shape": [len(TEXT) - 1, 3],
    "sparse_crow_indices": [0, 2, 2, 2, 2],
    "sparse_col_indices": [1, 1],
}


@pytest.mark.parametrize(
    ("fields", "params", "named"),
    [
        ({"num_samples": 256, "topk_sample_logprobs": 1024}, {"max_tokens": 400}, "topk_sample_logprobs 1024"),
        ({"target_prompt_logprobs": TWICE}, {}, "a column is listed twice in a row"),
        ({}, {"stop": ["a"] * 65}, "at most 64 stop strings are allowed, not 65"),
        ({}, {"stop": ["a" * 1025]}, "a stop string may have at most 1024 characters, not 1025"),
        ({}, {"stop": "a" * 1025}, "a stop string may have at most 1024 characters, not 1025"),
        ({}, {"stop": [0] * 4097}, "at most 4096 stop tokens are allowed, not 4097"),
        ({}, {"stop": [-5]}, "the stop token -5 is outside 0 … 258"),
        ({}, {"stop": [10**30]}, "the stop token 1000000000000000000000000000000 is outside"),
    ],
)
def test_excessive_or_meaningless_requests_are_rejected_by_name(
    server: EngineServer, session: str, fields: dict[str, object], params: dict[str, object], named: str
) -> None:
    wire = Wire(server)
    body = real_bodies(session)["asample"] | {"sampling_params": params} | fields
    status, raw = wire.ask("POST", "asample", json.dumps(body).encode(), {})
    assert status == 200
    body = {"request_id": json.loads(raw)["request_id"]}
    _, raw = wire.ask("POST", "retrieve_future", json.dumps(body).encode(), {})
    wire.close()
    answer = json.loads(raw)
    assert answer["category"] == "user"
    assert named in answer["error"]
