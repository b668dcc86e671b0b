"""Sessions, the order of requests, and what each request becomes on the worker.

Invariant: the requests of one model run in the order of their `seq_id`, each of them once, however often and in
whatever order they arrive. Everything here runs on the server's own thread except the jobs that it hands to the
worker.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tinker import types

from rlkit.engine import wire
from rlkit.engine.checkpoints import CheckpointStore
from rlkit.engine.learner import AdamSettings
from rlkit.engine.lora import LoraSettings
from rlkit.engine.promises import Answer, Promise, Promises, json_answer, proto_answer
from rlkit.engine.runtime import ModelInfo, Runtime, SamplerRef, fail
from rlkit.engine.worker import Worker
from rlkit.errors import MissingError, UsageError

_log = logging.getLogger(__name__)

_RANK_MAX = 512

type Job = Callable[[Promise], Answer | None]
"""Runs on the worker; None when the promise is kept later."""


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one model, waiting for their turn; `info` is known once it is made."""

    next_seq: int = 1
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    info: ModelInfo | None = None


class Service:
    """Everything a server does, without HTTP."""

    def __init__(self, *, resolve: Callable[[str], Path], root: Path, threads: int | None) -> None:
        self.promises = Promises()
        self.store = CheckpointStore(root)
        self._runtime = Runtime(resolve, self.store, root / f".scratch-{secrets.token_hex(8)}", threads)
        self._worker = Worker(self._runtime.advance)
        self._sessions: set[str] = set()
        self._lines: dict[str, _Line] = {}
        self._samplers: dict[str, SamplerRef] = {}

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the worker and free everything. May be called from any thread once no request comes in any more."""
        self._worker.stop()
        self._runtime.close()

    def contexts(self) -> Mapping[str, int]:
        """The longest context of each base model in use, in tokens. It may wait for a model to be fetched."""
        return self._runtime.contexts(ref.base_model for ref in list(self._samplers.values()))

    def create_session(self) -> str:
        """A new session id, unlike that of any other server: checkpoints are named after it."""
        session_id = secrets.token_hex(8)
        self._sessions.add(session_id)
        return session_id

    def check_session(self, session_id: str) -> None:
        """Raise `MissingError` unless the session is open."""
        if session_id not in self._sessions:
            raise MissingError(f"there is no session {session_id!r}")

    def finish_session(self, session_id: str) -> None:
        """End a session: its models and unnamed sampler weights go."""
        self.check_session(session_id)
        self._sessions.discard(session_id)
        prefix = f"{session_id}:"
        self._lines = {k: v for k, v in self._lines.items() if not k.startswith(prefix)}
        self._samplers = {k: v for k, v in self._samplers.items() if not k.startswith(prefix)}
        self._worker.submit(lambda: self._runtime.release(session_id))

    def create_model(self, request: types.CreateModelRequest) -> Promise:
        """Make a model with a new adapter."""
        lora = request.lora_config

        def job(_: Promise) -> Answer:
            if lora is None:
                raise UsageError("create_model: lora_config is missing; the embedded engine trains LoRA adapters only")
            if not 1 <= lora.rank <= _RANK_MAX:
                raise UsageError(f"lora_config: rank must be 1 … {_RANK_MAX}, not {lora.rank}")
            if request.optimizer_config.type != "adamw":
                raise UsageError(f"optimizer_config: {request.optimizer_config.type!r} is not supported; use adamw")
            settings = LoraSettings(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
            line.info = self._runtime.create(model_id, request.base_model, settings, lora.seed)
            return json_answer({"model_id": model_id, "type": "create_model"})

        model_id, line = self._new_line(request.session_id, request.model_seq_id)
        return self._once(f"{model_id}#create", job)

    def load_weights(self, request: types.LoadWeightsRequest) -> Promise:
        """Make a model from a checkpoint, or load a checkpoint into a model."""

        def job(_: Promise) -> Answer:
            base = request.base_model
            line.info = self._runtime.load(model_id, request.path, optimiser=request.optimizer, base_model=base)
            return json_answer({"path": request.path, "model_id": model_id, "type": "load_weights"})

        if request.model_id is not None and request.seq_id is not None:
            model_id = request.model_id
            line = self._line(model_id)
            return self._in_turn(model_id, request.seq_id, job)
        if request.session_id is None or request.model_seq_id is None:
            raise UsageError("load_weights: session_id and model_seq_id, or model_id and seq_id, are needed")
        model_id, line = self._new_line(request.session_id, request.model_seq_id)
        return self._once(f"{model_id}#create", job)

    def train(self, request: wire.TrainRequest) -> Promise:
        """Forward, or forward and backward."""
        return self._in_turn(request.model_id, request.seq_id, lambda _: proto_answer(self._runtime.train(request)))

    def optim_step(self, request: types.OptimStepRequest) -> Promise:
        """Apply the gradient."""

        def job(_: Promise) -> Answer:
            adam = request.optim_params
            if not isinstance(adam, types.AdamParams):
                raise UsageError(f"optim_step: {adam.type!r} is not supported; use AdamParams")
            settings = AdamSettings(
                adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
            )
            norm = self._runtime.optim_step(request.model_id, settings)
            return json_answer({"metrics": {"unclipped_grad_l2:mean": norm}, "type": "optim_step"})

        return self._in_turn(request.model_id, request.seq_id, job)

    def save_weights(self, request: types.SaveWeightsRequest) -> Promise:
        """Write a training state."""

        def job(_: Promise) -> Answer:
            if request.path is None:
                raise UsageError("save_weights: path, the checkpoint's name, is missing")
            path = self._runtime.save_state(request.model_id, request.path, overwrite=request.overwrite)
            return json_answer({"path": path, "type": "save_weights"})

        return self._in_turn(request.model_id, request.seq_id, job)

    def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> Promise:
        """Write sampler weights, or keep an unnamed snapshot of them for a new sampling session."""

        def job(_: Promise) -> Answer:
            if request.kind != "snapshot":
                raise UsageError(f"save_weights_for_sampler: kind {request.kind!r} is not supported; use 'snapshot'")
            if request.path is not None:
                path = self._runtime.save_sampler(request.model_id, request.path)
                return json_answer({"path": path, "type": "save_weights_for_sampler"})
            if request.sampling_session_seq_id is None:
                raise UsageError("save_weights_for_sampler: path or sampling_session_seq_id is needed")
            session_id = request.model_id.partition(":")[0]
            sampler_id = _sampler_id(session_id, request.sampling_session_seq_id)
            self._samplers[sampler_id] = self._runtime.snapshot(request.model_id, sampler_id)
            return json_answer({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

        return self._in_turn(request.model_id, request.seq_id, job)

    def unload_model(self, request: types.UnloadModelRequest) -> Promise:
        """Forget a model in training."""

        def job(_: Promise) -> Answer:
            self._runtime.unload(request.model_id)
            return json_answer({"model_id": request.model_id, "type": "unload_model"})

        self._line(request.model_id)
        return self._once(f"{request.model_id}#unload", job)

    def model_info(self, model_id: str) -> ModelInfo:
        """What is known of a model that was made."""
        info = self._line(model_id).info
        if info is None:
            raise MissingError(f"model {model_id!r} is not ready")
        return info

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> str:
        """A sampling session over a base model or a checkpoint; its id."""
        self.check_session(request.session_id)
        if request.model_path is not None:
            if "/sampler_weights/" not in request.model_path:
                raise UsageError(f"{request.model_path}: sample from weights saved by save_weights_for_sampler")
            ref = SamplerRef(self.store.info(request.model_path).base_model, path=request.model_path)
        elif request.base_model is not None:
            ref = SamplerRef(request.base_model)
        else:
            raise UsageError("create_sampling_session: base_model or model_path is needed")
        sampler_id = _sampler_id(request.session_id, request.sampling_session_seq_id)
        self._samplers[sampler_id] = ref
        return sampler_id

    def sampler(self, sampler_id: str) -> SamplerRef:
        """What a sampling session samples from."""
        if sampler_id not in self._samplers:
            raise MissingError(f"there is no sampling session {sampler_id!r}")
        return self._samplers[sampler_id]

    def sample(self, request: types.SampleRequest) -> Promise:
        """Sample from a sampling session."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise UsageError("asample: sampling_session_id and seq_id are needed")
        ref = self.sampler(request.sampling_session_id)

        def job(promise: Promise) -> None:
            self._runtime.sample(ref, wire.decode_sample(request), promise)

        return self._once(f"{request.sampling_session_id}#{request.seq_id}", job)

    def _new_line(self, session_id: str, model_seq_id: int) -> tuple[str, _Line]:
        self.check_session(session_id)
        # The client computes this id too, and names its checkpoints after it.
        model_id = f"{session_id}:train:{model_seq_id}"
        return model_id, self._lines.setdefault(model_id, _Line())

    def _line(self, model_id: str) -> _Line:
        if model_id not in self._lines:
            raise MissingError(f"there is no model {model_id!r} on this server")
        return self._lines[model_id]

    def _once(self, request_id: str, job: Job) -> Promise:
        promise, new = self.promises.make(request_id)
        if new:
            self._worker.submit(lambda: _run(job, promise))
        return promise

    def _in_turn(self, model_id: str, seq_id: int | None, job: Job) -> Promise:
        line = self._line(model_id)
        if seq_id is None or seq_id < 1:
            raise UsageError("seq_id is missing")
        request_id = f"{model_id}#{seq_id}"
        if seq_id < line.next_seq and self.promises.get(request_id) is None:
            raise UsageError(f"request {seq_id} of {model_id} was answered long ago")
        promise, new = self.promises.make(request_id)
        if new:
            line.waiting[seq_id] = lambda: _run(job, promise)
            while (ready := line.waiting.pop(line.next_seq, None)) is not None:
                self._worker.submit(ready)
                line.next_seq += 1
        return promise


def _run(job: Job, promise: Promise) -> None:
    try:
        answer = job(promise)
    except Exception as error:
        if not isinstance(error, UsageError | MissingError):
            _log.exception("request %s failed", promise.request_id)
        fail(promise, error)
    else:
        if answer is not None:
            promise.resolve(answer)


def _sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"
