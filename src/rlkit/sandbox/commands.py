"""Commands in a sandbox, and files in and out of it.

Invariant: a command or a transfer that nobody waits for any more is ended, with all that descends from it. Nothing here
blocks the event loop.
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
from typing import BinaryIO, cast

from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import files
from rlkit.sandbox.context import Entry
from rlkit.sandbox.spec import MIB
from rlkit.sandbox.streams import OnOutput, Stream
from rlkit.sandbox.threads import in_thread
from rlkit.types import Json

_OUTPUT_BYTES = 16 * MIB
_FILES_BYTES = 4096 * MIB
_FILES_S = 600.0
_MESSAGE_BYTES = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_REQUEST: Mapping[str, Json] = {
    "command": [], "put": None, "single": False, "get": None, "user": None, "cwd": None, "env": {},
    "view": None, "close_view": False,
}  # fmt: skip


class CommandTimeout(EnvironmentFault, RuntimeError):
    """A command took longer than it may, and was ended."""


@dataclass(frozen=True)
class CompletedCommand:
    """How a command ended: 128 and the signal's number where one ended it, 126 where it could not be started."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    cut: bool = False
    """Whether there was more output than is kept."""


class Commands:
    """A place where commands run and files lie, behind the socket of the process that starts them there."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._limits: dict[str, int] = {}
        self._left: list[Stream] = []

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
        """Run a command: a line for the shell (bash, or sh where there is none), or a program with its arguments.

        When it has ended, what it started in the background goes on. When its time is over, its process group and all
        its descendants are killed; daemons, which are nobody's descendants, live on.

        Args:
            output_bytes: of each stream that are kept; the rest is read and dropped.
            on_output: awaited with each piece of output, as it comes.

        Raises:
            CommandTimeout: its time was over.
            EnvironmentFault: the sandbox is gone.
        """
        shells = [["/bin/bash", "-c", command], ["/bin/sh", "-c", command]] if isinstance(command, str) else None
        request: dict[str, Json] = {"command": shells or [list(command)], "user": user, "cwd": cwd}  # pyright: ignore
        request["env"] = {"PATH": _PATH, **(env or {})}
        out, err = (Stream(name, output_bytes, on_output) for name in ("stdout", "stderr"))
        try:
            with _null() as null:
                asked = self._ask(request, (null.fileno(), out.write_end, err.write_end))
        except BaseException:
            out.close()
            err.close()
            raise
        try:
            out.begin()
            err.begin()
            async with asyncio.timeout(timeout_s):
                message = await receive_message(asked)
            await out.finish()
            await err.finish()
        except TimeoutError:
            raise CommandTimeout(f"a command took more than {timeout_s:g} s and was ended") from None
        finally:
            asked.close()  # which ends the command, if it has not ended
            kept, cut = (bytes(out.kept), bytes(err.kept)), out.cut or err.cut
            self._leave(out, err)
        if "failed" in message:
            return CompletedCommand(126, kept[0], f"{message['failed']}\n".encode())
        if "exit" not in message:
            raise EnvironmentFault("a sandbox ended while a command ran in it")
        return CompletedCommand(int(str(message["exit"])), *kept, cut)

    async def put(self, source: Path, target: str) -> None:
        """Copy a file to a path in the sandbox, or what is in a folder into a folder there."""
        if not await in_thread(source.exists):
            raise UsageError(f"{source} is not there, and was to be copied into a sandbox")
        single = not await in_thread(source.is_dir)
        await self._put(lambda stream: files.pack(source, stream), target, single=single, what=str(source))

    async def put_entries(self, entries: list[Entry]) -> None:
        """Copy what a Dockerfile copies."""
        await self._put(lambda stream: files.pack_entries(entries, stream), "/", single=False, what="a COPY")

    async def _put(self, pack: Callable[[BinaryIO], None], target: str, *, single: bool, what: str) -> None:
        reader, writer = os.pipe()

        def send() -> None:
            with os.fdopen(writer, "wb") as stream, suppress(BrokenPipeError):  # its own word says why
                pack(stream)

        request: dict[str, Json] = {"put": _absolute(target), "single": single}
        await self._transfer(request, (reader, None), send, f"{what} could not be copied to {target}")

    async def get(self, source: str, target: Path, *, folder: bool, most_bytes: int = _FILES_BYTES) -> None:
        """Copy a file of the sandbox to `target`, or what is in a folder of it into the folder `target`.

        Links that lead out of the folder, sockets, pipes and devices are left out.

        Raises:
            TooMuch: it is more than `most_bytes`.
            EnvironmentFault: it is not there, or not what it was taken for, or the sandbox is gone.
        """
        request: dict[str, Json] = {"get": _absolute(source), "single": not folder}
        reader, writer = os.pipe()

        def receive() -> None:
            with os.fdopen(reader, "rb") as stream:
                (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
                files.unpack(stream, target, single=not folder, most_bytes=most_bytes)

        await self._transfer(request, (None, writer), receive, f"{source} could not be copied out of a sandbox")

    def _leave(self, *streams: Stream) -> None:
        for stream in streams:
            stream.leave()
        self._left = [stream for stream in (*self._left, *streams) if stream.is_open]

    async def _transfer(
        self, request: dict[str, Json], ends: tuple[int | None, int | None], work: Callable[[], None], what: str
    ) -> None:
        try:
            with _null() as null:
                streams = [null.fileno() if end is None else end for end in ends]
                asked = self._ask(request, (*streams, null.fileno()))
        finally:
            for end in ends:
                if end is not None:
                    os.close(end)
        moving = asyncio.ensure_future(in_thread(work))
        try:
            async with asyncio.timeout(_FILES_S):
                message = await receive_message(asked)
                (error,) = await asyncio.gather(moving, return_exceptions=True)
        except TimeoutError:
            raise EnvironmentFault(f"{what}: it took more than {_FILES_S:g} s") from None
        finally:
            asked.close()  # which ends the other side, if it has not ended, and with it the thread
        if isinstance(error, files.TooMuch):
            raise error
        failure = str(message.get("failed") or error or "") if message else "the sandbox ended"
        if failure or message.get("exit") != 0:
            raise EnvironmentFault(f"{what}: {failure or 'its helper was ended'}")

    async def _request_view(self, request: dict[str, Json]) -> None:
        with _null() as null:
            asked = self._ask(request, (null.fileno(),))
        try:
            message = await receive_message(asked)
        finally:
            asked.close()
        if message.get("exit") != 0:
            raise EnvironmentFault(
                f"a view of a sandbox could not be opened or closed: {message.get('failed', 'it has ended')}"
            )

    def _ask(self, request: dict[str, Json], streams: tuple[int, ...]) -> socket.socket:
        """Have the first process start something; the socket on which it says how that ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        content: dict[str, Json] = {**_NO_REQUEST, **request, "limits": dict(self._limits)}
        with theirs, message_file(json.dumps(content).encode()) as text:
            try:
                socket.send_fds(self._channel, [b"?"], [text.fileno(), theirs.fileno(), *streams])
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):
                    raise EnvironmentFault("a sandbox that has ended was asked for something") from error
                raise
        ours.setblocking(False)
        return ours


async def receive_message(source: socket.socket) -> dict[str, Json]:
    """Return the next message of a socket; an empty one where there are no more."""
    try:
        data = await asyncio.get_running_loop().sock_recv(source, _MESSAGE_BYTES)
    except ConnectionError:
        data = b""
    return json.loads(data) if data else {}


def message_file(content: bytes) -> BinaryIO:
    """Return a message as a file without a name: it may be longer than a socket takes."""
    file = os.fdopen(os.memfd_create("rlkit"), "wb") if sys.platform == "linux" else tempfile.TemporaryFile("wb")  # noqa: SIM115  closed by who asks
    file.write(content)
    file.flush()
    return cast("BinaryIO", file)


def _null() -> FileIO:
    return FileIO(os.devnull, "r+")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"a path in a sandbox must be absolute, not {path!r}")
    return path
