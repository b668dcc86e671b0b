"""Queues of requests: run each request once, in the `seq_id` order of its model.

Invariant: the requests of one model run in the order of their `seq_id`, once each, in whatever order and however often
they arrive. A model whose next job is not ready does not delay the requests of other models.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b

from pydantic import BaseModel

from rlkit._util.files import FULL
from rlkit.engine.server.futures import Answer, GoneError, NotReady, Promise, Promises
from rlkit.engine.server.sessions import ModelQueue, Session, Sessions
from rlkit.engine.server.worker import Worker
from rlkit.errors import MissingError, RlkitError, UsageError

_log = logging.getLogger(__name__)

_ID_MAX = 1 << 31
# Maximum gap to the next due `seq_id`: the SDK sends the parts of a large call together, the first part last.
_MAX_EARLY_REQUESTS = 4096
# Limits on a session's early requests, and on its submitted requests that have not run. Each is large enough for a call
# of ten million tokens.
_MAX_EARLY_BYTES = 256 << 20
_MAX_QUEUED_BYTES = 256 << 20

type Job = Callable[[Promise], Answer | None]
"""Function that runs on the worker; returns None if the promise is resolved later. It may raise `NotReady`."""


class RequestQueues:
    """Queues that submit requests' jobs to the worker. A job that raises `NotReady` delays its model's jobs only."""

    def __init__(self, sessions: Sessions, promises: Promises, worker: Worker) -> None:
        self._sessions = sessions
        self._promises = promises
        self._worker = worker

    def add_model(self, session_id: str, model_seq_id: int) -> tuple[str, ModelQueue]:
        """Return the id and the queue of a new model; `GoneError` if its earlier creation is no longer recorded."""
        session = self._sessions.get(session_id)
        # The client also computes this id, and names its checkpoints after it.
        model_id = new_id(session_id, "train", model_seq_id)
        if model_id in session.unloaded:
            raise GoneError(f"{model_id} was unloaded: create a new model with another model_seq_id")
        queue = session.queues.setdefault(model_id, ModelQueue())
        if queue.info is not None and self._promises.get(f"{model_id}#create") is None:
            raise GoneError(f"{model_id} was created earlier and its answer is forgotten: use a new model_seq_id")
        return model_id, queue

    def queue_of(self, model_id: str) -> ModelQueue:
        """Return the queue of a model."""
        queue = self._sessions.owner_of(model_id).queues.get(model_id)
        if queue is None:
            raise MissingError(f"there is no model {model_id!r} on this server")
        return queue

    def run_once(self, request_id: str, fingerprint: bytes, job: Job, queue: ModelQueue | None = None) -> Promise:
        """Submit a job, unless a job with this id was already submitted; later jobs of `queue` run after it."""
        promise, is_new = self._promises.get_or_make(request_id, fingerprint)
        if is_new:
            self._submit_job(job, promise, queue)
        return promise

    def run_in_order(
        self,
        model_id: str,
        seq_id: int | None,
        fingerprint: bytes,
        job: Job,
        *,
        saves: bool = False,
        size_bytes: int = 0,
    ) -> Promise:
        """Submit a job after all requests of its model with a smaller `seq_id`.

        A request that exceeds the memory limit fails when its `seq_id` is due. Rejecting it immediately would leave a
        gap in `seq_id` and block all later requests.

        Args:
            saves: True if the job writes a checkpoint; such a job runs even if the session has ended.
            size_bytes: memory that the job holds until it has run; 0 if small.
        """
        queue = self.queue_of(model_id)
        if seq_id is None or seq_id < 1:
            raise UsageError("seq_id is missing")
        request_id = f"{model_id}#{seq_id}"
        if seq_id < queue.next_seq_id and self._promises.get(request_id) is None:
            raise GoneError(f"the answer to request {seq_id} of {model_id} is forgotten, and requests run only once")
        if seq_id >= queue.next_seq_id + _MAX_EARLY_REQUESTS:
            raise UsageError(f"seq_id: {seq_id} is too far ahead of the next expected one, {queue.next_seq_id}")
        promise, is_new = self._promises.get_or_make(request_id, fingerprint)
        if is_new:
            session = self._sessions.owner_of(model_id)
            if (problem := _find_memory_problem(session, size_bytes, early=seq_id > queue.next_seq_id)) is not None:
                job, size_bytes = failing_job(problem), 0

            def submit() -> None:
                if saves:
                    self._protect_save(model_id, promise)
                session.queued.add(size_bytes)
                promise.on_done(partial(session.queued.add, -size_bytes))
                self._submit_job(job, promise, queue)

            queue.early[seq_id] = submit, size_bytes
            while queue.next_seq_id in queue.early:
                submit_due, _ = queue.early.pop(queue.next_seq_id)
                submit_due()
                queue.next_seq_id += 1
        return promise

    def run_after(self, queues: Iterable[ModelQueue], work: Callable[[], None]) -> None:
        """Run `work` on the worker after all submitted jobs of `queues`."""
        for queue in queues:  # one wrapper per queue, each of which defers the work if its queue is blocked
            work = partial(self._run_or_block, work, queue)
        self._worker.submit(work)

    def _protect_save(self, model_id: str, save: Promise) -> None:
        """Mark a save, and the earlier requests that its content depends on, to run even after the session's end."""
        save.outlives_session = True
        for earlier in self._promises.with_prefix(f"{model_id}#"):
            earlier.outlives_session |= earlier.is_submitted

    def _submit_job(self, job: Job, promise: Promise, queue: ModelQueue | None) -> None:
        promise.is_submitted = True
        self._submit(lambda: self._run_or_block(lambda: self._run(job, promise, queue), queue), queue)

    def _submit(self, work: Callable[[], None], queue: ModelQueue | None) -> None:
        self._worker.submit(work, urgent=queue is None)  # sampling belongs to no model, and runs ahead of models' jobs

    def _run_or_block(self, work: Callable[[], None], queue: ModelQueue | None) -> None:
        """Run `work` now, or after the job that blocks the queue. Runs on the worker, as all methods below."""
        if queue is not None and queue.blocked is not None:
            queue.blocked.append(work)
        else:
            work()

    def _run(self, job: Job, promise: Promise, queue: ModelQueue | None) -> None:
        if promise.done:
            return
        promise.is_started = True
        try:
            answer = job(promise)
        except NotReady as wait:
            promise.is_started = False
            if queue is not None:
                queue.blocked = deque()
            resume = partial(self._resume, job, promise, queue)
            wait.ready.add_done_callback(lambda ready: self._submit(partial(resume, ready), queue))
        except Exception as error:
            _fail(promise, error)
        else:
            if answer is not None:
                promise.resolve(answer)

    def _resume(self, job: Job, promise: Promise, queue: ModelQueue | None, ready: Future[None]) -> None:
        """Run a job that was not ready, or fail it with the error of `ready`; then run the work that it blocked."""
        blocked: deque[Callable[[], None]] = deque()
        if queue is not None and queue.blocked is not None:
            blocked, queue.blocked = queue.blocked, None
        error = ready.exception()
        if isinstance(error, Exception):
            _fail(promise, error)
        else:
            self._run(job, promise, queue)
        for work in blocked:
            self._run_or_block(work, queue)


