"""The routes of the Tinker REST protocol.

Invariant: a handler turns what a client did wrong into a 4xx with one line that says what; it never raises.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from rlkit.engine.server.futures import Answer, GoneError, Promise
from rlkit.engine.server.request_body import JSON_BYTES_MAX, Bodies, Refused, json_place, parse_body
from rlkit.engine.server.rest import Management, TtlRequest
from rlkit.engine.server.service import Service
from rlkit.engine.wire import training_format
from rlkit.engine.wire.sampling_format import SAMPLES_MAX
from rlkit.errors import MissingError, UsageError

_log = logging.getLogger(__name__)

# The client gives up on a question after 45 s, and asks again at once when told to.
_HOLD_S = 25.0
# Above this a client first hears how large an answer is, so that it can bound what it holds at a time.
_INLINE_BYTES_MAX = 1 << 20
_MESSAGE_MAX = 500

_CHECKPOINT = "training_runs/{model_id}/checkpoints/{kind}/{name}"

type Handler = Callable[[Request], Awaitable[Response]]

_STATUSES = ((GoneError, 410), (UsageError, 400), (MissingError, 404), (ClientDisconnect, 400))


# The SDK has no type for the bodies of `cancel_future` and `weights_info`.
class _CancelRequest(BaseModel):
    request_id: str


class _WeightsInfoRequest(BaseModel):
    tinker_path: str


def make_app(service: Service, bodies: Bodies, *, api_key: str, models: Sequence[str]) -> Starlette:
    """Make the web application; clients send `api_key` as `X-API-Key`, and `get_server_capabilities` lists `models`."""
    manage = Management(service.store, service.sessions)
    handlers = _Handlers(service, bodies, manage, models)
    posts: dict[str, Handler] = {
        "client/config": handlers.client_config,
        "client/dynamic_config": handlers.client_dynamic_config,
        "create_session": handlers.create_session,
        "session_heartbeat": handlers.heartbeat,
        "telemetry": handlers.telemetry,
        "sessions/{session_id}/finish": handlers.finish_session,
        "get_info": handlers.get_info,
        "weights_info": handlers.weights_info,
        "create_sampling_session": handlers.create_sampling_session,
        "asample": handlers.sample,
        "forward_backward": handlers.forward_backward,
        "retrieve_future": handlers.retrieve_future,
        "cancel_future": handlers.cancel_future,
        "create_custom_loss": handlers.create_custom_loss,
        "sessions/search": handlers.body(types.SessionSearchRequest, manage.search_sessions),
        "copy_weights": handlers.body(types.CopyWeightsRequest, manage.copy_weights),
        f"{_CHECKPOINT}/publish": _in_thread(manage.publish),
        "create_model": handlers.future(types.CreateModelRequest, service.create_model),
        "load_weights": handlers.future(types.LoadWeightsRequest, service.load_weights),
        "optim_step": handlers.future(types.OptimStepRequest, service.optim_step),
        "save_weights": handlers.future(types.SaveWeightsRequest, service.save_weights),
        "save_weights_for_sampler": handlers.future(
            types.SaveWeightsForSamplerRequest, service.save_weights_for_sampler
        ),
        "save_weights_external": handlers.future(types.SaveWeightsExternalRequest, service.save_weights_external),
        "unload_model": handlers.future(types.UnloadModelRequest, service.unload_model),
    }
    gets: dict[str, Handler] = {
        "healthz": handlers.health,
        "get_server_capabilities": handlers.capabilities,
        "samplers/{sampler_id}": handlers.get_sampler,
        "training_runs": _in_thread(manage.list_runs),
        "training_runs/{model_id}": _in_thread(manage.get_run),
        "training_runs/{model_id}/checkpoints": _in_thread(manage.list_run_checkpoints),
        f"{_CHECKPOINT}/external_weights_urls": _in_thread(manage.external_urls),
        "checkpoints": _in_thread(manage.list_checkpoints),
        "sessions": _in_thread(manage.list_sessions),
        "sessions/{session_id}": _in_thread(manage.get_session),
        "sessions/{session_id}/trace_export": _in_thread(manage.not_offered),
        "billing/usage/checkpoints/current": _in_thread(manage.storage),
        "billing/usage/events": _in_thread(manage.not_offered),
        "audit": _in_thread(manage.not_offered),
    }
    puts: dict[str, Handler] = {
        f"{_CHECKPOINT}/ttl": handlers.body(TtlRequest, manage.set_ttl),
        "sessions/{session_id}/project": _in_thread(manage.not_offered),
    }
    deletes: dict[str, Handler] = {
        _CHECKPOINT: _in_thread(manage.delete_checkpoint),
        f"{_CHECKPOINT}/publish": _in_thread(manage.publish),
    }
    routes = [
        Route(f"/api/v1/{path}", _guarded(handler, api_key), methods=[method])
        for method, table in (("POST", posts), ("GET", gets), ("PUT", puts), ("DELETE", deletes))
        for path, handler in table.items()
    ]
    download = "/api/v1/downloads/{signature}/{expires:int}/{model_id}/{kind}/{name}/{file}"
    routes.append(Route(download, _answered(_in_thread(manage.download)), methods=["GET"]))
    return Starlette(routes=routes)


def _in_thread(handler: Callable[[Request], Response]) -> Handler:
    """Keep a handler that waits for the disk off the server's own thread."""
    return partial(asyncio.to_thread, handler)


