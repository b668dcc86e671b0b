"""Messages between a run and its workers.

Invariant: messages are pickles, each behind its length in bytes. Tasks are pickled by cloudpickle, which also pickles
classes of scripts and notebooks.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import override

from rlkit.rollout.runner import RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.types import Completion, Episode, Prompt, Sampling

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a worker.

    Args:
        files: Python files of the user, which are imported before tasks are unpickled.
        runner: plays the rollouts in the worker.
        tasks: pickled tasks, which the worker must be able to load.
    """

    files: Sequence[Path]
    runner: RolloutRunner
    tasks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Play:
    """Play a rollout; fields as in `Rollout`."""

    call: int
    task: bytes
    settings: EnvSettings
    member: int
    attempt: int
    seed: int
    purpose: str


@dataclass(frozen=True, slots=True)
class Score:
    """Score the episodes of a group."""

    call: int
    task: bytes
    episodes: Sequence[Episode]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call; its result follows."""

    call: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to an `Ask`: completions, or the error of the service.

    Args:
        version: version of the weights.
        excused_s: seconds of the wait that the service caused.
    """

    request: int
    completions: Sequence[Completion]
    version: int
    excused_s: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Excuse:
    """State of an unanswered request; fields as in `rlkit._util.stopwatch.Request`."""

    request: int
    excused_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Last message to a worker: clean up, and exit."""


type ToWorker = Start | Play | Score | Cancel | Answer | Excuse | Stop


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker can play, or `problem` says why it cannot."""

    process: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for completions.

    Args:
        is_new_turn: sample from the newest weights of the rollout, not from those of its last request.
    """

    call: int
    request: int
    prompt: Prompt
    sampling: Sampling
    seed: int
    num_samples: int
    is_new_turn: bool


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The environment no longer waits for a request."""

    call: int
    request: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a call; None for both if it was cancelled.

    Args:
        cpu_s: processor time of the worker since its start.
    """

    call: int
    value: object
    error: Exception | None
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Printed:
    """A line that an environment printed; `env` is "" outside of rollouts."""

    env: str
    line: str


type FromWorker = Ready | Ask | Withdraw | Result | Printed


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return the frame of a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class FrameReader(asyncio.Protocol):
    """Split a stream of bytes into messages.

    Args:
        receive: receives the content of each frame.
        lose: called when the connection is closed.
    """

    def __init__(self, receive: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        self._receive = receive
        self._lose = lose
        self._data = bytearray()

    @override
    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        while len(self._data) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(self._data[start : start + _LENGTH_BYTES], "little")
            if len(self._data) < end:
                break
            self._receive(bytes(self._data[start + _LENGTH_BYTES : end]))
            start = end
        del self._data[:start]

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
