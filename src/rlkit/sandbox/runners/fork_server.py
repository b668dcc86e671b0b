"""Programs on this machine: a server with preloaded libraries forks for each program.

Invariant: no program outlives its time limit, the call that waits for it, or the calling process, and no program runs
with weaker isolation than `min_isolation`.
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
from weakref import WeakSet

import numpy as np

import rlkit
from rlkit._util.threads import DaemonThreadPool
from rlkit.errors import EnvironmentFault
from rlkit.sandbox.commands import send_message
from rlkit.sandbox.inside.program import ERROR, HEADER, MARK, MEMORY, VALUE
from rlkit.sandbox.namespaces import OWNED_SOCKETS, loader_environment, start_python
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
"""Modules that most programs import; preloading saves each program the import."""

STDOUT_CHARS = 500  # number of characters kept from the end of a program's output
_START_S = 120.0
_GRACE_S = 10.0  # time after a program's limit in which its keeper must answer
_END_S = 5.0
_REST_S = 1.0  # to read the pipes of an ended program
_TEXT_BYTES = 1 << 16
_KEPT_BYTES = 4 * STDOUT_CHARS
_CHUNK_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_START = "import sys; sys.path.append(sys.argv.pop(1)); from rlkit.sandbox.inside.server import main; main()"


def default_level() -> Level:
    """Return the default level: `os` on Linux, `limits` elsewhere."""
    return "os" if sys.platform == "linux" else "limits"


class ForkServer:
    """Runner of programs on this machine, with a limit on concurrent programs.

    ::

        runner = ForkServer()
        ran = await runner.run(Program("def run(seed): return [seed, 2.0]", arguments={"seed": 1}), ProgramLimits())
        assert ran.value.tolist() == [1.0, 2.0]

    The server starts with the first program, and is restarted if it dies. Several event loops and threads may use it
    concurrently. A forked process starts a server of its own.

    Args:
        workers: maximum number of concurrent programs; by default the number of processors divided by `cpus`.
        cpus: processors for each program.
        min_isolation: required isolation level; by default `os` on Linux and `limits` elsewhere.
        layers: isolation layers to use if the kernel permits them.
        preload: modules loaded before programs start; modules that are not installed are skipped.
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
        self._min_isolation: Level = min_isolation or default_level()
        self._layers = tuple(layers)
        self._preload = tuple(preload)
        self._workers = workers or max(1, _count_processors() // cpus)
        self._reset()
        _runners.add(self)

    def _reset(self) -> None:
        self._threads = DaemonThreadPool(self._workers, name="rlkit-programs")
        self._lock = threading.Lock()
        self._server: _Server | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it is not running."""
        server = self._server
        return None if server is None else server.process.pid

    def start(self) -> Isolation:
        """Start the server if necessary, and return the isolation of programs; errors as of `run`."""
        return self._ensure_server().isolation

    async def run(self, program: Program, limits: ProgramLimits) -> ProgramResult:
        """Run a program to its end, when a slot is free; errors of the program are in the result.

        Raises:
            MissingError: the isolation is below the required level.
            EnvironmentFault: the server failed, through no fault of the program.
        """
        call = _PendingCall()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, program, limits, call)
        except asyncio.CancelledError:
            call.cancel()
            raise

    def close(self) -> None:
        """End the server and all its programs; the next program starts a new server."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _ensure_server(self) -> _Server:
        with self._lock:
            if self._server is not None and self._server.process.poll() is not None:  # it has ended
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = _Server.start(self._layers, self._preload, cpus=self._cpus)
            server = self._server
        server.isolation.require(self._min_isolation)
        return server

    def _run(self, program: Program, limits: ProgramLimits, call: _PendingCall) -> ProgramResult:
        for _ in range(2):  # the server may have died since the last program
            with suppress(ConnectionError):
                return self._ensure_server().run(program, limits, call)
        raise EnvironmentFault("the server that runs programs ends at every request")


_runners = WeakSet[ForkServer]()


def _reset_after_fork() -> None:
    """Let runners start their own servers and threads: a forked process has none of its parent's."""
    for runner in list(_runners):
        runner._reset()  # pyright: ignore[reportPrivateUsage]  the function belongs to the class


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call that waits for a program, and can be cancelled from another thread."""

    status: socket.socket | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.status is not None:
            with suppress(OSError):  # the program has ended
                self.status.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, eq=False)
class _Server:
    process: subprocess.Popen[bytes]
    owner: socket.socket
    isolation: Isolation
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, layers: Sequence[str], preload: Sequence[str], *, cpus: int) -> _Server:
        package = Path(rlkit.__file__).parent
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        plan: dict[str, Json] = {"layers": list(layers), "preload": list(preload), "package": str(package)}
        with child_end:
            process = start_python(
                ["-c", _START, str(package.parent)],
                child_end,
                env=_make_environment(cpus) if "environment" in layers else None,
                new_session="session" in layers,
            )
        try:
            send_message(own_end, json.dumps(plan).encode())
            own_end.settimeout(_START_S)
            with own_end.makefile("rb") as lines:
                line = lines.readline()
            if not line:
                raise ConnectionError("it ended")
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            process.kill()
            process.wait()
            own_end.close()
            raise EnvironmentFault(f"the server that runs programs does not start: {error}") from error
        own_end.settimeout(None)
        OWNED_SOCKETS.add(own_end)
        return cls(process, own_end, Isolation(tuple(answer["layers"]), answer["notes"]))

    def close(self) -> None:
        self.owner.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def run(self, program: Program, limits: ProgramLimits, call: _PendingCall) -> ProgramResult:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ends: list[int] = []
        try:
            call.status = own_end
            if call.is_cancelled:  # checked after the assignment, so that `cancel` ends the program or this sees it
                return ProgramResult("killed", None, "its call was cancelled", "", 0.0, 0.0)
            for _ in range(2):
                ends += os.pipe()
            stdout, stdout_writer, result, result_writer = ends
            request = _make_request(program, limits)
            with Path(os.devnull).open("rb") as null, self.lock:
                send_message(self.owner, request, child_end.fileno(), null.fileno(), stdout_writer, result_writer)
            child_end.close()
            for end in (stdout_writer, result_writer):
                os.close(end)
                ends.remove(end)
            return _read_result(own_end, stdout, result, limits)
        finally:
            for end in ends:
                os.close(end)
            child_end.close()
            own_end.close()  # ends the program if it is still running


def _make_environment(cpus: int) -> dict[str, str]:
    """Return the environment variables of programs, which have none of the trainer's."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
    return {**loader_environment(), **dict.fromkeys(_THREADS, str(cpus)), **variables}


def _make_request(program: Program, limits: ProgramLimits) -> bytes:
    arrays = {name: np.ascontiguousarray(array, "<f8") for name, array in program.arrays.items()}
    head: dict[str, Json] = {
        "source": program.source,
        "entry": program.entry,
        "arguments": dict(program.arguments),
        "helpers": dict(program.helpers),
        "arrays": [[name, list(array.shape)] for name, array in arrays.items()],
        "timeout_s": limits.timeout_s,
        "cpu_s": math.ceil(limits.timeout_s * limits.cpus) + 1,
        "memory_bytes": limits.memory_bytes,
    }
    text = json.dumps(head).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays.values())])


