"""Messages between a run and its workers.

Invariant: messages are pickles, each behind a mark and its length in bytes. Tasks are pickled by cloudpickle, which
also pickles classes of scripts and notebooks. Named tuples take half as long as dataclasses.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast, override

from rlkit._util.frames import describe_error
from rlkit.errors import EnvironmentFault, RlkitError
from rlkit.rollout.runner import Rollout, RolloutRunner
from rlkit.types import Completion, Episode, Prompt, Sampling
from rlkit.workers.task_pickles import TaskPickle

_HEADER = struct.Struct("<4sQ")
_MARK = b"\x93rlk"  # begins each frame, because environments can write to the connection too


class Start(NamedTuple):
    """First message to a worker."""

    files: Sequence[Path]  # Python files of the user, which are imported before tasks are unpickled
    runner: RolloutRunner  # plays the rollouts in the worker
    # Pickled tasks, which the worker must be able to load, each behind the name of its environment.
    tasks: Sequence[tuple[str, bytes]]


class Play(NamedTuple):
    """Play a rollout of the task with a number; `WorkerClient.call` sets the number of the call."""

    call: int
    task: int
    rollout: Rollout


class Score(NamedTuple):
    """Score the episodes of a group; numbers as in `Play`."""

    call: int
    task: int
    episodes: Sequence[Episode]
    timeout_s: float


class Cancel(NamedTuple):
    """Cancel a call; its result follows."""

    call: int


class Forget(NamedTuple):
    """Forget the task with a number, because no unfinished call has it."""

    task: int


class Answer(NamedTuple):
    """Answer to an `Ask`: completions or the service's error, and the seconds of the wait that the service caused."""

    request: int
    completions: Sequence[Completion]
    version: int
    excused_s: float
    error: Exception | None = None


class Excuse(NamedTuple):
    """State of an unanswered request; fields as in `rlkit._util.stopwatch.Request`."""

    request: int
    excused_s: float
    silent_s: float


class Stop(NamedTuple):
    """Last message to a worker: clean up, and exit."""


type ToWorker = Start | TaskPickle | Play | Score | Cancel | Forget | Answer | Excuse | Stop


class Ready(NamedTuple):
    """The worker can play, or `problem` says why it cannot."""

    problem: str | None = None


class Ask(NamedTuple):
    """Request for completions."""

    call: int
    request: int
    prompt: Prompt
    sampling: Sampling
    seed: int
    num_samples: int
    is_new_turn: bool  # sample from the newest weights of the rollout, not from those of its last request
    opponent: int | str | None = None  # step or checkpoint of other weights to sample from


class Withdraw(NamedTuple):
    """The environment no longer waits for a request."""

    call: int
    request: int


class Result(NamedTuple):
    """Result of a call, None for both if cancelled, and the worker's processor time (`cpu_s`) since its start."""

    call: int
    value: object
    error: Exception | None
    cpu_s: float


class Printed(NamedTuple):
    """A line that an environment printed; `env` is "" outside of rollouts."""

    env: str
    line: str


type FromWorker = Ready | Ask | Withdraw | Result | Printed


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return the frame of a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(_MARK, len(data)) + data


def as_portable(error: Exception) -> Exception:
    """Return an error that every process can load, in place of one whose class may need other arguments."""
    module = RlkitError.__module__
    kind = next((kind for kind in type(error).__mro__ if kind.__module__ == module), None)
    if kind is None:
        return EnvironmentFault(describe_error(error))
    return error if kind is type(error) else cast("type[Exception]", kind)(str(error))


class _GarbledStream(ConnectionError):
    """Other bytes came between the messages."""


class FrameProtocol(asyncio.Protocol):
    """Send and receive frames over a stream of bytes.

    Args:
        receive: receives the content of each frame.
        lose: called when the connection is closed; True if the stream is not one of frames.
    """

    def __init__(self, receive: Callable[[bytes], None], lose: Callable[[bool], None]) -> None:
        self._receive = receive
        self._lose = lose
        self._data = bytearray()
        self._unsent = list[bytes]()
        self._transport: asyncio.WriteTransport | None = None
        self.send: Callable[[bytes], None] = self._unsent.append
        """Sends a frame as soon as possible; does nothing after the end of the connection."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self.resume_writing()

    @override
    def pause_writing(self) -> None:
        self.send = self._unsent.append  # a transport takes longer for each frame that it has not sent yet

    @override
    def resume_writing(self) -> None:
        assert self._transport is not None
        frames = b"".join(self._unsent)
        self._unsent.clear()
        self.send = self._transport.write
        self.send(frames)

    @override
    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        while len(self._data) - start >= _HEADER.size:
            mark, length = _HEADER.unpack_from(self._data, start)
            if mark != _MARK:
                raise _GarbledStream  # closes the connection
            end = start + _HEADER.size + length
            if len(self._data) < end:
                break
            self._receive(bytes(self._data[start + _HEADER.size : end]))
            start = end
        del self._data[:start]

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.send = lambda frame: None
        self._lose(isinstance(exc, _GarbledStream))

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
