"""Routes of the Tinker REST protocol.

Invariant: a client's mistake is answered with a 4xx status and a one-line reason; another error is answered with a 500,
and uvicorn logs it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker import types

from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.engine.server import wire_format
from rlkit.engine.server.futures import Answer, GoneError, Promise
from rlkit.engine.server.http_requests import INVALID, JSON_BYTES_MAX, BodyReader, json_position
from rlkit.engine.server.management import Management, TtlRequest
from rlkit.engine.server.service import Service
from rlkit.engine.server.wire_format import SAMPLES_MAX
from rlkit.errors import MissingError, UsageError

# The client times out after 45 s, and polls again at once after a 408.
_LONG_POLL_S = 25.0
# For a larger answer, a client gets the size first, so that it can limit its memory.
_INLINE_BYTES_MAX = 1 << 20
_MESSAGE_MAX = 500

_CHECKPOINT = "training_runs/{model_id}/checkpoints/{kind}/{name}"

type Handler = Callable[[Request], Response | Awaitable[Response]]
"""Function that answers a request. Starlette calls one that is not a coroutine, and may read the disk, on a thread."""

_STATUSES = {GoneError: 410, UsageError: 400, MissingError: 404, ClientDisconnect: 400}


# The SDK has no types for the bodies of `cancel_future` and `weights_info`.
class _CancelRequest(BaseModel):
    request_id: str


class _WeightsInfoRequest(BaseModel):
    tinker_path: str


def make_app(service: Service, bodies: BodyReader, *, api_key: str, models: Sequence[str]) -> Starlette:
    """Make the web application; `get_server_capabilities` lists `models`.

    Clients send `api_key` as `X-API-Key`, except to `healthz`.
    """
    manage = Management(service.store, service.sessions)
    handlers = _Handlers(service, bodies, manage, models)
    table = (*_service_routes(handlers, service), *_management_routes(handlers, manage))
    router = Router([Route(f"/{path}", handler, methods=[method]) for method, path, handler in table])
    download = Route("/{signature}/{expires:int}/{model_id}/{kind}/{name}/{file}", manage.download)
    answers = dict.fromkeys((*_STATUSES, Rejection, Exception), _answer_error)
    return Starlette(
        routes=[
            Mount("/api/v1/downloads", routes=[download]),
            Route("/api/v1/healthz", handlers.health),  # a probe has no key
            Mount("/api/v1", _require_key(router, api_key)),
        ],
        exception_handlers={404: _answer_unknown_route, **answers},
    )


def _service_routes(handlers: _Handlers, service: Service) -> list[tuple[str, str, Handler]]:
    future = handlers.future
    save_for_sampler = future(types.SaveWeightsForSamplerRequest, service.save_weights_for_sampler)
    return [
        ("GET", "get_server_capabilities", handlers.capabilities),
        ("POST", "client/config", handlers.client_config),
        ("POST", "client/dynamic_config", handlers.client_dynamic_config),
        ("POST", "create_session", handlers.create_session),
        ("POST", "session_heartbeat", handlers.heartbeat),
        ("POST", "telemetry", handlers.telemetry),
        ("POST", "sessions/{session_id}/finish", handlers.finish_session),
        ("POST", "get_info", handlers.get_info),
        ("POST", "weights_info", handlers.weights_info),
        ("POST", "create_sampling_session", handlers.create_sampling_session),
        ("GET", "samplers/{sampler_id}", handlers.get_sampler),
        ("POST", "asample", handlers.sample),
        ("POST", "forward_backward", handlers.forward_backward),
        ("POST", "create_custom_loss", handlers.create_custom_loss),
        ("POST", "retrieve_future", handlers.retrieve_future),
        ("POST", "cancel_future", handlers.cancel_future),
        ("POST", "create_model", future(types.CreateModelRequest, service.create_model)),
        ("POST", "load_weights", future(types.LoadWeightsRequest, service.load_weights)),
        ("POST", "optim_step", future(types.OptimStepRequest, service.optim_step)),
        ("POST", "save_weights", future(types.SaveWeightsRequest, service.save_weights)),
        ("POST", "save_weights_for_sampler", save_for_sampler),
        ("POST", "save_weights_external", future(types.SaveWeightsExternalRequest, service.save_weights_external)),
        ("POST", "unload_model", future(types.UnloadModelRequest, service.unload_model)),
    ]


def _management_routes(handlers: _Handlers, manage: Management) -> list[tuple[str, str, Handler]]:
    return [
        ("GET", "training_runs", manage.list_runs),
        ("GET", "training_runs/{model_id}", manage.get_run),
        ("GET", "training_runs/{model_id}/checkpoints", manage.list_run_checkpoints),
        ("DELETE", _CHECKPOINT, manage.delete_checkpoint),
        ("POST", f"{_CHECKPOINT}/publish", manage.publish),
        ("DELETE", f"{_CHECKPOINT}/publish", manage.publish),
        ("PUT", f"{_CHECKPOINT}/ttl", handlers.management(TtlRequest, manage.set_ttl)),
        ("GET", f"{_CHECKPOINT}/external_weights_urls", manage.external_urls),
        ("POST", "copy_weights", handlers.management(types.CopyWeightsRequest, manage.copy_weights)),
        ("GET", "checkpoints", manage.list_checkpoints),
        ("GET", "sessions", manage.list_sessions),
        ("POST", "sessions/search", handlers.management(types.SessionSearchRequest, manage.search_sessions)),
        ("GET", "sessions/{session_id}", manage.get_session),
        ("GET", "billing/usage/checkpoints/current", manage.storage),
    ]


def _require_key(app: ASGIApp, api_key: str) -> ASGIApp:
    async def check_key(scope: Scope, receive: Receive, send: Send) -> None:
        if hmac.compare_digest(Headers(scope=scope).get("x-api-key", "").encode(), api_key.encode()):
            return await app(scope, receive, send)
        # The SDK would leave this connection open, as after `client_config`.
        refusal = {"detail": "the API key is missing or wrong"}
        return await JSONResponse(refusal, status_code=401, headers={"Connection": "close"})(scope, receive, send)

    return check_key


async def _answer_unknown_route(request: Request, _: Exception) -> Response:
    return _error_response(404, f"{request.method} {request.url.path} is not offered by the embedded engine")


async def _answer_error(_: Request, error: Exception) -> Response:
    default = error.status if isinstance(error, Rejection) else 500
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), default)
    return _error_response(status, str(error) or type(error).__name__)


def _error_response(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message[:_MESSAGE_MAX]}, status_code=status)


class _Handlers:
    """Handlers of the routes of the service, and factories for handlers."""

    def __init__(self, service: Service, bodies: BodyReader, manage: Management, models: Sequence[str]) -> None:
        self._service = service
        self._bodies = bodies
        self._manage = manage
        self._models = models

    def future[M: BaseModel](self, model: type[M], start: Callable[[M], Promise]) -> Handler:
        """Make a handler that parses `model` and answers with the id of the promise that `start` returns."""

        async def handler(request: Request) -> Response:
            try:
                body = await self._bodies.parse(request, model)
            except Rejection as error:
                return self._fail_in_order(json_position(error.body), error)
            return JSONResponse({"request_id": start(body).request_id})

        return handler

    def management[M: BaseModel](self, model: type[M], handle: Callable[[Request, M], Response]) -> Handler:
        """Make a handler that parses `model` and calls `handle` with it on another thread."""

        async def handler(request: Request) -> Response:
            return await asyncio.to_thread(handle, request, await self._bodies.parse(request, model))

        return handler

    async def client_config(self, _: Request) -> Response:
        """Return flags for the SDK, which differ from its defaults in one place."""
        # Two flags stay off. sample_use_retrieve_futures polls many samples per request: it saves connections, which
        # are plentiful on one machine, but costs more requests. Without sample_join_sampling_session, an unpickled
        # sampling client uses a random id, with a collision probability of 1e-9.
        # The SDK uses a separate connection for this request, and never closes it.
        return JSONResponse({"pjwt_auth_enabled": False}, headers={"Connection": "close"})

    async def client_dynamic_config(self, _: Request) -> Response:
        """Return flags that the SDK polls: samples can be cancelled."""
        return JSONResponse({"sample_cancel_enabled": True})

    async def create_session(self, request: Request) -> Response:
        body = await self._bodies.parse(request, types.CreateSessionRequest)
        session_id = self._service.sessions.open().session_id
        await asyncio.to_thread(self._manage.record_session, session_id, body)
        return JSONResponse({"session_id": session_id, "type": "create_session"})

    async def heartbeat(self, request: Request) -> Response:
        """Keep a session open; 410 if it is not open."""
        body = await self._bodies.parse(request, types.SessionHeartbeatRequest)
        self._service.sessions.beat(body.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def telemetry(self, request: Request) -> Response:
        """Accept and drop telemetry: nothing leaves this process."""
        await self._bodies.read(request)
        return JSONResponse({"status": "accepted"})

    async def finish_session(self, request: Request) -> Response:
        await self._bodies.read(request)
        self._service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        """List the advertised models, and the models in use with their context lengths."""
        lengths = await asyncio.to_thread(self._service.context_lengths)
        models = [
            {"model_name": name, "max_context_length": lengths.get(name), "trainable": True, "sampleable": True}
            for name in dict.fromkeys([*self._models, *lengths])
        ]
        return JSONResponse({"supported_models": models})

    async def get_info(self, request: Request) -> Response:
        """Return a model's base model, rank and tokeniser directory; with it the SDK does not use the hub."""
        model_id = (await self._bodies.parse(request, types.GetInfoRequest)).model_id
        model = self._service.model_info(model_id)
        data = {"model_name": model.base_model, "tokenizer_id": str(model.directory), "arch": "decoder"}
        info = {"type": "get_info", "model_id": model_id, "is_lora": True, "lora_rank": model.rank}
        return JSONResponse({**info, "model_data": data})

    async def weights_info(self, request: Request) -> Response:
        info = self._service.store.get((await self._bodies.parse(request, _WeightsInfoRequest)).tinker_path).info
        lora = {name: getattr(info.settings, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse({"base_model": info.base_model, "is_lora": True, "lora_rank": info.settings.rank, **lora})

    async def create_sampling_session(self, request: Request) -> Response:
        sampler_id = self._service.create_sampling_session(
            await self._bodies.parse(request, types.CreateSamplingSessionRequest)
        )
        return JSONResponse({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

    async def get_sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        ref = self._service.target_of(sampler_id).ref
        return JSONResponse({"sampler_id": sampler_id, "base_model": ref.base_model, "model_path": ref.path})

    async def sample(self, request: Request) -> Response:
        """Start sampling; the reply has an id for every sample."""
        body = await self._bodies.read(request, JSON_BYTES_MAX)
        sample_request = parse_body(body, types.SampleRequest, status=INVALID)
        # Hash the raw bytes, which are equal when resent: encoding a long prompt takes as long as parsing it.
        promise = self._service.sample(sample_request, blake2b(body, digest_size=16).digest())
        ids = [f"{promise.request_id}.{index}" for index in range(min(sample_request.num_samples, SAMPLES_MAX))]
        return JSONResponse({"request_id": promise.request_id, "sample_sequence_ids": ids})

    async def forward_backward(self, request: Request) -> Response:
        """Start a training request, the only request with a protobuf body."""
        body = b""
        try:
            body = await self._bodies.read(request)
            train_request = wire_format.decode_train(body)
        except (Rejection, UsageError) as error:
            received = error.body if isinstance(error, Rejection) else body
            return self._fail_in_order(wire_format.train_request_position(received), error)
        return JSONResponse({"request_id": self._service.train(train_request).request_id})

    def _fail_in_order(self, position: tuple[str, int] | None, error: Exception) -> Response:
        """Fail a request when its `seq_id` is due; an immediate error would leave a gap that blocks later requests."""
        if position is None:
            raise error
        return JSONResponse({"request_id": self._service.fail_in_order(*position, str(error)).request_id})

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for an answer; 408 means poll again, 410 that the answer is forgotten."""
        body = await self._bodies.parse(request, types.FutureRetrieveRequest)
        promise = self._service.promise(body.request_id)
        answer = await promise.wait(_LONG_POLL_S)
        if answer is None:
            retry = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(retry, status_code=408)
        if body.allow_metadata_only and len(answer.body) > _INLINE_BYTES_MAX:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(answer.body)})
        # A client that has already closed the connection will poll again.
        mark = None if await request.is_disconnected() else BackgroundTask(self._mark_delivered, promise, answer)
        return Response(answer.body, media_type=answer.media_type, background=mark)

    async def _mark_delivered(self, promise: Promise, answer: Answer) -> None:
        """Mark an answer as delivered. A coroutine, because a plain function would run on another thread."""
        self._service.promises.mark_delivered(promise, len(answer.body))

    async def cancel_future(self, request: Request) -> Response:
        """Cancel samples; do nothing if their session has ended."""
        body = await self._bodies.parse(request, _CancelRequest)
        try:
            self._service.cancel(body.request_id)
        except MissingError:
            if not self._service.sessions.has_ended(body.request_id):
                raise
        return Response(status_code=204)

    async def create_custom_loss(self, request: Request) -> Response:
        """Reject a custom loss, because the server does not run clients' programs."""
        await self._bodies.read(request)
        raise UsageError(
            "create_custom_loss: losses do not run on this server; give forward_backward_custom a function instead, "
            "which runs on the client"
        )
