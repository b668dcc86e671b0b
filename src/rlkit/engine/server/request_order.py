"""When a request runs: once, and in its model's order.

Invariant: the requests of one model run in the order of their `seq_id`, each of them once, however often and in
whatever order they arrive; those of other models do not wait for what one of them waits for.
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
from rlkit.engine.server.futures import Answer, GoneError, NotYet, Promise, Promises
from rlkit.engine.server.sessions import Early, Line, Session, Sessions
from rlkit.errors import MissingError, RlkitError, UsageError

_log = logging.getLogger(__name__)

_ID_MAX = 1 << 31
# The parts of one large call arrive together, its first part last.
_AHEAD_MAX = 4096
# What the requests of one session may come to that wait for their turn, and again those whose turn has come but that
# have not run: the parts of a call of ten million tokens.
_AHEAD_BYTES_MAX = 256 << 20
_QUEUED_BYTES_MAX = 256 << 20

type Job = Callable[[Promise], Answer | None]
"""Runs on the worker; None when the promise is kept later. It may raise `NotYet`."""


class Turns:
    """Gives jobs to the worker. A job that raises `NotYet` holds up those of its own line only.

    Args:
        submit: queues a job of a line.
        submit_soon: queues a job that belongs to none, which is a sample, before those.
    """

    def __init__(
        self,
        sessions: Sessions,
        promises: Promises,
        submit: Callable[[Callable[[], None]], None],
        submit_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._sessions = sessions
        self._promises = promises
        self._submit = submit
        self._submit_soon = submit_soon

    def new_line(self, session_id: str, model_seq_id: int) -> tuple[str, Line]:
        """Return the id and the line of a model to be made; `GoneError` where it was made or unloaded before."""
        session = self._sessions.get(session_id)
        # The client computes this id too, and names its checkpoints after it.
        model_id = new_id(session_id, "train", model_seq_id)
        if model_id in session.unloaded:
            raise GoneError(f"{model_id} was unloaded: make a new model under another model_seq_id")
        line = session.lines.setdefault(model_id, Line())
        if line.info is not None and self._promises.get(f"{model_id}#create") is None:
            raise GoneError(f"{model_id} was made long ago, and is not made again")
        return model_id, line

    def line(self, model_id: str) -> Line:
        """Return the line of a model."""
        line = self._sessions.of(model_id).lines.get(model_id)
        if line is None:
            raise MissingError(f"there is no model {model_id!r} on this server")
        return line

    def once(self, request_id: str, fingerprint: bytes, job: Job, line: Line | None = None) -> Promise:
        """Run a job now, unless it was run under this id before; later jobs of `line` run after it."""
        promise, new = self._promises.make(request_id, fingerprint)
        if new:
            self._start(job, promise, line)
        return promise

    def in_turn(
        self,
        model_id: str,
        seq_id: int | None,
        fingerprint: bytes,
        job: Job,
        *,
        saves: bool = False,
        size_bytes: int = 0,
    ) -> Promise:
        """Run a job once all requests of its model with a smaller `seq_id` have had their turn.

        Where there is no room for it, its turn comes all the same, and it fails then: refused at once, it would leave a
        gap for which all later ones wait.

        Args:
            saves: whether the job leaves something that outlives the session.
            size_bytes: what the job holds until it has run, where that is much.
        """
        line = self.line(model_id)
        if seq_id is None or seq_id < 1:
            raise UsageError("seq_id is missing")
        request_id = f"{model_id}#{seq_id}"
        if seq_id < line.next_seq and self._promises.get(request_id) is None:
            raise GoneError(f"request {seq_id} of {model_id} was answered long ago, and is not run again")
        if seq_id >= line.next_seq + _AHEAD_MAX:
            raise UsageError(f"seq_id: {seq_id} is too far ahead of {line.next_seq}, whose turn it is")
        promise, new = self._promises.make(request_id, fingerprint)
        if new:
            session = self._sessions.of(model_id)
            if (problem := _lacks_room(session, size_bytes, early=seq_id > line.next_seq)) is not None:
                job, size_bytes = partial(refuse, problem), 0

            def start() -> None:
                if saves:
                    self._keep(model_id, promise)
                session.queued.add(size_bytes)
                promise.when_done(partial(session.queued.add, -size_bytes))
                self._start(job, promise, line)

            line.waiting[seq_id] = Early(start, size_bytes)
            while (early := line.waiting.pop(line.next_seq, None)) is not None:
                early.start()
                line.next_seq += 1
        return promise

    def after(self, lines: Iterable[Line], step: Callable[[], None]) -> None:
        """Have the worker do something once all that was handed over for `lines` has run."""
        for line in lines:
            step = partial(self._in_line, step, line)
        self._submit(step)

    def _keep(self, model_id: str, save: Promise) -> None:
        """Note what must still be done should the session end: without the steps before it, a save would be another."""
        save.outlives = True
        for earlier in self._promises.of(f"{model_id}#"):
            earlier.outlives |= earlier.running

    def _start(self, job: Job, promise: Promise, line: Line | None) -> None:
        promise.running = True
        submit = self._submit_soon if line is None else self._submit
        submit(lambda: self._in_line(lambda: self._run(job, promise, line), line))

    def _in_line(self, step: Callable[[], None], line: Line | None) -> None:
        """Do it now, or after what the line waits for. On the worker, as all that follows."""
        if line is not None and line.held is not None:
            line.held.append(step)
        else:
            step()

    def _run(self, job: Job, promise: Promise, line: Line | None) -> None:
        if promise.done:
            return
        promise.begun = True
        try:
            answer = job(promise)
        except NotYet as wait:
            promise.begun = False
            if line is not None:
                line.held = deque()
            submit = self._submit_soon if line is None else self._submit
            wait.ready.add_done_callback(lambda ready: submit(lambda: self._go_on(job, promise, line, ready)))
        except Exception as error:
            _fail(promise, error)
        else:
            if answer is not None:
                promise.resolve(answer)

    def _go_on(self, job: Job, promise: Promise, line: Line | None, ready: Future[None]) -> None:
        """What a job could not begin without is there, or cannot be had."""
        held: deque[Callable[[], None]] = deque()
        if line is not None and line.held is not None:
            held, line.held = line.held, None
        error = ready.exception()
        if isinstance(error, Exception):
            _fail(promise, error)
        else:
            self._run(job, promise, line)
        for step in held:
            self._in_line(step, line)


def fingerprint_of(request: BaseModel) -> bytes:
    """What tells a request from another one, 16 bytes."""
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


def _lacks_room(session: Session, size_bytes: int, *, early: bool) -> str | None:
    """Why no more can be taken of a session, or None. What waits for the one that comes must not keep it out."""
    if early:
        waiting_bytes = sum(other.size_bytes for line in session.lines.values() for other in line.waiting.values())
        if waiting_bytes + size_bytes > _AHEAD_BYTES_MAX:
            return (
                f"requests of {waiting_bytes >> 20} MiB wait for their turn, and there is no room for "
                f"{size_bytes >> 20} MiB more: send less in one call"
            )
    elif session.queued.bytes + size_bytes > _QUEUED_BYTES_MAX:
        return (
            f"requests of {session.queued.bytes >> 20} MiB have not run yet, and there is no room for "
            f"{size_bytes >> 20} MiB more: wait for their results first"
        )
    return None


def refuse(problem: str, _: Promise) -> Answer:
    """Fail as a job, when its turn comes."""
    raise UsageError(problem)


def _fail(promise: Promise, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in FULL:
        _log.error("request %s failed: %s", promise.request_id, error)
    elif not isinstance(error, RlkitError):
        _log.error("request %s failed", promise.request_id, exc_info=error)
    promise.fail_with(error)
