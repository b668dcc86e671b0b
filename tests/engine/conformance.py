"""Shared by the conformance suites: the parts of the protocol, and requests without the SDK."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine import EngineServer
from tests.limits import HANG_S

from .helpers import ce_datum

TEXT = [72, 101, 108, 108, 111, 44, 32]
ADAM = types.AdamParams(learning_rate=1e-2)
SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
ROUTES: dict[int, str] = {
    1: "client/config",
    2: "client/dynamic_config",
    3: "create_session",
    4: "session_heartbeat",
    5: "telemetry",
    6: "sessions/{id}/finish",
    7: "get_server_capabilities",
    8: "create_model",
    9: "get_info",
    10: "forward_backward",
    11: "optim_step",
    12: "save_weights",
    13: "save_weights_for_sampler",
    14: "load_weights",
    15: "create_sampling_session",
    16: "samplers/{id}",
    17: "asample",
    18: "retrieve_future",
    19: "cancel_future and what flags switch on",
    20: "training runs and checkpoints",
}
POINTS: dict[int, str] = {
    1: "the key",
    2: "flags for the client",
    3: "sessions",
    4: "model ids",
    5: "training requests in protobuf",
    6: "answers in protobuf",
    7: "sequence ids",
    8: "metric keys",
    9: "long polls and failures",
    10: "order by seq_id",
    11: "immutable sampler weights",
    12: "the base model of a sampler",
    13: "tokenisers",
    14: "stop, seed, log-probabilities",
    15: "losses are sums",
}

covered_routes: set[int] = set()
covered_points: set[int] = set()


def covers[F: Callable[..., object]](*, routes: tuple[int, ...] = (), points: tuple[int, ...] = ()) -> Callable[[F], F]:
    """Note what a case is for; `test_every_part_of_the_protocol_has_a_case` reads it."""
    assert set(routes) <= ROUTES.keys()
    assert set(points) <= POINTS.keys()

    def note(case: F) -> F:
        covered_routes.update(routes)
        covered_points.update(points)
        return case

    return note


@dataclass(frozen=True)
class Reply:
    """Response of the server."""

    status: int
    body: bytes
    media_type: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    server: EngineServer,
    path: str,
    body: object = None,
    *,
    method: str = "POST",
    key: str | None = None,
    media_type: str = "application/json",
) -> Reply:
    """Send a request as it is on the wire; a `body` that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else None if method == "GET" else json.dumps(body or {}).encode()
    headers = {"X-API-Key": key or server.api_key, "Content-Type": media_type}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return Reply(reply.status, reply.read(), reply.headers.get_content_type())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read(), error.headers.get_content_type())


def new_trainer(client: tinker.ServiceClient, base_model: str = "llama", **settings: object) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=base_model, **{"rank": 4, "seed": 0, **settings}).result()


def step(trainer: tinker.TrainingClient) -> None:
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(ADAM).result()


def loss(trainer: tinker.TrainingClient) -> float:
    return trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]


def train_request(model_id: str, seq_id: int, **fields: object) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", **fields)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(TEXT[:-1], np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(TEXT[1:], np.int64).tobytes(), pb.DTYPE_INT64
    targets.shape.append(len(TEXT) - 1)
    return request.SerializeToString()


def open_session(server: EngineServer) -> str:
    return str(ask(server, "create_session", SESSION).json["session_id"])


def open_model(server: EngineServer, session_id: str) -> str:
    lora = {"rank": 2, "seed": 0, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "llama", "lora_config": lora}
    return str(await_answer(server, ask(server, "create_model", body)).json["model_id"])


def await_answer(server: EngineServer, pending: Reply) -> Reply:
    while (reply := ask(server, "retrieve_future", {"request_id": pending.json["request_id"]})).status == 408:
        pass
    return reply
