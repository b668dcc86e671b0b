"""Which weights are sampled from at a time, and whose turn it is.

Invariant: at most `_SERVED_MAX` sets of weights are busy at once, because each is a merged and packed copy of a model;
requests for others wait, longest first, without copies of their own. Runs on the worker thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from rlkit.engine.promises import Promise, proto_answer
from rlkit.engine.requests import SampleRequest, SampleResult, Ticket
from rlkit.engine.sampler import Decoder
from rlkit.engine.sessions import SamplerRef, Target
from rlkit.errors import RlkitError

_log = logging.getLogger(__name__)

_SERVED_MAX = 2

type ServedKey = tuple[SamplerRef, str]
"""Weights for sampling, and which save of them: a name can be deleted and saved under again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A request whose turn has not come."""

    target: Target
    request: SampleRequest
    encode: Callable[[SampleResult], bytes]
    promise: Promise


class Samplers:
    """The decoders that are there, and the requests that they work on or that wait for one.

    Args:
        key: what tells the weights of a reference apart; raises if they are gone.
        make: a decoder of these weights.
    """

    def __init__(self, key: Callable[[SamplerRef], ServedKey], make: Callable[[SamplerRef], Decoder]) -> None:
        self._key = key
        self._make = make
        self._decoders: OrderedDict[ServedKey, Decoder] = OrderedDict()
        self._tickets: dict[Decoder, dict[Promise, Ticket]] = {}
        self._waiting: deque[_Wanted] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is something to decode."""
        return bool(self._waiting) or self._busy_decoders() > 0

    def submit(
        self, target: Target, request: SampleRequest, encode: Callable[[SampleResult], bytes], promise: Promise
    ) -> None:
        """Queue a request; its promise is kept by a later `advance`."""
        self._waiting.append(_Wanted(target, request, encode, promise))
        self._admit()

    def cancel(self, promise: Promise) -> None:
        """Stop working on a request, if it is being worked on."""
        self._waiting = deque(wanted for wanted in self._waiting if wanted.promise is not promise)
        for decoder, tickets in self._tickets.items():
            if (ticket := tickets.pop(promise, None)) is not None:
                decoder.cancel(ticket)

    def advance(self) -> None:
        """Decode one token for every running sample."""
        for key, decoder in list(self._decoders.items()):
            if not decoder.busy:
                continue
            try:
                decoder.step()
            except Exception as error:
                if not isinstance(error, RlkitError):
                    _log.exception("sampling failed")
                del self._decoders[key]
                for promise in self._tickets.pop(decoder, {}):
                    promise.fail_with(error)
        if self._busy_decoders() < _SERVED_MAX:
            self._admit()

    def release(self, session_id: str) -> None:
        """Forget the requests and unnamed weights of a session."""
        prefix = f"{session_id}:"
        known = [wanted.promise for wanted in self._waiting]
        known += [promise for tickets in self._tickets.values() for promise in tickets]
        for promise in known:
            if promise.request_id.startswith(prefix):
                self.cancel(promise)
        for key in [key for key in self._decoders if (key[0].snapshot or "").startswith(prefix)]:
            self._tickets.pop(self._decoders.pop(key), None)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._decoders.clear()
        self._tickets.clear()

    def _busy_decoders(self) -> int:
        return sum(decoder.busy for decoder in self._decoders.values())

    def _admit(self) -> None:
        """Begin requests in their order while there is room; those of one sampling session begin together."""
        while self._waiting:
            target = self._waiting[0].target
            together = [wanted for wanted in self._waiting if wanted.target is target]
            try:
                key = self._key(target.ref)
                served = self._decoders.get(key)
                if not (served and served.busy) and self._busy_decoders() >= _SERVED_MAX:
                    return
                decoder = self._decoder(key)
            except Exception as error:
                for wanted in together:
                    wanted.promise.fail_with(error)
            else:
                for wanted in together:
                    self._begin(decoder, wanted)
            self._waiting = deque(wanted for wanted in self._waiting if wanted.target is not target)

    def _begin(self, decoder: Decoder, wanted: _Wanted) -> None:
        tickets = self._tickets.setdefault(decoder, {})

        def done(result: SampleResult) -> None:
            tickets.pop(wanted.promise, None)
            wanted.promise.resolve(proto_answer(wanted.encode(result)))

        try:
            tickets[wanted.promise] = decoder.submit(wanted.request, done)
        except Exception as error:
            wanted.promise.fail_with(error)

    def _decoder(self, key: ServedKey) -> Decoder:
        """The decoder of some weights; for a new one, idle ones that were not used for longest make room."""
        if key not in self._decoders:
            idle = [key for key, decoder in self._decoders.items() if not decoder.busy]
            for old in idle[: max(len(self._decoders) - _SERVED_MAX + 1, 0)]:
                self._tickets.pop(self._decoders.pop(old), None)
            self._decoders[key] = self._make(key[0])
        self._decoders.move_to_end(key)
        return self._decoders[key]
