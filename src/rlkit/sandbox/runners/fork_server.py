"""Programs on this machine: a server that has loaded their libraries forks for each.

Invariant: no program outlives its time limit, the call that waits for it, or the process that asked for it; and none
runs with less between it and the machine than `min_isolation` says.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

import rlkit
from rlkit._util.threads import DaemonThreadPool
from rlkit.errors import EnvironmentFault
from rlkit.sandbox.commands import message_file
from rlkit.sandbox.inside.program import ERROR, HEADER, MARK, MEMORY, VALUE
from rlkit.sandbox.namespaces import OWNED_SOCKETS, loader_environment
from rlkit.sandbox.runners.programs import (
    LAYERS,
    Isolation,
    Layer,
    Level,
    Program,
    ProgramLimits,
    ProgramOutcome,
    ProgramResult,
)
from rlkit.types import Json

PRELOADED = ("numpy", "scipy", "scipy.optimize", "scipy.linalg", "scipy.signal", "scipy.sparse", "scipy.sparse.linalg")
"""What most programs import, so that they need not wait for it."""

STDOUT_CHARS = 500
"""Of the end of what a program printed that are kept."""

_START_S = 120.0
_GRACE_S = 10.0  # past its time limit, a keeper that says nothing is taken for broken
_END_S = 5.0
_REST_S = 1.0  # for what an ended program has left in its pipes
_TEXT_BYTES = 1 << 16
_KEPT_BYTES = 4 * STDOUT_CHARS
_CHUNK_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_START = "import sys; sys.path.append(sys.argv.pop(1)); from rlkit.sandbox.inside.server import main; main()"


def default_level() -> Level:
    """What is asked for where nothing is said: the kernel's protection on Linux, and elsewhere what there is."""
    return "os" if sys.platform == "linux" else "limits"


class ForkServer:
    """A `CodeRunner` on this machine.

    The server is started with the first program, and anew if it dies. It may be used from several event loops and
    threads at once.

    Args:
        workers: programs at once; by default one for each processor, divided by those that each takes.
        cpus: processors for each program.
        min_isolation: below which nothing is run; by default `os` on Linux and `limits` elsewhere.
        layers: that are put up where the kernel lets them be.
        preload: modules that programs find loaded; those that are not installed are left out.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        cpus: int = 1,
        min_isolation: Level | None = None,
        layers: Sequence[Layer] = LAYERS,
        preload: Sequence[str] = PRELOADED,
    ) -> None:
        self._cpus = cpus
        self._least: Level = min_isolation or default_level()
        self._layers = tuple(layers)
        self._preload = tuple(preload)
        self._threads = DaemonThreadPool(workers or max(1, _processors() // cpus), name="rlkit-programs")
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """Of the server; None where there is none."""
        server = self._server
        return None if server is None else server.process.pid

    async def isolation(self) -> Isolation:
        """Return what is between programs and the machine; see `CodeRunner`."""
        return (await asyncio.get_running_loop().run_in_executor(self._threads, self._started)).isolation

    def start(self) -> Isolation:
        """Return `isolation` outside of an event loop."""
        return self._started().isolation

    async def run(self, program: Program, limits: ProgramLimits) -> ProgramResult:
        """Run a program to its end, once there is room; see `CodeRunner`."""
        waiting = _Waiting()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, program, limits, waiting)
        except asyncio.CancelledError:
            waiting.give_up()
            raise

    def close(self) -> None:
        """End the server, and with it all programs; another is started with the next."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _started(self) -> _Server:
        with self._lock:
            if self._owner != os.getpid():  # a fork shares the server's socket, and must not
                self._server, self._owner = None, os.getpid()
            if self._server is not None and self._server.dead:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = _Server.start(self._layers, self._preload, cpus=self._cpus)
            server = self._server
        server.isolation.demand(self._least)
        return server

    def _run(self, program: Program, limits: ProgramLimits, waiting: _Waiting) -> ProgramResult:
        for _ in range(2):  # the server may have died since the last program
            with suppress(ConnectionError):
                return self._started().run(program, limits, waiting)
        raise EnvironmentFault("the server that runs programs ends as soon as it is asked for something")


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody who waits for a program, and may give up."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: socket.socket | None = None
    gone: bool = False

    def give_up(self) -> None:
        with self.lock:
            self.gone = True
            if self.asked is not None:
                with suppress(OSError):
                    self.asked.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, eq=False)
class _Server:
    process: subprocess.Popen[bytes]
    owner: socket.socket
    isolation: Isolation
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, layers: Sequence[str], preload: Sequence[str], *, cpus: int) -> _Server:
        package = Path(rlkit.__file__).parent
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        plan: dict[str, Json] = {"layers": list(layers), "preload": list(preload), "package": str(package)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(package.parent), str(theirs.fileno())],
                env=_environment(cpus) if "environment" in layers else None,
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session="session" in layers,
            )
        try:
            with message_file(json.dumps(plan).encode()) as text:
                socket.send_fds(ours, [b"?"], [text.fileno()])
            ours.settimeout(_START_S)
            answer = json.loads(_line(ours))
        except (OSError, ValueError) as error:
            process.kill()
            process.wait()
            ours.close()
            raise EnvironmentFault(f"the server that runs programs does not start: {error}") from error
        ours.settimeout(None)
        OWNED_SOCKETS.add(ours)
        return cls(process, ours, Isolation.of(tuple(answer["layers"]), answer["said"]))

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        self.owner.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def run(self, program: Program, limits: ProgramLimits, waiting: _Waiting) -> ProgramResult:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ends: list[int] = []
        try:
            with waiting.lock:
                if waiting.gone:
                    return ProgramResult("killed", None, "nobody waits for it", "", 0.0, 0.0)
                waiting.asked = ours
            for _ in range(2):
                ends += os.pipe()
            said, said_by, result, result_by = ends
            with message_file(_request(program, limits)) as text, Path(os.devnull).open("rb") as null, self.lock:
                socket.send_fds(self.owner, [b"?"], [text.fileno(), theirs.fileno(), null.fileno(), said_by, result_by])
            theirs.close()
            for end in (said_by, result_by):
                os.close(end)
                ends.remove(end)
            return _ran(ours, said, result, limits)
        finally:
            with waiting.lock:
                waiting.asked = None
            for end in ends:
                os.close(end)
            theirs.close()
            ours.close()  # which ends the program, if it has not ended


