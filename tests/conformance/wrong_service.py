"""A Tinker service made wrong on purpose: a proxy before a right one, with one fault in requests or answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb

type Json = dict[str, Any]

# The SDK leaves open connections to the garbage collector.
_CLOSE = {"connection": "close"}
_HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection"}


def _ignore(*_: object) -> None:
    """Change nothing."""


@dataclass(kw_only=True)
class Fault:
    """Changes of the messages that pass; each function changes its argument in place.

    Args:
        train: changes a request of a gradient or of a loss.
        trained: changes its result.
        request: changes a JSON request, by its path.
        answer: changes a JSON answer, by its path.
        sampled: changes the result of a sampling request.
        headers: changes the headers of a request.
        status: returns the status to answer with, by path and request; None to pass the request on.
        holds: returns True as long as a JSON request has to wait, by path and request.
    """

    train: Callable[[pb.ForwardBackwardRequest], object] = _ignore
    trained: Callable[[pb.ForwardBackwardOutput], object] = _ignore
    request: Callable[[str, Json], object] = _ignore
    answer: Callable[[str, Json], object] = _ignore
    sampled: Callable[[pb.SampleResponse], object] = _ignore
    headers: Callable[[dict[str, str]], object] = _ignore
    status: Callable[[str, Json], int | None] = field(default=lambda path, body: None)
    holds: Callable[[str, Json], bool] = field(default=lambda path, body: False)


class WrongService:
    """The proxy; `fault` may be set between requests."""

    def __init__(self, target: str) -> None:
        self.fault = Fault()
        self._target = target.rstrip("/")
        self._client = httpx.AsyncClient(timeout=120)
        routes = [Route("/{path:path}", self._forward, methods=["GET", "POST", "PUT", "DELETE"])]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.005)
            assert self._thread.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def _serve(self) -> None:
        async with self._client:
            await self._server.serve()

    async def _forward(self, request: Request) -> Response:
        path, body = request.url.path.removeprefix("/api/v1/"), await request.body()
        parsed: Json = {}
        if path == "forward_backward":
            message = pb.ForwardBackwardRequest.FromString(body)
            self.fault.train(message)
            body = message.SerializeToString()
        elif body:
            parsed = json.loads(body)
            while self.fault.holds(path, parsed):
                await asyncio.sleep(0.05)
            self.fault.request(path, parsed)
            body = json.dumps(parsed).encode()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        self.fault.headers(headers)
        if (status := self.fault.status(path, parsed)) is not None:
            return Response(b"" if status == 204 else b"{}", status, _CLOSE, media_type="application/json")
        reply = await self._client.request(
            request.method, f"{self._target}{request.url.path}?{request.url.query}", headers=headers, content=body
        )
        kind = reply.headers.get("content-type", "")
        return Response(self._change(path, parsed, reply, kind), reply.status_code, _CLOSE, media_type=kind)

    def _change(self, path: str, request: Json, reply: httpx.Response, kind: str) -> bytes:
        if "protobuf" in kind:
            if ":sample:" in request["request_id"]:
                message: Any = pb.SampleResponse.FromString(reply.content)
                self.fault.sampled(message)
            else:
                message = pb.ForwardBackwardOutput.FromString(reply.content)
                self.fault.trained(message)
            return message.SerializeToString()
        if "json" not in kind or not reply.content:
            return reply.content
        answer = json.loads(reply.content)
        if isinstance(answer, dict):
            self.fault.answer(path, answer)
        return json.dumps(answer).encode()


def each_input(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pb.ForwardBackwardRequest], None]:
    """Return a change of an input of every datum."""

    def train(request: pb.ForwardBackwardRequest) -> None:
        for datum in request.data:
            if name in datum.loss_fn_inputs:
                tensor = datum.loss_fn_inputs[name]
                values = np.frombuffer(tensor.dense, np.float32)
                tensor.dense = change(values).astype(np.float32).tobytes()

    return train


def in_gradients(change: Callable[[pb.ForwardBackwardRequest], object]) -> Callable[[pb.ForwardBackwardRequest], None]:
    """Return a change of gradients alone, not of forward passes."""
    return lambda request: None if request.forward_only else change(request)  # type: ignore[return-value]


def each_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pb.ForwardBackwardOutput], None]:
    """Return a change of the log-probabilities of a training result."""

    def trained(output: pb.ForwardBackwardOutput) -> None:
        for record in output.loss_fn_outputs:
            values = np.frombuffer(record.fields["logprobs"].data, np.float32)
            record.fields["logprobs"].data = change(values).astype(np.float32).tobytes()

    return trained


def each_sequence(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pb.SampleResponse], None]:
    """Return a change of the log-probabilities of samples."""

    def sampled(response: pb.SampleResponse) -> None:
        for sequence in response.sequences:
            sequence.logprobs = change(np.frombuffer(sequence.logprobs, np.float32)).astype(np.float32).tobytes()

    return sampled


def prompt_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pb.SampleResponse], None]:
    """Return a change of the log-probabilities of a prompt."""

    def sampled(response: pb.SampleResponse) -> None:
        if response.prompt_logprobs:
            values = np.frombuffer(response.prompt_logprobs, np.float32)
            response.prompt_logprobs = change(values).astype(np.float32).tobytes()

    return sampled


def set_field(path: str, *names: str, value: object = None) -> Callable[[str, Json], None]:
    """Return a change that sets a field of the messages of a path; None removes it."""

    def change(actual: str, body: Json) -> None:
        for name in names[:-1]:
            body = body.get(name) or {}
        if actual == path and value is None:
            body.pop(names[-1], None)
        elif actual == path:
            body[names[-1]] = value

    return change
