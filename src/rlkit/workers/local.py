"""Start a worker on this machine, and tell why it ended.

Invariant: a worker and all processes that it started end with the process of the run, however that ends.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from rlkit._util.threads import in_thread
from rlkit.errors import UsageError
from rlkit.rollout.task_guard import CLEAN_UP_S, GRACE_S
from rlkit.sandbox.runners import keeper
from rlkit.sandbox.spec import MIB
from rlkit.workers.connection import Connection, WorkerLoss, WorkerOwner
from rlkit.workers.marker import Marker
from rlkit.workers.messages import FrameProtocol, Stop, encode

_CHECK_S = 0.5  # seconds between two checks of a worker's marker
_PROCESSOR_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHON_CPU_COUNT")
"""Variables of the number of processors for numerical libraries, Python and `ForkServer`: each worker has its own."""

_HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Makes the order of sets equal in all workers; otherwise members of a group could have different prompts."""

_LINE_BYTES = 2**16

_CODE = "import sys; sys.path[:] = {path!r}; from rlkit.workers.process import main; main({connection}, {marker})"


class LocalWorker(Connection):
    """A worker on this machine.

    Args:
        cpus: processors for numerical libraries.
        memory_bytes: resident memory at which the worker is ended.
    """

    def __init__(self, owner: WorkerOwner, *, cpus: int = 1, memory_bytes: float = math.inf) -> None:
        self._owner = owner
        self._memory_bytes = memory_bytes
        self._marker = Marker()
        self._is_closing = False
        run_end, worker_end = socket.socketpair()
        try:
            with worker_end:
                self._process, self._stdin = _start(worker_end.fileno(), self._marker.descriptor, cpus=cpus)
        except OSError as error:  # too many processes or open files
            run_end.close()
            self._marker.close()
            raise UsageError(f"a worker cannot be started ({error}): lower the number of workers") from error
        self._cut = asyncio.get_running_loop().create_future()
        """Done at the end of the connection; True if the stream was garbled."""
        self._protocol = FrameProtocol(owner.receive, self._cut.set_result)
        self._task = asyncio.create_task(self._watch(run_end))

    def send(self, frame: bytes) -> None:  # noqa: D102  inherited
        self._protocol.send(frame)

    async def close(self) -> None:  # noqa: D102  inherited
        self._is_closing = True
        self.send(encode(Stop()))
        try:
            await asyncio.wait([self._task], timeout=CLEAN_UP_S + 2 * GRACE_S)
        finally:
            self._stdin.close()  # the keeper ends the worker
            await self._task

    async def _watch(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        output = asyncio.create_task(_read_lines(self._process.stdout, self._owner.show))
        try:
            await loop.create_connection(lambda: self._protocol, sock=connection)
            loss = await self._wait_for_loss()
            await asyncio.wait([output], timeout=1.0)  # complete, unless a process that left still has the pipe
        finally:
            output.cancel()
            self._protocol.abort()
            if self._process.returncode is None:  # cancelled, because the event loop ends
                with suppress(OSError, ValueError):  # it has ended, or the pipe is closed
                    self._stdin.write(b"k")
                self._process.wait()
            self._stdin.close()
            self._marker.close()
        if not self._is_closing:
            self._owner.lose(loss)

    async def _wait_for_loss(self) -> WorkerLoss:
        """Wait for the end of the worker; end it if it is blocked, needs too much memory, or cannot talk."""
        clock = asyncio.get_running_loop().time
        while not self._cut.done() and self._process.poll() is None:
            await asyncio.wait([self._cut], timeout=_CHECK_S)
            running = self._marker.get()
            allowed_s = 0.0 if self._is_closing else running.limit_s
            if clock() - running.began_s > allowed_s + GRACE_S:
                await self._kill()
                limit = f"{running.limit_s:g} s (timeout_s)"
                return WorkerLoss(f"the environment blocked its worker for longer than {limit}", running.call)
            if _measure_memory(self._process.pid) > self._memory_bytes:
                await self._kill()
                limit = f"{self._memory_bytes / MIB:.0f} MiB of memory (workers.memory_mb)"
                return WorkerLoss(f"the worker process used more than {limit}", 0)  # earlier calls may have leaked
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = await in_thread(self._process.wait, GRACE_S)
        if code is None:
            await self._kill()
        if code is None or (self._cut.done() and self._cut.result()):
            return WorkerLoss("an environment closed the connection of its worker, or wrote to it", 0)
        return WorkerLoss(_describe_end(code), self._marker.get().call)

    async def _kill(self) -> None:
        with suppress(OSError):  # it has ended
            self._stdin.write(b"k")
        await in_thread(self._process.wait)


def _start(connection: int, marker: int, *, cpus: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a worker; return the process of its keeper, and what ends it."""
    code = _CODE.format(path=[entry or str(Path.cwd()) for entry in sys.path], connection=connection, marker=marker)
    variables = dict.fromkeys(_PROCESSOR_VARIABLES, str(cpus)) | _HASH_SEED | os.environ
    process = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, sys.executable, "-c", code],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(connection, marker),
        env=variables,
        start_new_session=True,  # otherwise Ctrl-C would end it while the run finishes its step
    )
    assert process.stdin is not None
    return process, process.stdin


def _measure_memory(keeper: int) -> int:
    """Return the resident memory of a keeper's worker in bytes; 0 if the system does not tell."""
    with suppress(OSError, IndexError):
        worker = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]  # the oldest
        return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


async def _read_lines(pipe: object, show: Callable[[str], None]) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    rest = b""
    try:
        while chunk := await reader.read(_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                show(line.decode(errors="replace"))
    finally:
        transport.close()
        if rest:
            show(rest.decode(errors="replace"))


def _describe_end(code: int) -> str:
    """Describe the end of a process with an exit code of the keeper: 128 plus a signal's number, or the code.

    A negative code means that the keeper was killed.
    """
    code = code if code >= 0 else 128 - code
    if code - 128 not in signal.Signals:
        return f"the worker process ended with exit code {code}"
    name = signal.Signals(code - 128).name
    hint = ", as the system does if memory is short" if name == "SIGKILL" else ""
    return f"the worker process was killed by {name}{hint}"
