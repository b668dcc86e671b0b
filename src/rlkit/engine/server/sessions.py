"""What a client has on this server, and for how long.

Invariant: all that a client makes hangs on its session, under an id that starts with the session's, so that one
client's cannot be taken for another's, and it goes when the session ends: by `end`, or by itself once nothing was heard
of the client for a while.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.engine.server.futures import GoneError, Tally
from rlkit.errors import MissingError

# Clients send a heartbeat every 10 s and say after two minutes without a reply that their session may be terminated.
SILENCE_S = 30 * 60.0
_ENDED_MAX = 1024


@dataclass(frozen=True, slots=True)
class SamplerRef:
    """Which weights to sample from: the base model's, a checkpoint (`path`) or an unnamed `snapshot`."""

    base_model: str
    path: str | None = None
    save: str | None = None  # which save of the path: it can be deleted, and other weights saved under its name
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may know of a model in training; `directory` holds the base model and its tokeniser."""

    base_model: str
    directory: Path
    rank: int


@dataclass(slots=True, eq=False)
class Target:
    """What sampling sessions sample from; an in-flight save gives all that share it another `ref`."""

    ref: SamplerRef


@dataclass(frozen=True, slots=True, eq=False)
class Early:
    """A request that came before its turn: what starts it, and what its body comes to."""

    start: Callable[[], None]
    size_bytes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Line:
    """The requests of one model, waiting for their turn."""

    next_seq: int = 1  # the `seq_id` that runs next
    # The requests that came early, by their `seq_id`
    waiting: dict[int, Early] = field(default_factory=dict[int, Early])
    info: ModelInfo | None = None  # known once the model is made
    inflight: Target | None = None  # what the model's in-flight sampling sessions share
    # What comes after a job that cannot begin yet; None while there is no such job. Used by the worker only.
    held: deque[Callable[[], None]] | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """A client's models and sampling sessions by id; `seen_s` is when it was last heard of."""

    session_id: str
    seen_s: float
    lines: dict[str, Line] = field(default_factory=dict[str, Line])
    # The ids of models that were unloaded, none of which is given to another model
    unloaded: set[str] = field(default_factory=set[str])
    samplers: dict[str, Target] = field(default_factory=dict[str, Target])
    queued: Tally = field(default_factory=Tally)  # what the requests come to whose turn has come and that have not run


class Sessions:
    """The open sessions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_MAX)

    def __iter__(self) -> Iterator[Session]:
        """The open sessions, as they are now."""
        return iter(list(self._open.values()))

    def open(self) -> Session:
        """A new session. Its id cannot be guessed, and no other server has it: checkpoints are named after it."""
        session = Session(secrets.token_hex(8), self._clock())
        self._open[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return the session of an id; being asked for keeps it open."""
        session = self._open.get(session_id)
        if session is None:
            raise MissingError(f"there is no session {session_id!r}: it ended, or was never opened")
        session.seen_s = self._clock()
        return session

    def of(self, name: str) -> Session:
        """The session of a model, sampling session or request; as `get`."""
        return self.get(name.partition(":")[0])

    def beat(self, session_id: str) -> None:
        """Keep a session open; `GoneError` where there is none, so that the client need not go on beating."""
        try:
            self.get(session_id)
        except MissingError as error:
            raise GoneError(str(error)) from error

    def end(self, session_id: str) -> Session | None:
        """Take a session out; None if it was ended already, `MissingError` if there never was one."""
        if session_id in self._ended:
            return None
        session = self.get(session_id)
        del self._open[session_id]
        self._ended.append(session_id)
        return session

    def has_ended(self, name: str) -> bool:
        """Whether the session of a model, sampling session or request was here, and has ended."""
        return name.partition(":")[0] in self._ended

    def silent(self) -> list[Session]:
        """The sessions of which nothing was heard for `SILENCE_S`."""
        limit_s = self._clock() - SILENCE_S
        return [session for session in self if session.seen_s < limit_s]
