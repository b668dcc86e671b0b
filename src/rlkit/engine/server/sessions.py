"""Sessions: the models and sampling sessions of a client, and their lifetime.

Invariant: each object that a client creates belongs to its session, and its id starts with the session's id, so clients
cannot mix up their objects. The objects are removed when the session ends: by `end`, or after `SILENCE_S` without a
request.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.engine.server.futures import ByteCounter, GoneError
from rlkit.errors import MissingError

# Clients send a heartbeat every 10 s, and warn after two minutes without a reply that their session may be terminated.
SILENCE_S = 30 * 60.0
DEAD_S = 60.0
"""Time without a request, six heartbeats, after which nobody is expected to fetch a sample."""

_ENDED_MAX = 1024


@dataclass(frozen=True, slots=True)
class SamplerRef:
    """Reference to the weights to sample from: the base model's, a checkpoint (`path`) or an unnamed `snapshot`."""

    base_model: str
    path: str | None = None
    save: str | None = None  # the save of `path`: it can be deleted, and other weights saved under its name
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Public data of a model in training; `directory` is that of the base model and its tokeniser."""

    base_model: str
    directory: Path
    rank: int


@dataclass(slots=True, eq=False)
class Target:
    """Weights of sampling sessions; an in-flight save changes the `ref` of all sessions that share the target."""

    ref: SamplerRef


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelQueue:
    """The requests of one model, in order."""

    next_seq_id: int = 1  # the `seq_id` to submit next
    # By `seq_id`, requests that arrived before it was due: a function that submits the request, and its body's size.
    early: dict[int, tuple[Callable[[], None], int]] = field(default_factory=dict[int, tuple[Callable[[], None], int]])
    info: ModelInfo | None = None  # None until the model is created
    inflight: Target | None = None  # shared by the model's in-flight sampling sessions
    # Work blocked by a job that is not ready; None if no job blocks the queue. Used by the worker only.
    blocked: deque[Callable[[], None]] | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """A client's models and sampling sessions by id."""

    session_id: str
    last_request_s: float  # by the clock of `Sessions`
    queues: dict[str, ModelQueue] = field(default_factory=dict[str, ModelQueue])
    unloaded: set[str] = field(default_factory=set[str])  # ids of unloaded models, which are not reused
    samplers: dict[str, Target] = field(default_factory=dict[str, Target])
    queued: ByteCounter = field(default_factory=ByteCounter)  # requests submitted to the worker that have not run


class Sessions:
    """The open sessions; `clock` counts seconds from any start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._ended_ids: deque[str] = deque(maxlen=_ENDED_MAX)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over a copy of the open sessions."""
        return iter(list(self._open.values()))

    def open(self) -> Session:
        """Open a session. Its id is random and unique among servers, because checkpoints are named after it."""
        session = Session(secrets.token_hex(8), self._clock())
        self._open[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return an open session, and restart its silence timeout."""
        session = self._open.get(session_id)
        if session is None:
            raise MissingError(f"no session {session_id!r}: it ended, or was never opened")
        session.last_request_s = self._clock()
        return session

    def owner_of(self, object_id: str) -> Session:
        """Return the session of a model, sampling session or request, as `get`."""
        return self.get(object_id.partition(":")[0])

    def beat(self, session_id: str) -> None:
        """Keep a session open; `GoneError` if it is not open, so that the client stops sending heartbeats."""
        try:
            self.get(session_id)
        except MissingError as error:
            raise GoneError(str(error)) from error

    def end(self, session_id: str) -> Session | None:
        """Remove a session; None if it had already ended, `MissingError` if it never existed."""
        if session_id in self._ended_ids:
            return None
        session = self.get(session_id)
        del self._open[session_id]
        self._ended_ids.append(session_id)
        return session

    def has_ended(self, object_id: str) -> bool:
        """Return True if the session of a model, sampling session or request has ended."""
        return object_id.partition(":")[0] in self._ended_ids

    def silent(self, seconds: float) -> list[Session]:
        """Return the sessions without a request for so long."""
        limit_s = self._clock() - seconds
        return [session for session in self if session.last_request_s < limit_s]