def _read_result(status: socket.socket, stdout: int, result: int, limits: ProgramLimits) -> ProgramResult:
    """Read the output and the result of a program until its end."""
    max_bytes = HEADER.size + max(limits.result_bytes, _TEXT_BYTES)
    end_s = time.monotonic() + limits.timeout_s + _GRACE_S
    answer, printed, returned = bytearray(), bytearray(), bytearray()
    buffers: dict[int, bytearray] = {status.fileno(): answer, stdout: printed, result: returned}
    poll = select.poll()
    for descriptor in buffers:
        poll.register(descriptor, select.POLLIN)
    too_large = False
    while buffers:
        has_ended = status.fileno() not in buffers  # all output is in the pipes, which a daemon may keep open
        left_s = end_s - time.monotonic()
        ready = poll.poll(0 if has_ended else left_s * 1000) if left_s > 0 else []
        if not ready and has_ended:
            break
        if not ready:
            raise EnvironmentFault("the keeper of a program did not answer after the time limit")
        for descriptor, _ in ready:
            buffer = buffers[descriptor]
            data = os.read(descriptor, _CHUNK_BYTES)
            if not data:
                del buffers[descriptor]
                poll.unregister(descriptor)
                if descriptor == status.fileno():
                    end_s = min(end_s, time.monotonic() + _REST_S)
            elif buffer is returned and len(buffer) + len(data) > max_bytes:
                too_large = True  # continue to read, so that the program does not block
            else:
                buffer += data
                if buffer is printed:
                    del buffer[:-_KEPT_BYTES]
    if not answer:
        raise ConnectionError("the keeper of a program ended without an answer")
    message = cast("dict[str, Json]", json.loads(bytes(answer)))
    if "failed" in message:
        raise EnvironmentFault(f"a program could not be started: {message['failed']}")
    text = printed.decode(errors="replace")[-STDOUT_CHARS:]
    return _make_result(message, bytes(returned), text, limits, too_large=too_large)


def _make_result(
    message: Mapping[str, Json], returned: bytes, stdout: str, limits: ProgramLimits, *, too_large: bool
) -> ProgramResult:
    seconds, cpu_s = float(str(message["seconds"])), float(str(message["cpu_s"]))

    def fail(outcome: ProgramOutcome, error: str) -> ProgramResult:
        return ProgramResult(outcome, None, error, stdout, seconds, cpu_s)

    if message["late"]:
        return fail("timeout", f"the program took longer than {limits.timeout_s:g} s and was ended")
    if too_large:
        return fail("too large", f"the result is larger than {limits.result_bytes} bytes")
    parsed = _parse_result(returned)
    if parsed is None:
        code = int(str(message["exit"]))
        end = f"was ended by signal {-code}" if code < 0 else f"ended with code {code} and without a result"
        return fail("killed", f"the program {end}")
    kind, value, text = parsed
    if kind == MEMORY:
        return fail("memory", f"the program needed more than {limits.memory_bytes} bytes of memory")
    if value is None:
        return fail("error", text)
    return ProgramResult("value", value, "", stdout, seconds, cpu_s)


def _parse_result(returned: bytes) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None, str] | None:
    """Return the kind of a result, its numbers and its text; None for malformed data."""
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
    except ValueError:  # the shape is invalid
        return None


def _count_processors() -> int:
    """Return the number of processors of this process, which its parent may limit in the way of Python 3.13."""
    limit = os.environ.get("PYTHON_CPU_COUNT", "")
    if limit.isdecimal():
        return int(limit)
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