def _guarded(handler: Handler, api_key: str) -> Handler:
    expected = api_key.encode()

    async def guarded(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), expected):
            # As in `client_config`: the SDK would leave the connection open.
            refusal = {"detail": "the API key is missing or wrong"}
            return JSONResponse(refusal, status_code=401, headers={"Connection": "close"})
        return await answered(request)

    answered = _answered(handler)
    return guarded


def _answered(handler: Handler) -> Handler:
    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return _error(refused.status, str(refused))
        except Exception as error:
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            if status == 500:
                _log.exception("%s failed", request.url.path)
            return _error(status, str(error) or type(error).__name__)

    return answered


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message[:_MESSAGE_MAX]}, status_code=status)


def _pending(promise: Promise) -> JSONResponse:
    return JSONResponse({"request_id": promise.request_id})


class _Handlers:
    """One method for each route that is not simply a future."""

    def __init__(self, service: Service, bodies: Bodies, manage: Management, models: Sequence[str]) -> None:
        self._service = service
        self._bodies = bodies
        self._manage = manage
        self._models = models

    def future[M: BaseModel](self, model: type[M], start: Callable[[M], Promise]) -> Handler:
        """A route that reads `model` and answers with the promise that `start` makes."""

        async def handler(request: Request) -> Response:
            try:
                wanted = await self._bodies.parse(request, model)
            except Refused as refused:
                return self._refuse_in_turn(json_place(refused.body), refused)
            return _pending(start(wanted))

        return handler

    def body[M: BaseModel](self, model: type[M], answer: Callable[[Request, M], Response]) -> Handler:
        """A route that reads `model` and gives it to `answer` on another thread."""

        async def handler(request: Request) -> Response:
            return await asyncio.to_thread(answer, request, await self._bodies.parse(request, model))

        return handler

    async def client_config(self, _: Request) -> Response:
        """Flags for the SDK: its defaults suit."""
        # Left off: polling many samples at once (sample_use_retrieve_futures) saves connections, of which there are
        # enough on one machine, and costs more requests; the random ids that unpickled sampling clients take without
        # sample_join_sampling_session are one in a thousand million each.
        # The SDK asks this over a connection of its own, which it never closes.
        return JSONResponse({"pjwt_auth_enabled": False}, headers={"Connection": "close"})

    async def client_dynamic_config(self, _: Request) -> Response:
        """Flags that the SDK asks for again and again: it may cancel samples."""
        return JSONResponse({"sample_cancel_enabled": True})

    async def create_session(self, request: Request) -> Response:
        wanted = await self._bodies.parse(request, types.CreateSessionRequest)
        session_id = self._service.sessions.open().session_id
        await asyncio.to_thread(self._manage.note_session, session_id, wanted)
        return JSONResponse({"session_id": session_id, "type": "create_session"})

    async def heartbeat(self, request: Request) -> Response:
        """A session is still in use; 410 tells the client that it is not known."""
        beat = await self._bodies.parse(request, types.SessionHeartbeatRequest)
        self._service.sessions.beat(beat.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def telemetry(self, request: Request) -> Response:
        """Taken and thrown away: nothing leaves this process."""
        await self._bodies.read(request)
        return JSONResponse({"status": "accepted"})

    async def finish_session(self, request: Request) -> Response:
        await self._bodies.read(request)
        self._service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        """The advertised models and those in use; of the latter it knows the context too."""
        contexts = await asyncio.to_thread(self._service.contexts)
        models = [
            {"model_name": name, "max_context_length": contexts.get(name), "trainable": True, "sampleable": True}
            for name in dict.fromkeys([*self._models, *contexts])
        ]
        return JSONResponse({"supported_models": models})

    async def get_info(self, request: Request) -> Response:
        """A model's base and rank, and the directory of its tokeniser, so that the SDK need not ask a hub."""
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
        ref = self._service.sampler(sampler_id).ref
        return JSONResponse({"sampler_id": sampler_id, "base_model": ref.base_model, "model_path": ref.path})

    async def sample(self, request: Request) -> Response:
        """Start sampling; the reply names every sample."""
        body = await self._bodies.read(request, JSON_BYTES_MAX)
        wanted = parse_body(body, types.SampleRequest)
        # Of the bytes, which come again just so: to write a long prompt anew would take as long as to parse it.
        promise = self._service.sample(wanted, blake2b(body, digest_size=16).digest())
        ids = [f"{promise.request_id}.{index}" for index in range(min(wanted.num_samples, SAMPLES_MAX))]
        return JSONResponse({"request_id": promise.request_id, "sample_sequence_ids": ids})

    async def forward_backward(self, request: Request) -> Response:
        """Start a training request, the only one whose body is protobuf."""
        try:
            body = await self._bodies.read(request)
        except Refused as refused:
            return self._refuse_in_turn(training_format.place_of(refused.body), refused)
        try:
            wanted = training_format.decode_train(body)
        except UsageError as error:
            return self._refuse_in_turn(training_format.place_of(body), Refused(400, str(error), body))
        return _pending(self._service.train(wanted))

    def _refuse_in_turn(self, place: tuple[str, int] | None, refused: Refused) -> Response:
        """Fail a request when its turn comes: refused at once, it would leave a gap for which the next ones wait."""
        if place is None:
            raise refused
        return _pending(self._service.refuse(*place, str(refused)))

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for an answer; 408 means ask again, 410 that it was there."""
        wanted = await self._bodies.parse(request, types.FutureRetrieveRequest)
        promise = self._service.promise(wanted.request_id)
        answer = await promise.wait(_HOLD_S)
        if answer is None:
            later = {"type": "try_again", "request_id": wanted.request_id, "queue_state": "active"}
            return JSONResponse(later, status_code=408)
        if wanted.allow_metadata_only and len(answer.body) > _INLINE_BYTES_MAX:
            return JSONResponse({"status": "complete_metadata", "response_payload_size": len(answer.body)})
        # Whoever has closed the connection by now will ask again.
        delivered = None if await request.is_disconnected() else BackgroundTask(self._delivered, promise, answer)
        return Response(answer.body, media_type=answer.media_type, background=delivered)

    async def _delivered(self, promise: Promise, answer: Answer) -> None:
        """Note that an answer went out. A coroutine, because a plain function would run on another thread."""
        self._service.promises.delivered(promise, len(answer.body))

    async def cancel_future(self, request: Request) -> Response:
        """Give up samples; those of a session that has ended are given up already."""
        wanted = await self._bodies.parse(request, _CancelRequest)
        try:
            self._service.cancel(wanted.request_id)
        except MissingError:
            if not self._service.sessions.has_ended(wanted.request_id):
                raise
        return Response(status_code=204)

    async def create_custom_loss(self, request: Request) -> Response:
        """Refused: such a loss would be a program of the client's that runs here."""
        await self._bodies.read(request)
        raise UsageError(
            "create_custom_loss: losses do not run on this server; give forward_backward_custom a function instead, "
            "which runs on the client"
        )
