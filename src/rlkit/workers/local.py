"""Start a worker on this machine, and tell why it ended.

Invariant: a worker and all processes that it started end with the process of the run, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlkit._util.threads import in_thread
from rlkit.rollout.task_guard import CLEAN_UP_S, GRACE_S
from rlkit.sandbox.runners import keeper
from rlkit.workers.marker import Marker
from rlkit.workers.messages import FrameReader, Stop, encode

_CHECK_S = 0.5
"""Seconds between two checks of a worker's marker."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables of the number of threads of numerical libraries; each worker is to use its own processors."""

_LINE_BYTES = 2**16

_CODE = "import sys; sys.path[:] = {path!r}; from rlkit.workers.process import main; main({connection}, {marker})"


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The end of a worker.

    Args:
        reason: phrase for people, such as "the environment ended its process (exit code 3)".
        culprit: call whose code ended the worker; 0 if unknown; None if none did, such as for a lost machine.
    """

    reason: str
    culprit: int | None


class Connection(Protocol):
    """Connection to a worker, wherever it runs."""

    def send(self, frame: bytes) -> None:
        """Send a frame; do nothing after the end of the worker."""
        ...

    async def close(self) -> None:
        """Let the worker clean up, and wait for its end."""
        ...


type Connect = Callable[[Callable[[bytes], None], Callable[[WorkerLoss], None], Callable[[str], None]], Connection]
"""Starts a worker; it takes receivers of frames, of the end of the worker, and of lines of raw output."""


class LocalWorker(Connection):
    """A worker on this machine.

    Args:
        receive: receives the content of each frame.
        lose: receives the end of the worker, once, unless `close` was called.
        show: receives each line that is written to the worker's standard output, not by Python code.
        cpus: processors for numerical libraries.
    """

    def __init__(
        self,
        receive: Callable[[bytes], None],
        lose: Callable[[WorkerLoss], None],
        show: Callable[[str], None],
        *,
        cpus: int = 1,
    ) -> None:
        self._lose = lose
        self._marker = Marker()
        self._is_closing = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs.fileno(), self._marker.descriptor, cpus=cpus)
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._has_ended = asyncio.Event()
        self._task = asyncio.create_task(self._watch(ours, receive, show))

    def send(self, frame: bytes) -> None:  # noqa: D102  inherited
        if self._transport is None:
            self._unsent.append(frame)
        elif not self._transport.is_closing():
            self._transport.write(frame)

    async def close(self) -> None:  # noqa: D102  inherited
        self._is_closing = True
        self.send(encode(Stop()))
        try:
            async with asyncio.timeout(CLEAN_UP_S + 2 * GRACE_S):
                await self._has_ended.wait()
        except TimeoutError:
            pass
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the keeper ends the worker
            self._task.cancel()
            await in_thread(self._process.wait)
            self._marker.close()

    async def _watch(
        self, connection: socket.socket, receive: Callable[[bytes], None], show: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: FrameReader(receive, self._has_ended.set), sock=connection
        )
        for frame in self._unsent:
            self._transport.write(frame)
        self._unsent.clear()
        output = asyncio.create_task(_read_lines(self._process.stdout, show))
        blocked = None
        try:
            while not self._has_ended.is_set() and blocked is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_ended.wait(), _CHECK_S)
                blocked = self._blocking_call()
            code = await self._end(is_blocked=blocked is not None)
            await output  # complete at the end of the process
        finally:
            output.cancel()
            self._transport.abort()
        self._has_ended.set()
        if not self._is_closing:
            if blocked is not None:
                limit = f"{self._marker.get().limit_s:g}"
                self._lose(WorkerLoss(f"the rollout blocked its worker for longer than {limit} s (timeout_s)", blocked))
            else:
                self._lose(WorkerLoss(_describe_end(code), self._marker.get().call))

    def _blocking_call(self) -> int | None:
        """Return the call that blocks the worker for longer than its time limit; None for none."""
        running = self._marker.get()
        now_s = asyncio.get_running_loop().time()
        return running.call if running.call and now_s - running.began_s > running.limit_s + GRACE_S else None

    async def _end(self, *, is_blocked: bool) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self._process.stdin is not None
        if is_blocked:
            with suppress(OSError):
                self._process.stdin.write(b"k")
                self._process.stdin.flush()
        return await in_thread(self._process.wait)


def _start(connection: int, marker: int, *, cpus: int) -> subprocess.Popen[bytes]:
    code = _CODE.format(path=[entry or str(Path.cwd()) for entry in sys.path], connection=connection, marker=marker)
    threads = {name: os.environ.get(name, str(cpus)) for name in _THREAD_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(connection, marker),
        env=os.environ | threads,
        start_new_session=True,  # otherwise Ctrl-C would end it while the run finishes its step
    )


async def _read_lines(pipe: object, show: Callable[[str], None]) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    rest = b""
    while chunk := await reader.read(_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            show(line.decode(errors="replace"))
    if rest:
        show(rest.decode(errors="replace"))


def _describe_end(code: int) -> str:
    """Describe the end of a process with an exit code of the keeper: 128 plus a signal's number, or the code."""
    if code <= 128:
        return f"the worker process ended with exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"the worker process ended with exit code {code}"
    hint = ", as the system does if memory is short" if name == "SIGKILL" else ""
    return f"the worker process was killed by {name}{hint}"
