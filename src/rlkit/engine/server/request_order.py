"""The order of requests: each runs once, in its model's order.

Invariant: the requests of one model run in the order of their `seq_id`, each of them once, however often and in
whatever order they arrive. A model that waits for something does not delay the requests of other models.
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
from rlkit.engine.server.sessions import EarlyRequest, ModelQueue, Session, Sessions
from rlkit.errors import MissingError, RlkitError, UsageError

_log = logging.getLogger(__name__)

_ID_MAX = 1 << 31
# The parts of one large call arrive together, its first part last.
_AHEAD_MAX = 4096
# Limits on a session's early requests, and on its submitted ones that have not run: each admits the parts of a call of
# ten million tokens.
_AHEAD_BYTES_MAX = 256 << 20
_QUEUED_BYTES_MAX = 256 << 20

type Job = Callable[[Promise], Answer | None]
"""Runs on the worker; returns None when the promise is resolved later. It may raise `NotReady`."""


class RequestQueues:
    """Submits the jobs of requests to the worker. A job that raises `NotReady` delays its own model's jobs only.

    Args:
        submit: queues a job of a model.
        submit_first: queues a job of no model, which is a sample, before the jobs of models.
    """

    def __init__(
        self,
        sessions: Sessions,
        promises: Promises,
        submit: Callable[[Callable[[], None]], None],
        submit_first: Callable[[Callable[[], None]], None],
    ) -> None:
        self._sessions = sessions
        self._promises = promises
        self._submit = submit
        self._submit_first = submit_first

    def add_model(self, session_id: str, model_seq_id: int) -> tuple[str, ModelQueue]:
        """Return the id and the queue of a model to make; `GoneError` if it was made or unloaded before."""
        session = self._sessions.get(session_id)
        # The client computes this id too, and names its checkpoints after it.
        model_id = new_id(session_id, "train", model_seq_id)
        if model_id in session.unloaded:
            raise GoneError(f"{model_id} was unloaded: make a new model under another model_seq_id")
        queue = session.queues.setdefault(model_id, ModelQueue())
        if queue.info is not None and self._promises.get(f"{model_id}#create") is None:
            raise GoneError(f"{model_id} was made long ago, and is not made again")
        return model_id, queue

    def queue_of(self, model_id: str) -> ModelQueue:
        """Return the queue of a model."""
        queue = self._sessions.owner_of(model_id).queues.get(model_id)
        if queue is None:
            raise MissingError(f"there is no model {model_id!r} on this server")
        return queue

    def run_once(self, request_id: str, fingerprint: bytes, job: Job, queue: ModelQueue | None = None) -> Promise:
        """Submit a job, unless it was under this id before; later jobs of `queue` run after it."""
        promise, new = self._promises.get_or_make(request_id, fingerprint)
        if new:
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

        A request without room fails when its `seq_id` is due: refused at once, it would leave a gap at which all later
        ones wait.

        Args:
            saves: the job writes something that outlives the session.
            size_bytes: memory that the job holds until it has run; 0 if it is small.
        """
        queue = self.queue_of(model_id)
        if seq_id is None or seq_id < 1:
            raise UsageError("seq_id is missing")
        request_id = f"{model_id}#{seq_id}"
        if seq_id < queue.next_seq_id and self._promises.get(request_id) is None:
            raise GoneError(f"request {seq_id} of {model_id} was answered long ago, and is not run again")
        if seq_id >= queue.next_seq_id + _AHEAD_MAX:
            raise UsageError(f"seq_id: {seq_id} is too far ahead of {queue.next_seq_id}, which is due next")
        promise, new = self._promises.get_or_make(request_id, fingerprint)
        if new:
            session = self._sessions.owner_of(model_id)
            if (problem := _room_problem(session, size_bytes, early=seq_id > queue.next_seq_id)) is not None:
                job, size_bytes = failing_job(problem), 0

            def submit() -> None:
                if saves:
                    self._protect_save(model_id, promise)
                session.queued.add(size_bytes)
                promise.on_done(partial(session.queued.add, -size_bytes))
                self._submit_job(job, promise, queue)

            queue.early[seq_id] = EarlyRequest(submit, size_bytes)
            while (due := queue.early.pop(queue.next_seq_id, None)) is not None:
                due.submit()
                queue.next_seq_id += 1
        return promise

    def run_after(self, queues: Iterable[ModelQueue], work: Callable[[], None]) -> None:
        """Let the worker do something after all submitted jobs of `queues`."""
        for queue in queues:
            work = partial(self._run_or_block, work, queue)
        self._submit(work)

    def _protect_save(self, model_id: str, save: Promise) -> None:
        """Let a save, and the requests before it, without which it would differ, outlive the session."""
        save.outlives_session = True
        for earlier in self._promises.with_prefix(f"{model_id}#"):
            earlier.outlives_session |= earlier.is_submitted

    def _submit_job(self, job: Job, promise: Promise, queue: ModelQueue | None) -> None:
        promise.is_submitted = True
        submit = self._submit_first if queue is None else self._submit
        submit(lambda: self._run_or_block(lambda: self._run(job, promise, queue), queue))

    def _run_or_block(self, work: Callable[[], None], queue: ModelQueue | None) -> None:
        """Do the work now, or behind the job that blocks the queue. Runs on the worker, as all methods below."""
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
            submit = self._submit_first if queue is None else self._submit
            wait.ready.add_done_callback(lambda ready: submit(lambda: self._resume(job, promise, queue, ready)))
        except Exception as error:
            _fail(promise, error)
        else:
            if answer is not None:
                promise.resolve(answer)

    def _resume(self, job: Job, promise: Promise, queue: ModelQueue | None, ready: Future[None]) -> None:
        """Run a job that was not ready, or fail it with the error of `ready`; then the work blocked behind it."""
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


def fingerprint_of(request: BaseModel) -> bytes:
    """Hash a request to 16 bytes that tell it from others."""
    # The SDK counts its sampling sessions anew when it sends such a request again.
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


def _room_problem(session: Session, size_bytes: int, *, early: bool) -> str | None:
    """Explain why a session has no room for a request, or return None. Early requests take no room from due ones."""
    if early:
        waiting_bytes = sum(other.size_bytes for queue in session.queues.values() for other in queue.early.values())
        if waiting_bytes + size_bytes > _AHEAD_BYTES_MAX:
            return (
                f"requests of {waiting_bytes >> 20} MiB wait for earlier ones, and there is no room for "
                f"{size_bytes >> 20} MiB more: send less in one call"
            )
    elif session.queued.bytes + size_bytes > _QUEUED_BYTES_MAX:
        return (
            f"requests of {session.queued.bytes >> 20} MiB have not run yet, and there is no room for "
            f"{size_bytes >> 20} MiB more: wait for their results first"
        )
    return None


def _fail(promise: Promise, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in FULL:
        _log.error("request %s failed: %s", promise.request_id, error)
    elif not isinstance(error, RlkitError):
        _log.error("request %s failed", promise.request_id, exc_info=error)
    promise.fail_from(error)
