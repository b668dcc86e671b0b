"""Answers that are not there yet.

Invariant: a request id has at most one promise, and its answer, once given, is given again on every later question;
only answers that were delivered, cancelled or belong to a session that has ended are ever forgotten. The answers that a
session has not fetched come to no more than a gibibyte: one that would be too much becomes an error.
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
# What a promise takes up besides its answer's body: for most answers, nearly all of it.
_OVERHEAD_BYTES = 2048

type Category = Literal["user", "server"]


class GoneError(UsageError):
    """What is asked for was here and is not any more."""


class NotYet(Exception):
    """Raised by a job that cannot begin before `ready` is done; it has changed nothing and runs anew then."""

    def __init__(self, ready: Future[None]) -> None:
        super().__init__("what the job needs is not there yet")
        self.ready = ready


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request."""

    body: bytes
    media_type: str


def json_answer(value: Mapping[str, object]) -> Answer:
    """An answer in JSON."""
    return Answer(json.dumps(value).encode(), "application/json")


def proto_answer(body: bytes) -> Answer:
    """An answer in protobuf."""
    return Answer(body, "application/x-protobuf")


def _size_bytes(answer: Answer) -> int:
    return len(answer.body) + _OVERHEAD_BYTES


class Tally:
    """What things of one kind come to that a session has here. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count a thing, or a negative size once it is gone."""
        with self._lock:
            self.bytes += size_bytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class Promise:
    """One answer to come. `resolve` and `fail` may be called from any thread; the first call counts."""

    request_id: str
    fingerprint: bytes = b""  # tells the request from another one under the same id
    running: bool = False  # whether the request's turn has come
    begun: bool = False  # whether the worker has begun with it
    # Whether its session's end leaves it alone, because it saves or a save that was asked for needs it
    outlives: bool = False
    unfetched: Tally = field(default_factory=Tally)  # what all of its session count their answers in
    _future: Future[Answer] = field(default_factory=Future[Answer])
    _wakers: set[Callable[[], object]] = field(default_factory=set[Callable[[], object]])

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._future.done()

    def resolve(self, answer: Answer) -> None:
        """Give the answer, or an error where the session has not fetched too many others."""
        if self.unfetched.bytes + _size_bytes(answer) <= _UNFETCHED_BYTES_MAX:
            self._settle(answer)
        else:
            most = f"{_UNFETCHED_BYTES_MAX >> 20} MiB"
            self.fail(f"an answer was thrown away: fetch those that are there, which come to almost {most}", "user")

    def fail(self, message: str, category: Category) -> None:
        """Give an error for an answer."""
        self._settle(json_answer({"error": message, "category": category}))

    def fail_with(self, error: Exception) -> None:
        """Answer with an error: the client's own mistakes as such, everything else as the server's."""
        known = isinstance(error, RlkitError)
        users = isinstance(error, UsageError | MissingError)
        self.fail(str(error) if known else f"{type(error).__name__}: {error}", "user" if users else "server")

    def when_done(self, call: Callable[[], None]) -> None:
        """Call something once the answer is there, on the thread that gives it."""
        self._future.add_done_callback(lambda _: call())

    async def wait(self, timeout_s: float) -> Answer | None:
        """The answer, or None if it takes longer than `timeout_s`."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        # No callback of the future's: those cannot be taken back, and a client asks again and again.
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

    def forget_answer(self) -> None:
        """Count the answer no more, if there is one: it was fetched, or nobody will."""
        if self._future.done():
            self.unfetched.add(-_size_bytes(self._future.result()))

    def _settle(self, answer: Answer) -> None:
        try:
            self._future.set_result(answer)
        except InvalidStateError:  # somebody was first
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
        self._unfetched: WeakValueDictionary[str, Tally] = WeakValueDictionary()
        self._closed = ""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def make(self, request_id: str, fingerprint: bytes = b"") -> tuple[Promise, bool]:
        """Return the promise of a request, and whether it is new: a client resends what it got no reply to."""
        known = self.get(request_id)
        if known is None:
            unfetched = self._unfetched.setdefault(request_id.partition(":")[0], Tally())
            self._all[request_id] = promise = Promise(request_id, fingerprint, unfetched=unfetched)
            if self._closed:
                promise.fail(self._closed, "server")
            return promise, True
        if known.fingerprint != fingerprint:
            raise UsageError(f"request {request_id!r} came before with another content: use a new seq_id")
        return known, False

    def get(self, request_id: str) -> Promise | None:
        """The promise of a request, if there is one."""
        return self._all.get(request_id)

    def of(self, prefix: str) -> list[Promise]:
        """The promises whose request id starts with `prefix`."""
        return [promise for request_id, promise in self._all.items() if request_id.startswith(prefix)]

    def delivered(self, promise: Promise, size_bytes: int) -> None:
        """Note that the answer was sent, so that it can be forgotten once many others were."""
        if promise.request_id in self._delivered or self._all.get(promise.request_id) is not promise:
            return
        promise.forget_answer()
        self._delivered[promise.request_id] = size_bytes + _OVERHEAD_BYTES
        self._delivered_bytes += size_bytes + _OVERHEAD_BYTES
        # Never this one, however large: it went out just now, and its client may not have all of it yet.
        while self._delivered_bytes > _DELIVERED_BYTES_MAX and len(self._delivered) > 1:
            self.forget(next(iter(self._delivered)))

    def forget(self, request_id: str) -> None:
        """Drop a promise; whoever waits for it still gets its answer."""
        promise = self._all.pop(request_id, None)
        if promise is not None and request_id not in self._delivered:
            promise.forget_answer()
        self._delivered_bytes -= self._delivered.pop(request_id, 0)

    def fail_all(self, message: str) -> None:
        """Answer every open promise with an error, and those to come too."""
        self._closed = message
        for promise in list(self._all.values()):
            promise.fail(message, "server")
