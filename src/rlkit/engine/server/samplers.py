"""Which weights are sampled from at a time, and whose turn it is.

Invariant: another set of weights is merged and packed, or becomes busy, only while there are fewer than two of them, or
fewer than 32 that come to less than `served_bytes`. The request that has waited longest begins next, and with it all
that wait for the same sampling session, or for the same in-flight weights. While it waits for room, without weights of
its own, all others wait behind it, also those for weights that are there. Runs on the worker thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rlkit._util.activity import Activity
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import SampleRequest, SampleResult, Ticket
from rlkit.engine.server.base_models import Base
from rlkit.engine.server.futures import Promise, proto_answer
from rlkit.engine.server.sessions import SamplerRef, Target
from rlkit.errors import RlkitError

_log = logging.getLogger(__name__)

# One client samples from the newest weights while another, or an evaluation, samples from its own.
_SERVED_MIN = 2
# All of them are looked through for every token.
_SERVED_MAX = 32


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Weights that can be sampled from, and the requests that they are sampled for."""

    decoder: Decoder
    size_bytes: int  # what is theirs alone
    base: Base  # held, so that it is not loaded anew for the next adapter
    tickets: dict[Promise, Ticket] = field(default_factory=dict[Promise, Ticket])


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    target: Target
    request: SampleRequest
    encode: Callable[[SampleResult], bytes]
    promise: Promise


class Samplers:
    """The weights that are served, and the requests that they work on or that wait for some.

    Args:
        served_bytes: more weights than two are served while they come to less.
    """

    def __init__(
        self, make: Callable[[SamplerRef], Served], *, served_bytes: int, activity: Activity | None = None
    ) -> None:
        self._make = make
        self._served_bytes = served_bytes
        self._activity = activity or Activity()
        self._served: OrderedDict[SamplerRef, Served] = OrderedDict()
        self._waiting: dict[Promise, _Wanted] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to decode."""
        return bool(self._waiting) or any(served.decoder.busy for served in self._served.values())

    def submit(
        self, target: Target, request: SampleRequest, encode: Callable[[SampleResult], bytes], promise: Promise
    ) -> None:
        """Queue a request; its promise is kept by a later `advance`."""
        self._waiting[promise] = _Wanted(target, request, encode, promise)
        self._admit()

    def advance(self) -> None:
        """Decode one token for every running sample that is still wanted."""
        self._drop_unwanted()
        self._report()
        for ref, served in list(self._served.items()):
            if not served.decoder.busy:
                continue
            others = [one.decoder for one in self._served.values() if one is not served and one.decoder.busy]
            try:
                served.decoder.step(others=others)
            except Exception as error:
                if not isinstance(error, RlkitError):
                    _log.exception("sampling failed")
                del self._served[ref]
                for promise in served.tickets:
                    promise.fail_with(error)
        self._admit()
        self._report()

    def release(self, session_id: str) -> None:
        """Forget the unnamed weights of a session; its requests have their answer, that it has ended."""
        self._drop_unwanted()
        prefix = f"{session_id}:"
        for ref in [ref for ref in self._served if (ref.snapshot or "").startswith(prefix)]:
            del self._served[ref]

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._served.clear()

    def _report(self) -> None:
        decoders = [served.decoder for served in self._served.values()]
        queued = sum(decoder.queued_count for decoder in decoders)
        self._activity.put("replies in progress", sum(decoder.running_count for decoder in decoders))
        self._activity.put("tokens in them", sum(decoder.drawn_tokens for decoder in decoders))
        self._activity.put(
            "replies queued", queued + sum(wanted.request.num_samples for wanted in self._waiting.values())
        )

    def _drop_unwanted(self) -> None:
        """Forget requests that have their answer already: they were cancelled, or their session has ended."""
        for promise in [promise for promise in self._waiting if promise.done]:
            del self._waiting[promise]
        for served in self._served.values():
            for promise in [promise for promise in served.tickets if promise.done]:
                served.decoder.cancel(served.tickets.pop(promise))

    def _admit(self) -> None:
        """Begin requests while there is room: the one that waits longest, and those of its target."""
        while self._waiting:
            target = next(iter(self._waiting.values())).target
            served = self._served.get(target.ref)
            busy = [other for other in self._served.values() if other.decoder.busy]
            if served not in busy and not self._room(busy):
                return
            together = [wanted for wanted in self._waiting.values() if wanted.target is target]
            for wanted in together:
                del self._waiting[wanted.promise]
            try:
                served = served or self._serve(target.ref)
            except Exception as error:
                for wanted in together:
                    wanted.promise.fail_with(error)
            else:
                self._served.move_to_end(target.ref)
                for wanted in together:
                    _begin(served, wanted)

    def _room(self, there: Collection[Served]) -> bool:
        few, size_bytes = len(there) < _SERVED_MIN, sum(served.size_bytes for served in there)
        return few or (len(there) < _SERVED_MAX and size_bytes < self._served_bytes)

    def _serve(self, ref: SamplerRef) -> Served:
        """Merge and pack weights; idle ones that were not used for longest make room."""
        idle = [ref for ref, served in self._served.items() if not served.decoder.busy]
        while idle and not self._room(self._served.values()):
            del self._served[idle.pop(0)]
        self._served[ref] = served = self._make(ref)
        return served


def _begin(served: Served, wanted: _Wanted) -> None:
    def done(result: SampleResult) -> None:
        served.tickets.pop(wanted.promise, None)
        try:
            answer = proto_answer(wanted.encode(result))
        except Exception as error:
            _log.exception("the answer to %s cannot be encoded", wanted.promise.request_id)
            wanted.promise.fail_with(error)
        else:
            wanted.promise.resolve(answer)

    try:
        served.tickets[wanted.promise] = served.decoder.submit(wanted.request, done)
    except Exception as error:
        wanted.promise.fail_with(error)
