"""Answers that are not there yet.

Invariant: a request id has at most one promise, and its answer, once given, is given again on every later question;
only answers that were delivered are ever forgotten.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

_DELIVERED_BYTES_MAX = 64 << 20

type Category = Literal["user", "server"]


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


@dataclass(slots=True, eq=False)
class Promise:
    """One answer to come. `resolve` and `fail` may be called from any thread; the first call counts."""

    request_id: str
    _future: Future[Answer] = field(default_factory=Future[Answer])

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._future.done()

    def resolve(self, answer: Answer) -> None:
        """Give the answer."""
        if not self._future.done():
            self._future.set_result(answer)

    def fail(self, message: str, category: Category) -> None:
        """Give an error for an answer."""
        self.resolve(json_answer({"error": message, "category": category}))

    async def wait(self, timeout_s: float) -> Answer | None:
        """The answer, or None if it takes longer than `timeout_s`."""
        waiter = asyncio.wrap_future(self._future)
        await asyncio.wait([waiter], timeout=timeout_s)
        return waiter.result() if waiter.done() else None


class Promises:
    """All promises of a server. Used from the server's own thread only."""

    def __init__(self) -> None:
        self._open: dict[str, Promise] = {}
        self._delivered: OrderedDict[str, tuple[Promise, int]] = OrderedDict()
        self._delivered_bytes = 0

    def make(self, request_id: str) -> tuple[Promise, bool]:
        """The promise of a request, and whether it is new: a client resends what it got no reply to."""
        known = self.get(request_id)
        if known is not None:
            return known, False
        self._open[request_id] = promise = Promise(request_id)
        return promise, True

    def get(self, request_id: str) -> Promise | None:
        """The promise of a request, if there is one."""
        delivered = self._delivered.get(request_id)
        return delivered[0] if delivered else self._open.get(request_id)

    def delivered(self, promise: Promise, size_bytes: int) -> None:
        """Note that the answer was sent, so that it can be forgotten once many others were."""
        if self._open.pop(promise.request_id, None) is None:
            return
        self._delivered[promise.request_id] = (promise, size_bytes)
        self._delivered_bytes += size_bytes
        while self._delivered_bytes > _DELIVERED_BYTES_MAX:
            self._delivered_bytes -= self._delivered.popitem(last=False)[1][1]

    def fail_all(self, message: str) -> None:
        """Answer every open promise with an error."""
        for promise in list(self._open.values()):
            promise.fail(message, "server")