def hash_request(request: BaseModel) -> bytes:
    """Return a 16-byte hash that identifies the content of a request."""
    # The SDK uses a new sampling_session_seq_id when it resends a request with a seq_id.
    content = request.model_dump_json(
        exclude={"sampling_session_seq_id"} if "seq_id" in type(request).model_fields else None
    )
    return blake2b(content.encode(), digest_size=16, person=type(request).__name__[:16].encode()).digest()


def new_id(session_id: str, kind: str, number: int) -> str:
    """Return the id of a session's model (`kind` "train") or sampling session ("sample"), as the client computes it."""
    if not 0 <= number < _ID_MAX:
        raise UsageError(f"model_seq_id and sampling_session_seq_id must be 0 … {_ID_MAX - 1}")
    return f"{session_id}:{kind}:{number}"


def failing_job(problem: str) -> Job:
    """Make a job that fails with a `UsageError`."""

    def fail(_: Promise) -> Answer:
        raise UsageError(problem)

    return fail


def _find_memory_problem(session: Session, size_bytes: int, *, early: bool) -> str | None:
    """Return why a request exceeds the session's memory limits, or None. Early requests have their own limit."""
    if early:
        waiting_bytes = sum(size for queue in session.queues.values() for _, size in queue.early.values())
        limit_bytes, state, hint = _MAX_EARLY_BYTES, "wait for earlier ones", "send less per call"
    else:
        waiting_bytes = session.queued.bytes
        limit_bytes, state, hint = _MAX_QUEUED_BYTES, "have not run yet", "wait for their results first"
    if waiting_bytes + size_bytes <= limit_bytes:
        return None
    size = f"{size_bytes >> 20} MiB"
    return f"requests of {waiting_bytes >> 20} MiB {state}, and there is no memory for {size} more: {hint}"


def _fail(promise: Promise, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in FULL:
        _log.error("request %s failed: %s", promise.request_id, error)
    elif not isinstance(error, RlkitError):
        _log.error("request %s failed", promise.request_id, exc_info=error)
    promise.fail_from(error)
