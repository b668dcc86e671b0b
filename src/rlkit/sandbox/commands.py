"""Commands in a sandbox, and copies of files into and out of it.

Invariant: a command or transfer is killed, with all its descendants, when its caller is gone. Nothing here blocks the
event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from rlkit._util.threads import in_sandbox_thread as in_thread
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import files
from rlkit.sandbox.context import Entry
from rlkit.sandbox.inside import job
from rlkit.sandbox.spec import MIB
from rlkit.sandbox.streams import OnOutput, Stream
from rlkit.types import Json

_OUTPUT_BYTES = 16 * MIB
_FILES_BYTES = 4096 * MIB
_FILES_S = 600.0
_MESSAGE_BYTES = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandTimeout(EnvironmentFault, RuntimeError):
    """A command exceeded its time limit, and was killed."""


@dataclass(frozen=True)
class CompletedCommand:
    """A finished command. The exit code is 128 plus the number of the signal that ended it, 126 if it did not start."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False  # True if output was dropped


class Commands:
    """Commands and files of a sandbox or view; `channel` is the socket of the process that starts commands there."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._limits: dict[str, int] = {}
        self._background_streams: list[Stream] = []

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_bytes: int = _OUTPUT_BYTES,
        on_output: OnOutput | None = None,
    ) -> CompletedCommand:
        """Run a command: a line for the shell (bash, or sh if bash is missing), or a program with its arguments.

        Background processes survive the end of the command. At the time limit its process group and all descendants
        are killed; daemons, which are no longer descendants, survive.

        Args:
            output_bytes: maximum bytes kept of each stream; further output is read and dropped.
            on_output: coroutine function, called with each piece of output.

        Raises:
            CommandTimeout: the time limit was reached.
            EnvironmentFault: the sandbox has ended.
        """
        shells = [["/bin/bash", "-c", command], ["/bin/sh", "-c", command]] if isinstance(command, str) else None
        request: dict[str, Json] = {"command": shells or [list(command)], "user": user, "cwd": cwd}  # pyright: ignore
        request["env"] = {"PATH": _PATH, **(env or {})}
        out, err = (Stream(name, output_bytes, on_output) for name in ("stdout", "stderr"))
        try:
            status = self._send_request(request, None, out.write_end, err.write_end)
        except BaseException:
            out.close()
            err.close()
            raise
        try:
            out.begin()
            err.begin()
            async with asyncio.timeout(timeout_s):
                message = await receive_message(status)
            await out.finish()
            await err.finish()
        except TimeoutError:
            raise CommandTimeout(f"a command took more than {timeout_s:g} s and was killed") from None
        finally:
            status.close()  # ends the command if it is still running
            output, truncated = (bytes(out.content), bytes(err.content)), out.truncated or err.truncated
            self._keep_draining(out, err)
        if "failed" in message:
            return CompletedCommand(126, output[0], f"{message['failed']}\n".encode())
        if "exit" not in message:
            raise EnvironmentFault("a sandbox ended while a command ran in it")
        return CompletedCommand(int(str(message["exit"])), *output, truncated)

    async def put(self, source: Path, target: str) -> None:
        """Copy a file to a path in the sandbox, or the contents of a folder into a folder there."""
        if not await in_thread(source.exists):
            raise UsageError(f"{source} cannot be copied into a sandbox: it does not exist")
        name, single = str(source), not await in_thread(source.is_dir)
        await self._put(lambda stream: job.pack(name, stream, single=single), target, single=single, name=name)

    async def put_entries(self, entries: list[Entry]) -> None:
        """Copy the entries of a COPY."""
        await self._put(lambda stream: files.pack_entries(entries, stream), "/", single=False, name="a COPY")

    async def _put(self, pack: Callable[[BinaryIO], None], target: str, *, single: bool, name: str) -> None:
        reader, writer = os.pipe()

        def send() -> None:
            with os.fdopen(writer, "wb") as stream, suppress(BrokenPipeError):  # the receiver reports the reason
                pack(stream)

        request: dict[str, Json] = {"put": _require_absolute(target), "single": single}
        await self._transfer(request, (reader, None), send, f"{name} could not be copied to {target}")

    async def get(self, source: str, target: Path, *, folder: bool, max_bytes: int = _FILES_BYTES) -> None:
        """Copy a file of the sandbox to `target`, or the contents of a folder into the folder `target`.

        Sockets, pipes, devices, and links that lead out of the folder are skipped.

        Raises:
            TransferTooLarge: the content is larger than `max_bytes`.
            SourceMissing: there is no such file or folder.
            EnvironmentFault: the source is of another kind, or the sandbox has ended.
        """
        request: dict[str, Json] = {"get": _require_absolute(source), "single": not folder}
        reader, writer = os.pipe()

        def receive() -> None:
            with os.fdopen(reader, "rb") as stream:
                (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
                files.unpack(stream, target, single=not folder, max_bytes=max_bytes)

        await self._transfer(request, (None, writer), receive, f"{source} could not be copied out of a sandbox")

    def _keep_draining(self, *streams: Stream) -> None:
        for stream in streams:
            stream.drop_output()
        self._background_streams = [stream for stream in (*self._background_streams, *streams) if stream.is_open]

    async def _transfer(
        self, request: dict[str, Json], ends: tuple[int | None, int | None], copy: Callable[[], None], problem: str
    ) -> None:
        try:
            status = self._send_request(request, *ends, None)
        finally:
            for end in ends:
                if end is not None:
                    os.close(end)
        copying = asyncio.ensure_future(in_thread(copy))
        try:
            async with asyncio.timeout(_FILES_S):
                message = await receive_message(status)
                (error,) = await asyncio.gather(copying, return_exceptions=True)
        except TimeoutError:
            raise EnvironmentFault(f"{problem}: it took more than {_FILES_S:g} s") from None
        finally:
            status.close()  # ends the other side if it is still running, and so the thread
        if isinstance(error, files.TransferTooLarge):
            raise error
        failure = str(message.get("failed") or error or "") if message else "the sandbox ended"
        if failure or message.get("exit") != 0:
            fault = files.SourceMissing if message.get("missing") else EnvironmentFault
            raise fault(f"{problem}: {failure or 'its helper process was killed'}")

    async def _request_view(self, request: dict[str, Json]) -> None:
        with self._send_request(request) as status:
            message = await receive_message(status)
        if message.get("exit") != 0:
            raise EnvironmentFault(
                f"a view of a sandbox could not be opened or closed: {message.get('failed', 'it has ended')}"
            )

    async def _request_listener(self, port: int) -> socket.socket:
        """Return a socket that listens on a port of the sandbox's loopback."""
        with self._send_request({"listen": port}) as status:
            status.setblocking(True)
            message, descriptors, _, _ = await in_thread(socket.recv_fds, status, _MESSAGE_BYTES, 1)
        if not descriptors:
            reason = json.loads(message or "{}").get("failed", "it has ended")
            raise EnvironmentFault(f"a sandbox could not listen on port {port}: {reason}")
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        return listener

    def _send_request(self, request: dict[str, Json], *streams: int | None) -> socket.socket:
        """Send a request to the first process, and return the socket on which its result arrives.

        Args:
            streams: descriptors of the job's standard streams; None for the null device.
        """
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        defaults: dict[str, Json] = {"command": [], "single": False, "user": None, "cwd": None, "env": {}}
        content: dict[str, Json] = {**defaults, **request, "limits": dict(self._limits)}
        with remote, FileIO(os.devnull, "r+") as null:
            numbers = [null.fileno() if stream is None else stream for stream in streams]
            try:
                send_message(self._channel, json.dumps(content).encode(), remote.fileno(), *numbers)
            except OSError as error:
                local.close()
                raise EnvironmentFault("a sandbox that has ended got a request") from error
        local.setblocking(False)
        return local


def send_message(channel: socket.socket, content: bytes, *descriptors: int) -> None:
    """Send a message and descriptors, as an unnamed file, because it may exceed the size limit of a socket message."""
    file = os.fdopen(os.memfd_create("rlkit"), "wb") if sys.platform == "linux" else tempfile.TemporaryFile("wb")  # noqa: SIM115  closed below
    with file:
        file.write(content)
        file.flush()
        socket.send_fds(channel, [b"?"], [file.fileno(), *descriptors])  # descriptors need at least one byte of data


async def receive_message(source: socket.socket) -> dict[str, Json]:
    """Return the next message of a socket; empty if the socket is closed."""
    try:
        data = await asyncio.get_running_loop().sock_recv(source, _MESSAGE_BYTES)
    except ConnectionError:
        data = b""
    return json.loads(data) if data else {}


def _require_absolute(path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"a path in a sandbox must be absolute, not {path!r}")
    return path
