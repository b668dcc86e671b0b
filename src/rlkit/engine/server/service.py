"""Service of the Tinker protocol: for each request, a job of the worker and its answer.

Invariant: only the jobs submitted to the worker access models; all other code here runs on the server's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rlkit._util.activity import Activity
from rlkit.engine.kernels.devices import select_device
from rlkit.engine.server import wire_format
from rlkit.engine.server.futures import Answer, GoneError, Promise, Promises, json_answer, proto_answer
from rlkit.engine.server.request_order import RequestQueues, failing_job, hash_request, new_id
from rlkit.engine.server.runtime import Runtime, check_checkpoint
from rlkit.engine.server.sessions import DEAD_S, SILENCE_S, ModelInfo, ModelQueue, SamplerRef, Sessions, Target
from rlkit.engine.server.worker import Worker
from rlkit.engine.storage.checkpoints import CheckpointStore
from rlkit.engine.storage.session_records import Run, stringify_values
from rlkit.engine.storage.snapshots import scratch_folder
from rlkit.errors import MissingError, UsageError

_log = logging.getLogger(__name__)

_SWEEP_S = 10.0
_SUBSTITUTES = {
    "stable_reinforce": "use importance_sampling, ppo or cispo with the sampler's log-probabilities",
    "custom": "use forward_backward_custom with a function, which runs on the client",
}
_NUMBER = re.compile(r"[0-9]{1,18}")


class Service:
    """The server without HTTP."""

    def __init__(
        self,
        *,
        resolve: Callable[[str], Path],
        root: Path,
        threads: int | None,
        device: str | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.promises = Promises()
        self.sessions = Sessions(time.monotonic)
        self.store = CheckpointStore(root)
        self._runtime = Runtime(
            resolve, self.store, scratch_folder(root), threads, select_device(device), activity=activity or Activity()
        )
        self._worker = Worker(self._runtime.advance)
        self._queues = RequestQueues(self.sessions, self.promises, self._worker)

    def start(self) -> None:
        """Remove files left by killed servers, and start the worker."""
        self.store.sweep()
        self._worker.start()

    def halt(self) -> None:
        """Fail pending and later requests, and end the running job early."""
        self.promises.fail_all("the engine was stopped")
        self._runtime.halt()

    def stop(self) -> None:
        """Stop the worker and release everything. May be called from any thread once there are no more requests."""
        self._runtime.halt()
        self._worker.stop()
        self._runtime.close()

    def context_lengths(self) -> Mapping[str, int]:
        """Return the maximum context, in tokens, of each base model in use; see `BaseModels.context_lengths`."""
        targets = [target for session in self.sessions for target in list(session.samplers.values())]
        return self._runtime.base_models.context_lengths(target.ref.base_model for target in targets)

    def finish_session(self, session_id: str) -> None:
        """End a session and release its models, unnamed sampler weights and answers.

        Started jobs still finish, and submitted saves still run with all earlier requests.
        """
        session = self.sessions.end(session_id)
        if session is None:
            return
        for promise in self.promises.with_prefix(f"{session_id}:"):
            is_sample = promise.request_id.rpartition("#")[0] in session.samplers
            if is_sample or not (promise.is_started or promise.outlives_session):
                promise.fail("the session has ended", "user")
            self.promises.forget(promise.request_id)
        for queue in session.queues.values():
            queue.early.clear()
        self._queues.run_after(session.queues.values(), lambda: self._runtime.release(session_id))

    def end_silent_sessions(self) -> None:
        """Drop the samples of dead clients, and end sessions without requests for `SILENCE_S`.

        A session with a submitted, unfinished job does not end.
        """
        for session in self.sessions.silent(DEAD_S):
            for promise in self.promises.with_prefix(f"{session.session_id}:"):
                if promise.request_id.rpartition("#")[0] in session.samplers and not promise.done:
                    promise.fail(f"the sample was dropped: its client has sent nothing for {DEAD_S:g} s", "server")
        for session in self.sessions.silent(SILENCE_S):
            promises = self.promises.with_prefix(f"{session.session_id}:")
            if not any(promise.is_submitted and not promise.done for promise in promises):
                _log.info("session %s ends: its client has sent no request for a long time", session.session_id)
                self.finish_session(session.session_id)

    async def watch_sessions(self) -> None:
        """End silent sessions until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.end_silent_sessions()

    def create_model(self, request: types.CreateModelRequest) -> Promise:
        """Create a model with a new adapter."""

        def job(_: Promise) -> Answer:
            settings = wire_format.lora_settings(request)
            seed = None if request.lora_config is None else request.lora_config.seed
            queue.info = self._runtime.create(model_id, request.base_model, settings, seed)
            self._record_run(model_id, queue.info, request.user_metadata)
            return json_answer({"model_id": model_id, "type": "create_model"})

        model_id, queue = self._queues.add_model(request.session_id, request.model_seq_id)
        return self._queues.run_once(f"{model_id}#create", hash_request(request), job, queue)

    def load_weights(self, request: types.LoadWeightsRequest) -> Promise:
        """Create a model from a checkpoint, or load a checkpoint into a model."""

        def job(_: Promise) -> Answer:
            wire_format.check_optimizer(request.optimizer_config)
            base = request.base_model
            queue.info = self._runtime.load(model_id, request.path, optimiser=request.optimizer, base_model=base)
            if request.model_id is None:
                self._record_run(model_id, queue.info, request.user_metadata)
            return json_answer({"path": request.path, "model_id": model_id, "type": "load_weights"})

        if request.model_id is not None and request.seq_id is not None:
            model_id = request.model_id
            queue = self._queues.queue_of(model_id)
            return self._queues.run_in_order(model_id, request.seq_id, hash_request(request), job)
        if request.session_id is None or request.model_seq_id is None:
            raise UsageError("load_weights: give session_id and model_seq_id, or model_id and seq_id")
        model_id, queue = self._queues.add_model(request.session_id, request.model_seq_id)
        return self._queues.run_once(f"{model_id}#create", hash_request(request), job, queue)

    def train(self, request: pb.ForwardBackwardRequest) -> Promise:
        """Run a forward pass, or a forward and a backward pass."""

        def job(_: Promise) -> Answer:
            if (loss := request.loss_fn) in _SUBSTITUTES:
                raise UsageError(f"loss_fn {loss!r} is not supported by the embedded engine: {_SUBSTITUTES[loss]}")
            return proto_answer(self._runtime.train(request, self._worker))

        size_bytes = sum(datum.ByteSize() for datum in request.data)
        fingerprint = blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
        return self._queues.run_in_order(request.model_id, request.seq_id, fingerprint, job, size_bytes=size_bytes)

    def fail_in_order(self, model_id: str, seq_id: int, message: str) -> Promise:
        """Fail an unreadable request when its `seq_id` is due, so that it does not block later requests."""
        # Not a hash of the body: another part of it may have been read when the request was sent before.
        fingerprint = blake2b(message.encode(), digest_size=16).digest()
        return self._queues.run_in_order(model_id, seq_id, fingerprint, failing_job(message))

    def optim_step(self, request: types.OptimStepRequest) -> Promise:
        """Apply the accumulated gradient."""

        def job(_: Promise) -> Answer:
            norm = self._runtime.optim_step(request.model_id, wire_format.adam_settings(request))
            return json_answer({"metrics": {"unclipped_grad_l2:mean": norm}, "type": "optim_step"})

        return self._queues.run_in_order(request.model_id, request.seq_id, hash_request(request), job)

    def save_weights(self, request: types.SaveWeightsRequest) -> Promise:
        """Write a training state."""

        def job(_: Promise) -> Answer:
            if request.path is None:
                raise UsageError("save_weights: path, the checkpoint's name, is missing")
            path = self._runtime.save(request, request.path)
            return json_answer({"path": path, "type": "save_weights"})

        return self._queues.run_in_order(request.model_id, request.seq_id, hash_request(request), job, saves=True)

    def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> Promise:
        """Write sampler weights, or keep an unnamed copy for a new sampling session."""
        session, queue = self.sessions.owner_of(request.model_id), self._queues.queue_of(request.model_id)

        def job(_: Promise) -> Answer:
            if request.path is not None:
                if request.kind != "snapshot":
                    raise UsageError(f"save_weights_for_sampler: named weights cannot be of kind {request.kind!r}")
                path = self._runtime.save(request, request.path)
                return json_answer({"path": path, "type": "save_weights_for_sampler"})
            if request.sampling_session_seq_id is None:
                raise UsageError("save_weights_for_sampler: give path or sampling_session_seq_id")
            sampler_id = new_id(session.session_id, "sample", request.sampling_session_seq_id)
            if sampler_id in session.samplers:
                raise UsageError(f"save_weights_for_sampler: sampling session {sampler_id!r} already exists")
            if request.kind == "inflight":
                session.samplers[sampler_id] = self._update_inflight(request.model_id, queue)
            else:
                session.samplers[sampler_id] = Target(self._runtime.snapshot(request.model_id, sampler_id))
            return json_answer({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

        saves = request.path is not None  # unnamed weights are removed with the session
        return self._queues.run_in_order(request.model_id, request.seq_id, hash_request(request), job, saves=saves)

    def save_weights_external(self, request: types.SaveWeightsExternalRequest) -> Promise:
        """Write an adapter in the format of `peft`, for download."""

        def job(_: Promise) -> Answer:
            return json_answer({"path": self._runtime.save_external(request), "type": "save_weights_external"})

        return self._queues.run_in_order(request.model_id, request.seq_id, hash_request(request), job, saves=True)

    def unload_model(self, request: types.UnloadModelRequest) -> Promise:
        """Release a model in training."""
        session = self.sessions.owner_of(request.model_id)

        def job(_: Promise) -> Answer:
            self._runtime.unload(request.model_id)
            return json_answer({"model_id": request.model_id, "type": "unload_model"})

        queue = None
        request_id = f"{request.model_id}#unload"
        if self.promises.get(request_id) is None:
            self.model_info(request.model_id)
            for promise in self.promises.with_prefix(f"{request.model_id}#"):
                if not promise.is_submitted:
                    promise.fail("the model was unloaded before this request was due", "user")
            self.promises.forget(f"{request.model_id}#create")
            queue = session.queues.pop(request.model_id)
            session.unloaded.add(request.model_id)
        return self._queues.run_once(request_id, hash_request(request), job, queue)

    def model_info(self, model_id: str) -> ModelInfo:
        """Return the public data of a model; `MissingError` until it is created."""
        info = self._queues.queue_of(model_id).info
        if info is None:
            raise MissingError(f"model {model_id!r} is not ready")
        return info

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> str:
        """Open a sampling session on a base model or a checkpoint, and return its id."""
        session = self.sessions.get(request.session_id)
        if request.model_path is not None:
            if "/sampler_weights/" not in request.model_path:
                raise UsageError(f"{request.model_path}: only weights of save_weights_for_sampler can be sampled from")
            checkpoint = self.store.get(request.model_path)
            if request.base_model not in (None, checkpoint.info.base_model):
                raise UsageError(
                    f"create_sampling_session: {request.model_path} was trained from {checkpoint.info.base_model!r}, "
                    f"not from {request.base_model!r}"
                )
            ref = SamplerRef(checkpoint.info.base_model, path=request.model_path, save=checkpoint.data.name)
        elif request.base_model is not None:
            ref = SamplerRef(request.base_model)
        else:
            raise UsageError("create_sampling_session: give base_model or model_path")
        sampler_id = new_id(request.session_id, "sample", request.sampling_session_seq_id)
        if session.samplers.setdefault(sampler_id, Target(ref)).ref != ref:
            raise UsageError(f"create_sampling_session: {sampler_id!r} already exists, with other weights")
        # Sampling requests, or a request for the context length, will follow.
        self._runtime.base_models.start_lookup(ref.base_model)
        return sampler_id

    def target_of(self, sampler_id: str) -> Target:
        """Return the target of a sampling session."""
        target = self.sessions.owner_of(sampler_id).samplers.get(sampler_id)
        if target is None:
            raise MissingError(f"no sampling session {sampler_id!r}")
        return target

    def sample(self, request: types.SampleRequest, fingerprint: bytes) -> Promise:
        """Sample from a sampling session; equal requests have equal fingerprints."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise UsageError("asample: give sampling_session_id and seq_id")
        target = self.target_of(request.sampling_session_id)
        for name, value in (("base_model", target.ref.base_model), ("model_path", target.ref.path)):
            if getattr(request, name) not in (None, value):
                raise UsageError(f"asample: {name} differs from the sampling session's: leave it out")
        check_checkpoint(self.store, target.ref)

        def job(promise: Promise) -> None:
            self._runtime.sample(target, request, promise)

        return self._queues.run_once(f"{request.sampling_session_id}#{request.seq_id}", fingerprint, job)

    def promise(self, request_id: str) -> Promise:
        """Return the promise of a request; `GoneError` if the answer existed but is forgotten."""
        session = self.sessions.owner_of(request_id)
        promise = self.promises.get(request_id)
        if promise is not None:
            return promise
        owner, _, number = request_id.rpartition("#")
        queue = session.queues.get(owner)
        seq_id = int(number) if _NUMBER.fullmatch(number) else None
        if seq_id is not None and (owner in session.samplers or (queue and seq_id < queue.next_seq_id)):
            raise GoneError(f"the answer to request {request_id!r} is forgotten")
        raise MissingError(f"no request {request_id!r}")

    def cancel(self, request_id: str) -> None:
        """Cancel a sampling request and free its rows in the batch; ignore a forgotten request."""
        session = self.sessions.owner_of(request_id)
        if request_id.rpartition("#")[0] not in session.samplers:
            raise UsageError("cancel_future: only sampling requests can be cancelled")
        promise = self.promises.get(request_id)
        if promise is not None:
            promise.fail("the request was cancelled", "user")
            self.promises.forget(request_id)

    def _record_run(self, model_id: str, info: ModelInfo, user_metadata: Mapping[str, object] | None) -> None:
        now = self.store.clock()
        self.store.records.add_run(Run(model_id, info.base_model, info.rank, now, stringify_values(user_metadata)))

    def _update_inflight(self, model_id: str, queue: ModelQueue) -> Target:
        """Point the model's in-flight sampling sessions to its current weights. Runs on the worker."""
        ref = self._runtime.snapshot(model_id, f"{model_id}:inflight:{secrets.token_hex(8)}")
        if queue.inflight is None:
            queue.inflight = Target(ref)
        else:
            self._runtime.drop_snapshot(queue.inflight.ref)
            queue.inflight.ref = ref
        return queue.inflight
