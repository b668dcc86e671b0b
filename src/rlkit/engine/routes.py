"""The routes of the Tinker REST protocol.

Invariant: a handler turns what a client did wrong into a 4xx with one line that says what; it never raises.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Sequence

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from rlkit.engine import wire
from rlkit.engine.promises import Promise
from rlkit.engine.service import Service
from rlkit.errors import MissingError, UsageError

_log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 64 << 20
# The client gives up on a question after 45 s, and asks again at once when told to.
_HOLD_S = 25.0

type Handler = Callable[[Request], Awaitable[Response]]


class _Refused(Exception):
    """A request that gets a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_STATUSES = ((UsageError, 400), (MissingError, 404), (ClientDisconnect, 400))


def make_app(service: Service, *, api_key: str, models: Sequence[str]) -> Starlette:
    """The web application.

    Args:
        api_key: what the header `X-API-Key` must hold.
        models: names that `get_server_capabilities` lists.
    """
    handlers = _Handlers(service, models)
    posts: dict[str, Handler] = {
        "client/config": handlers.client_config,
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
        "create_model": handlers.future(types.CreateModelRequest, service.create_model),
        "load_weights": handlers.future(types.LoadWeightsRequest, service.load_weights),
        "optim_step": handlers.future(types.OptimStepRequest, service.optim_step),
        "save_weights": handlers.future(types.SaveWeightsRequest, service.save_weights),
        "save_weights_for_sampler": handlers.future(
            types.SaveWeightsForSamplerRequest, service.save_weights_for_sampler
        ),
        "unload_model": handlers.future(types.UnloadModelRequest, service.unload_model),
    }
    gets: dict[str, Handler] = {
        "healthz": handlers.health,
        "get_server_capabilities": handlers.capabilities,
        "samplers/{sampler_id}": handlers.get_sampler,
    }
    deletes: dict[str, Handler] = {"training_runs/{model_id}/checkpoints/{kind}/{name}": handlers.delete_checkpoint}
    routes = [
        Route(f"/api/v1/{path}", _guarded(handler, api_key), methods=[method])
        for method, table in (("POST", posts), ("GET", gets), ("DELETE", deletes))
        for path, handler in table.items()
    ]
    return Starlette(routes=routes)


def _guarded(handler: Handler, api_key: str) -> Handler:
    """Check the key first, and map errors to statuses."""
    expected = api_key.encode()

    async def guarded(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), expected):
            return _error(401, "the API key is missing or wrong")
        try:
            return await handler(request)
        except _Refused as refused:
            return _error(refused.status, str(refused))
        except Exception as error:
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            if status == 500:
                _log.exception("%s failed", request.url.path)
            return _error(status, str(error) or type(error).__name__)

    return guarded


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status_code=status)


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES_MAX:
            raise _Refused(413, f"the body is larger than {_BODY_BYTES_MAX} bytes")
    return bytes(body)


async def _parse[M: BaseModel](request: Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await _read(request))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _Refused(422, f"{field or 'body'}: {first['msg']}") from error


def _pending(promise: Promise) -> JSONResponse:
    return JSONResponse({"request_id": promise.request_id})


class _Handlers:
    """One method for each route that is not simply a future."""

    def __init__(self, service: Service, models: Sequence[str]) -> None:
        self._service = service
        self._models = models

    def future[M: BaseModel](self, model: type[M], start: Callable[[M], Promise]) -> Handler:
        """A route that reads `model` and answers with the promise that `start` makes."""

        async def handler(request: Request) -> Response:
            return _pending(start(await _parse(request, model)))

        return handler

    async def client_config(self, _: Request) -> Response:
        """Flags for the SDK: its defaults suit."""
        # The SDK asks this over a connection of its own, which it never closes.
        return JSONResponse({"pjwt_auth_enabled": False}, headers={"Connection": "close"})

    async def create_session(self, request: Request) -> Response:
        """Open a session."""
        await _parse(request, types.CreateSessionRequest)
        return JSONResponse({"session_id": self._service.create_session(), "type": "create_session"})

    async def heartbeat(self, request: Request) -> Response:
        """A session is still in use; 410 tells the client that it is not known."""
        beat = await _parse(request, types.SessionHeartbeatRequest)
        try:
            self._service.check_session(beat.session_id)
        except MissingError as error:
            raise _Refused(410, str(error)) from error
        return JSONResponse({"type": "session_heartbeat"})

    async def telemetry(self, request: Request) -> Response:
        """Taken and thrown away: nothing leaves this process."""
        await _read(request)
        return JSONResponse({"status": "accepted"})

    async def finish_session(self, request: Request) -> Response:
        """Close a session."""
        await _read(request)
        self._service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def health(self, _: Request) -> Response:
        """Alive."""
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
        model_id = (await _parse(request, types.GetInfoRequest)).model_id
        model = self._service.model_info(model_id)
        data = {"model_name": model.base_model, "tokenizer_id": str(model.directory), "arch": "decoder"}
        info = {"type": "get_info", "model_id": model_id, "is_lora": True, "lora_rank": model.rank}
        return JSONResponse({**info, "model_data": data})

    async def weights_info(self, request: Request) -> Response:
        """What a checkpoint was trained from."""
        raw: object = json.loads(await _read(request) or b"null")
        path = raw.get("tinker_path") if isinstance(raw, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] JSON
        if not isinstance(path, str):
            raise _Refused(422, "tinker_path: a string is needed")
        info = self._service.store.info(path)
        lora = {name: getattr(info.settings, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse({"base_model": info.base_model, "is_lora": True, "lora_rank": info.settings.rank, **lora})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Remove a checkpoint."""
        part = request.path_params
        self._service.store.delete(f"tinker://{part['model_id']}/{part['kind']}/{part['name']}")
        return Response(status_code=204)

    async def create_sampling_session(self, request: Request) -> Response:
        """Open a sampling session."""
        sampler_id = self._service.create_sampling_session(await _parse(request, types.CreateSamplingSessionRequest))
        return JSONResponse({"sampling_session_id": sampler_id, "type": "create_sampling_session"})

    async def get_sampler(self, request: Request) -> Response:
        """What a sampling session samples from."""
        sampler_id = request.path_params["sampler_id"]
        ref = self._service.sampler(sampler_id)
        return JSONResponse({"sampler_id": sampler_id, "base_model": ref.base_model, "model_path": ref.path})

    async def sample(self, request: Request) -> Response:
        """Start sampling; the reply names every sample."""
        wanted = await _parse(request, types.SampleRequest)
        promise = self._service.sample(wanted)
        ids = [f"{promise.request_id}.{index}" for index in range(min(wanted.num_samples, wire.SAMPLES_MAX))]
        return JSONResponse({"request_id": promise.request_id, "sample_sequence_ids": ids})

    async def forward_backward(self, request: Request) -> Response:
        """Start a training request, the only one whose body is protobuf."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise _Refused(415, "compressed bodies are not supported")
        return _pending(self._service.train(wire.decode_train(await _read(request))))

    async def retrieve_future(self, request: Request) -> Response:
        """Wait for an answer; 408 means ask again."""
        request_id = (await _parse(request, types.FutureRetrieveRequest)).request_id
        promise = self._service.promises.get(request_id)
        if promise is None:
            raise MissingError(f"there is no request {request_id!r}")
        answer = await promise.wait(_HOLD_S)
        if answer is None:
            later = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(later, status_code=408)
        self._service.promises.delivered(promise, len(answer.body))
        return Response(answer.body, media_type=answer.media_type)
