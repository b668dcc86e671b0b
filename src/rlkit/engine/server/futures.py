"""Promises: pending results of requests, retrievable by request id (the futures of the Tinker protocol).

Invariant: a request id has at most one promise, which returns the same answer every time. A promise is forgotten only
after its answer was delivered or cancelled, or its session has ended. The unfetched answers of a session take at most a
gibibyte; an answer beyond that is replaced by an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from weakref import WeakValueDictionary

from rlkit.errors import MissingError, RlkitError, UsageError

_DELIVERED_BYTES_MAX = 64 << 20
_UNFETCHED_BYTES_MAX = 1 << 30
# Memory of a promise without its answer's body; for most answers this is nearly the total.
_OVERHEAD_BYTES = 2048

type Category = Literal["user", "server"]


class GoneError(UsageError):
    """The requested object no longer exists."""


class NotReady(Exception):
    """Raised by a job that cannot start before `ready` is done; the job has changed nothing and is run again later."""

    def __init__(self, ready: Future[None]) -> None:
        super().__init__("the job is waiting for a lookup or download")
        self.ready = ready


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request."""

    body: bytes
    media_type: str


def json_answer(value: Mapping[str, object]) -> Answer:
    """Encode an answer as JSON."""
    return Answer(json.dumps(value).encode(), "application/json")


def proto_answer(body: bytes) -> Answer:
    """Wrap an answer that is encoded as protobuf."""
    return Answer(body, "application/x-protobuf")


def _size_bytes(answer: Answer) -> int:
    return len(answer.body) + _OVERHEAD_BYTES


class ByteCounter:
    """Total size of a session's objects of one kind. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def add(self, size_bytes: int) -> None:
        """Add the size of an object; a negative size removes it."""
        with self._lock:
            self.bytes += size_bytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class Promise:
    """A pending answer. `resolve` and `fail` may be called from any thread; the first call counts."""

    request_id: str
    fingerprint: bytes = b""  # hash of the request, to detect another request with the same id
    is_submitted: bool = False  # the worker has the request's job, or has run it
    is_started: bool = False  # the worker has started the job
    outlives_session: bool = False  # the job runs after the session's end: it saves, or a submitted save depends on it
    unfetched: ByteCounter = field(default_factory=ByteCounter)  # shared by all promises of the session
    _future: Future[Answer] = field(default_factory=Future[Answer])
    _wakers: set[Callable[[], object]] = field(default_factory=set[Callable[[], object]])

    @property
    def done(self) -> bool:
        """True once the answer exists."""
        return self._future.done()

    def resolve(self, answer: Answer) -> None:
        """Set the answer, or an error if the session has too many unfetched ones."""
        if self.unfetched.bytes + _size_bytes(answer) <= _UNFETCHED_BYTES_MAX:
            self._settle(answer)
        else:
            limit = f"{_UNFETCHED_BYTES_MAX >> 20} MiB"
            self.fail(f"the answer was dropped: fetch the finished answers first, which take almost {limit}", "user")

    def fail(self, message: str, category: Category) -> None:
        """Set an error as the answer."""
        self._settle(json_answer({"error": message, "category": category}))

    def fail_from(self, error: Exception) -> None:
        """Set an exception as the answer, with category "user" for the client's mistakes and "server" otherwise."""
        message = str(error) if isinstance(error, RlkitError) else f"{type(error).__name__}: {error}"
        self.fail(message, "user" if isinstance(error, UsageError | MissingError) else "server")

    def on_done(self, call: Callable[[], None]) -> None:
        """Call a function once the answer exists, on the thread that sets it."""
        self._future.add_done_callback(lambda _: call())

    async def wait(self, timeout_s: float) -> Answer | None:
        """Wait for the answer; None after `timeout_s`."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        # Not a callback of the future: it could not be removed, and a client polls repeatedly.
        waker = partial(loop.call_soon_threadsafe, arrived.set)
        self._wakers.add(waker)
        try:
            if not self._future.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await arrived.wait()
        finally:
            self._wakers.discard(waker)
        return self._future.result() if self._future.done() else None

    def uncount_answer(self) -> None:
        """Stop counting the answer, if there is one, as unfetched."""
        if self._future.done():
            self.unfetched.add(-_size_bytes(self._future.result()))

    def _settle(self, answer: Answer) -> None:
        try:
            self._future.set_result(answer)
        except InvalidStateError:  # another call was first
            return
        self.unfetched.add(_size_bytes(answer))
        for waker in list(self._wakers):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                waker()


class Promises:
    """All promises of a server. Used from the server's own thread only."""

    def __init__(self) -> None:
        self._all: dict[str, Promise] = {}
        self._delivered: OrderedDict[str, int] = OrderedDict()
        self._delivered_bytes = 0
        self._unfetched: WeakValueDictionary[str, ByteCounter] = WeakValueDictionary()
        self._shutdown_message = ""

    def get_or_make(self, request_id: str, fingerprint: bytes = b"") -> tuple[Promise, bool]:
        """Return the promise of a request, and whether it is new: a client resends a request that got no reply."""
        promise = self.get(request_id)
        if promise is None:
            unfetched = self._unfetched.setdefault(request_id.partition(":")[0], ByteCounter())
            self._all[request_id] = promise = Promise(request_id, fingerprint, unfetched=unfetched)
            if self._shutdown_message:
                promise.fail(self._shutdown_message, "server")
            return promise, True
        if promise.fingerprint != fingerprint:
            raise UsageError(f"request {request_id!r} was sent before with another content: use a new seq_id")
        return promise, False

    def get(self, request_id: str) -> Promise | None:
        """Return the promise of a request, if there is one."""
        return self._all.get(request_id)

    def with_prefix(self, prefix: str) -> list[Promise]:
        """Return the promises whose request id starts with `prefix`."""
        return [promise for request_id, promise in self._all.items() if request_id.startswith(prefix)]

    def mark_delivered(self, promise: Promise, size_bytes: int) -> None:
        """Record that the answer was sent; it is forgotten after many later answers were sent."""
        if promise.request_id in self._delivered or self._all.get(promise.request_id) is not promise:
            return
        promise.uncount_answer()
        self._delivered[promise.request_id] = size_bytes + _OVERHEAD_BYTES
        self._delivered_bytes += size_bytes + _OVERHEAD_BYTES
        # Never forget this answer, however large: its client may not have received all of it yet.
        while self._delivered_bytes > _DELIVERED_BYTES_MAX and len(self._delivered) > 1:
            self.forget(next(iter(self._delivered)))

    def forget(self, request_id: str) -> None:
        """Drop a promise; a client that waits for it still gets its answer."""
        promise = self._all.pop(request_id, None)
        if promise is not None and request_id not in self._delivered:
            promise.uncount_answer()
        self._delivered_bytes -= self._delivered.pop(request_id, 0)

    def fail_all(self, message: str) -> None:
        """Fail every pending promise, and every new one from now on."""
        self._shutdown_message = message
        for promise in list(self._all.values()):
            promise.fail(message, "server")
