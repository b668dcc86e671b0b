"""Output of a command in a sandbox.

Invariant: all output of a command before its end is read, and kept up to a size limit. Output beyond the limit is
dropped, with pauses that keep the event loop responsive. No process of the command blocks or fails on a full pipe.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

type OnOutput = Callable[[bytes, Literal["stdout", "stderr"]], Awaitable[None]]

_PIPE_BYTES = 1 << 20  # size of a pipe; processes of the sandbox lack the capability to enlarge it
_PAUSE_S = 0.01  # pause between reads of dropped output: at 100 MB/s these hardly load the event loop


class Stream:
    """An output stream of a command, kept up to a size limit."""

    def __init__(self, name: str, max_bytes: int, on_output: OnOutput | None) -> None:
        self.content = bytearray()
        self.truncated = False
        self._name: Literal["stdout", "stderr"] = "stdout" if name == "stdout" else "stderr"
        self._max_bytes = max_bytes
        self._on_output = on_output
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        with suppress(OSError):  # the user's limit on pipes may be reached
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._callbacks: list[asyncio.Task[None]] = []

    @property
    def is_open(self) -> bool:
        """True while a process may still write to the stream."""
        return self._read_end >= 0

    def begin(self) -> None:
        """Start reading."""
        os.close(self.write_end)
        self.write_end = -1
        self._listen()

    async def finish(self) -> None:
        """Read all output that the command wrote before its end."""
        left_bytes = _PIPE_BYTES  # the pipe holds no more; a background process may write forever
        while left_bytes > 0 and (read_bytes := self._read()):
            left_bytes -= read_bytes
        for callback in self._callbacks:
            await callback

    def drop_output(self) -> None:
        """Drop all further output, which only background processes of the command can write."""
        self._max_bytes, self._on_output = 0, None

    def close(self) -> None:
        """Stop reading, and close both ends."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1
        if self.is_open:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _listen(self) -> None:
        if self.is_open:
            asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def _read(self) -> int:
        if not self.is_open:
            return 0
        try:
            data = os.read(self._read_end, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        room = max(0, self._max_bytes - len(self.content))
        self.content += data[:room]
        if room < len(data):
            self.truncated = True
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._read_end)
            loop.call_later(_PAUSE_S, self._listen)
        if self._on_output is not None and room:
            self._callbacks = [asyncio.ensure_future(self._call_back(self._on_output, data[:room], self._callbacks))]
        return len(data)

    async def _call_back(self, on_output: OnOutput, data: bytes, earlier: list[asyncio.Task[None]]) -> None:
        for callback in earlier:
            await callback
        await on_output(data, self._name)