def _environment(cpus: int) -> dict[str, str]:
    """All that a program finds of the environment: nothing of the trainer's."""
    own = {"PATH": "/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
    return {**loader_environment(), **dict.fromkeys(_THREADS, str(cpus)), **own}


def _request(program: Program, limits: ProgramLimits) -> bytes:
    arrays = {name: np.ascontiguousarray(one, "<f8") for name, one in program.arrays.items()}
    head: dict[str, Json] = {
        "source": program.source,
        "entry": program.entry,
        "arguments": dict(program.arguments),
        "helpers": dict(program.helpers),
        "arrays": [[name, list(one.shape)] for name, one in arrays.items()],
        "timeout_s": limits.timeout_s,
        "cpu_s": math.ceil(limits.timeout_s * limits.cpus) + 1,
        "memory_bytes": limits.memory_bytes,
    }
    text = json.dumps(head).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(one.tobytes() for one in arrays.values())])


def _ran(asked: socket.socket, said: int, result: int, limits: ProgramLimits) -> ProgramResult:
    """Read what comes of a program until it has ended."""
    most = HEADER.size + max(limits.result_bytes, _TEXT_BYTES)
    end_s = time.monotonic() + limits.timeout_s + _GRACE_S
    told, printed, returned = bytearray(), bytearray(), bytearray()
    kept: dict[int, bytearray] = {asked.fileno(): told, said: printed, result: returned}
    too_large = False
    while kept:
        ended = asked.fileno() not in kept  # what is in the pipes is all that there is; a daemon may keep them open
        left_s = end_s - time.monotonic()
        ready = _ready(list(kept), 0 if ended else left_s) if left_s > 0 else []
        if not ready and ended:
            break
        if not ready:
            raise EnvironmentFault("what keeps a program to its time limit has not said anything")
        for descriptor in ready:
            buffer = kept[descriptor]
            data = os.read(descriptor, _CHUNK_BYTES)
            if not data:
                del kept[descriptor]
                if descriptor == asked.fileno():
                    end_s = min(end_s, time.monotonic() + _REST_S)
            elif buffer is returned and len(buffer) + len(data) > most:
                too_large = True  # read on, or the program would wait
            else:
                buffer += data
                if buffer is printed:
                    del buffer[:-_KEPT_BYTES]
    if not told:
        raise ConnectionError("the keeper of a program ended without a word")
    message = cast("dict[str, Json]", json.loads(bytes(told)))
    if "failed" in message:
        raise EnvironmentFault(f"a program could not be started: {message['failed']}")
    stdout = printed.decode(errors="replace")[-STDOUT_CHARS:]
    return _judged(message, bytes(returned), stdout, limits, too_large=too_large)


def _judged(
    message: Mapping[str, Json], returned: bytes, stdout: str, limits: ProgramLimits, *, too_large: bool
) -> ProgramResult:
    seconds, cpu_s = float(str(message["seconds"])), float(str(message["cpu_s"]))

    def ended(outcome: ProgramOutcome, error: str) -> ProgramResult:
        return ProgramResult(outcome, None, error, stdout, seconds, cpu_s)

    if message["late"]:
        return ended("timeout", f"the program took longer than {limits.timeout_s:g} s and was ended")
    if too_large:
        return ended("too large", f"the result is larger than {limits.result_bytes} bytes")
    read = _read(returned)
    if read is None:
        code = int(str(message["exit"]))
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code} and without a result"
        return ended("killed", f"the program {how}")
    kind, value, text = read
    if kind == MEMORY:
        return ended("memory", f"the program needed more than {limits.memory_bytes} bytes of memory")
    if value is None:
        return ended("error", text)
    return ProgramResult("value", value, "", stdout, seconds, cpu_s)


def _read(returned: bytes) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None, str] | None:
    """What kind of result it is, its numbers and its text; None for what is no result."""
    if len(returned) < HEADER.size:
        return None
    mark, kind, dimensions, *sizes = HEADER.unpack_from(returned)
    body = returned[HEADER.size :]
    if mark != MARK or dimensions > len(sizes):
        return None
    if kind in (ERROR, MEMORY):
        return kind, None, body.decode(errors="replace")
    shape = tuple(sizes[:dimensions])
    if kind != VALUE or math.prod(shape) * 8 != len(body):
        return None
    try:
        return kind, np.frombuffer(body, "<f8").reshape(shape).astype(np.float64), ""
    except ValueError:  # no numbers in a shape that no array has
        return None


def _ready(descriptors: list[int], timeout_s: float) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]


def _line(source: socket.socket) -> bytes:
    found = bytearray()
    while not found.endswith(b"\n"):
        data = source.recv(_TEXT_BYTES)
        if not data:
            raise ConnectionError("it ended")
        found += data
    return bytes(found)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
