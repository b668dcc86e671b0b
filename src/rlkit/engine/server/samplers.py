"""Sets of weights for sampling, and the order of sampling requests.

Invariant: a set of weights is loaded, or becomes busy, only if there are fewer than two of them, or fewer than 32 that
together take less than `served_bytes`. The request that has waited longest starts next, together with all that wait for
the same sampling session or the same in-flight weights. While it waits for room for its weights, all later requests
wait, even if their weights are loaded. Runs on the worker thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rlkit._util.activity import Activity
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import SampleRequest, SampleResult, Ticket
from rlkit.engine.server.base_models import LoadedBase
from rlkit.engine.server.futures import Promise, proto_answer
from rlkit.engine.server.sessions import SamplerRef, Target
from rlkit.errors import RlkitError

_log = logging.getLogger(__name__)

# One client samples from the newest weights while another, or an evaluation, samples from its own.
_SERVED_MIN = 2
# Before each token the scheduler goes through all sets of weights.
_SERVED_MAX = 32


@dataclass(frozen=True, slots=True, eq=False)
class ServedWeights:
    """Weights to sample from, and their running requests."""

    decoder: Decoder
    size_bytes: int  # without the memory shared with the base model
    base: LoadedBase  # a reference, so that it is not loaded again for the next adapter
    tickets: dict[Promise, Ticket] = field(default_factory=dict[Promise, Ticket])


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    target: Target
    request: SampleRequest
    encode: Callable[[SampleResult], bytes]
    promise: Promise


class Samplers:
    """The served weights, their running requests, and the waiting requests.

    Args:
        load: function that loads the weights of a reference.
        served_bytes: memory below which more than two sets of weights are served.
    """

    def __init__(
        self, load: Callable[[SamplerRef], ServedWeights], *, served_bytes: int, activity: Activity | None = None
    ) -> None:
        self._load = load
        self._served_bytes = served_bytes
        self._activity = activity or Activity()
        self._served: OrderedDict[SamplerRef, ServedWeights] = OrderedDict()
        self._waiting: dict[Promise, _WaitingRequest] = {}

    @property
    def busy(self) -> bool:
        """True while there are samples to decode."""
        return bool(self._waiting) or any(served.decoder.busy for served in self._served.values())

    def submit(
        self, target: Target, request: SampleRequest, encode: Callable[[SampleResult], bytes], promise: Promise
    ) -> None:
        """Queue a request; a later `advance` resolves its promise."""
        self._waiting[promise] = _WaitingRequest(target, request, encode, promise)
        self._admit()

    def advance(self) -> None:
        """Decode one token for every running sample whose promise is pending."""
        self._drop_answered_requests()
        self._report()
        for ref, served in list(self._served.items()):
            if not served.decoder.busy:
                continue
            others = [other.decoder for other in self._served.values() if other is not served]
            try:
                served.decoder.step(others=others)
            except Exception as error:
                if not isinstance(error, RlkitError):
                    _log.exception("sampling failed")
                del self._served[ref]
                for promise in served.tickets:
                    promise.fail_from(error)
        self._admit()
        self._report()

    def release(self, session_id: str) -> None:
        """Release the unnamed weights and prefixes of an ended session, whose requests have already failed."""
        self._drop_answered_requests()
        prefix = f"{session_id}:"
        for ref in [ref for ref in self._served if (ref.snapshot or "").startswith(prefix)]:
            del self._served[ref]
        for served in self._served.values():
            served.decoder.drop_prefixes(session_id)

    def clear(self) -> None:
        """Drop all requests and release all weights."""
        self._waiting.clear()
        self._served.clear()

    def _report(self) -> None:
        decoders = [served.decoder for served in self._served.values()]
        queued = sum(decoder.queued_count for decoder in decoders)
        waiting = sum(entry.request.num_samples for entry in self._waiting.values())
        self._activity.put("replies in progress", sum(decoder.running_count for decoder in decoders))
        self._activity.put("tokens in them", sum(decoder.drawn_tokens for decoder in decoders))
        self._activity.put("replies queued", queued + waiting)

    def _drop_answered_requests(self) -> None:
        """Drop requests whose promise is done: they were cancelled, or their session has ended."""
        for promise in [promise for promise in self._waiting if promise.done]:
            del self._waiting[promise]
        for served in self._served.values():
            for promise in [promise for promise in served.tickets if promise.done]:
                served.decoder.cancel(served.tickets.pop(promise))

    def _admit(self) -> None:
        """Start waiting requests while there is room: the oldest first, with all others of its target."""
        while self._waiting:
            target = next(iter(self._waiting.values())).target
            served = self._served.get(target.ref)
            busy = [other for other in self._served.values() if other.decoder.busy]
            if served not in busy and not self._has_room(busy):
                return
            entries = [entry for entry in self._waiting.values() if entry.target is target]
            for entry in entries:
                del self._waiting[entry.promise]
            try:
                served = served or self._serve(target.ref)
            except Exception as error:
                for entry in entries:
                    entry.promise.fail_from(error)
            else:
                self._served.move_to_end(target.ref)
                for entry in entries:
                    _start(served, entry)

    def _has_room(self, served: Collection[ServedWeights]) -> bool:
        count, size_bytes = len(served), sum(weights.size_bytes for weights in served)
        return count < _SERVED_MIN or (count < _SERVED_MAX and size_bytes < self._served_bytes)

    def _serve(self, ref: SamplerRef) -> ServedWeights:
        """Load weights; release the least recently used idle weights if there is no room."""
        idle = [ref for ref, served in self._served.items() if not served.decoder.busy]
        while idle and not self._has_room(self._served.values()):
            del self._served[idle.pop(0)]
        self._served[ref] = served = self._load(ref)
        return served


def _start(served: ServedWeights, entry: _WaitingRequest) -> None:
    def finish(result: SampleResult) -> None:
        served.tickets.pop(entry.promise, None)
        try:
            answer = proto_answer(entry.encode(result))
        except Exception as error:
            _log.exception("the answer to %s cannot be encoded", entry.promise.request_id)
            entry.promise.fail_from(error)
        else:
            entry.promise.resolve(answer)

    owner = entry.promise.request_id.partition(":")[0]  # the session
    try:
        served.tickets[entry.promise] = served.decoder.submit(entry.request, finish, owner=owner)
    except Exception as error:
        entry.promise.fail_from(error)
