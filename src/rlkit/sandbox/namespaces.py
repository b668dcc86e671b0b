"""A sandbox, from the outside: starting it, running commands in it, moving files, stopping it.

Invariant: a sandbox lives as long as this object holds its socket, so that one whose owner dies, however it dies, has
no process and no mount a moment later; after `stop` it has no file either. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO
from weakref import WeakSet

from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.sandbox import cgroups, files, leftovers
from rlkit.sandbox.context import Entry
from rlkit.sandbox.plan import in_force, not_started, planned
from rlkit.sandbox.spec import MIB, Spec
from rlkit.sandbox.streams import OnOutput, Stream
from rlkit.sandbox.threads import in_thread
from rlkit.types import Json

_INSIDE = Path(__file__).parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.first import main; main()"
_START_S = 60.0
_END_S = 10.0
_OUTPUT_BYTES = 16 * MIB
_FILES_BYTES = 4096 * MIB
_FILES_S = 600.0
_MESSAGE_BYTES = 1 << 16
_LOADER = ("LD_LIBRARY_PATH",)  # without which this very interpreter might not start
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_alive = WeakSet[socket.socket]()


class CommandTimeout(EnvironmentFault, RuntimeError):
    """A command took longer than it may, and was ended."""


@dataclass(frozen=True)
class Done:
    """How a command ended: 128 and the signal's number where one ended it, 126 where it could not be started."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    cut: bool = False
    """Whether there was more output than is kept."""


class Sandbox:
    """A running sandbox; `await Sandbox.start(spec)` makes one."""

    def __init__(self, place: leftovers.Place, process: subprocess.Popen[bytes], owner: socket.socket) -> None:
        self._place = place
        self._process = process
        self._owner = owner
        self._limits: dict[str, int] = {}
        self._left: list[Stream] = []
        self.in_force: tuple[str, ...] = ()
        """What limits it, in words."""

    @classmethod
    async def start(cls, spec: Spec) -> Sandbox:
        """Start a sandbox.

        Raises:
            MissingError: the system cannot do it.
            EnvironmentFault: it did not come up.
        """
        if sys.platform != "linux":
            raise MissingError("a local sandbox needs Linux: use a container engine or a cloud environment instead")
        launching = asyncio.ensure_future(in_thread(lambda: _launched(cls, spec)))
        try:
            sandbox, groups = await asyncio.shield(launching)
        except asyncio.CancelledError:
            await (await launching)[0].stop()  # or it would be nobody's
            raise
        try:
            async with asyncio.timeout(_START_S):
                message: dict[str, Json] = {}
                while "ready" not in message:
                    message = await _message(sandbox._owner)
                    if "pid" in message:
                        await in_thread(sandbox._place.belongs, (int(str(message["pid"])),))
                    elif "ready" not in message:
                        raise not_started(message)
        except TimeoutError:
            await asyncio.shield(sandbox.stop())
            raise EnvironmentFault(f"a sandbox did not start within {_START_S:g} s") from None
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        sandbox._limits, sandbox.in_force = in_force(spec, groups, filtered=bool(message.get("filtered")))
        return sandbox

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
    ) -> Done:
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
                message = await _message(asked)
            await out.finish()
            await err.finish()
        except TimeoutError:
            raise CommandTimeout(f"a command took more than {timeout_s:g} s and was ended") from None
        finally:
            asked.close()  # which ends the command, if it has not ended
            kept, cut = (bytes(out.kept), bytes(err.kept)), out.cut or err.cut
            self._leave(out, err)
        if "failed" in message:
            return Done(126, kept[0], f"{message['failed']}\n".encode())
        if "exit" not in message:
            raise EnvironmentFault("a sandbox ended while a command ran in it")
        return Done(int(str(message["exit"])), *kept, cut)

    async def put(self, source: Path, target: str) -> None:
        """Copy a file to a path in the sandbox, or what is in a folder into a folder there.

        Raises:
            EnvironmentFault: the sandbox refuses it, or is gone.
        """
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

    async def stop(self, *, keep: Path | None = None) -> None:
        """End all that runs in it, and remove it; more than once is no more than once.

        Args:
            keep: a path that what was written goes to, a folder for each tree; on the file system of rlkit's cache.
        """
        self._owner.close()
        if not await _ended(self._process, _END_S):
            self._process.kill()
        await in_thread(self._process.wait)
        for stream in self._left:
            stream.close()
        if keep is not None:
            await in_thread((self._place.path / "upper").rename, keep)
        await in_thread(self._place.remove)

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
                message = await _message(asked)
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

    def _ask(self, request: dict[str, Json], streams: tuple[int, ...]) -> socket.socket:
        """Have the first process start something; the socket on which it says how that ended."""
        whole: dict[str, Json] = {"command": [], "put": None, "single": False, "get": None, "user": None, "cwd": None}
        whole["env"] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _file({**whole, **request, "limits": dict(self._limits)}) as text:
            try:
                socket.send_fds(self._owner, [b"?"], [text.fileno(), theirs.fileno(), *streams])
            except OSError as error:
                ours.close()
                raise EnvironmentFault("a sandbox that has ended was asked for something") from error
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return ours


def _launched(cls: type[Sandbox], spec: Spec) -> tuple[Sandbox, cgroups.Groups]:
    place = leftovers.Place(spec.uses)
    try:
        groups = cgroups.make(place.name, spec.limits)
        place.belongs((), groups.folders)
        plan = planned(spec, place, groups)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [sys.executable, "-I", "-S", "-c", _START, str(_INSIDE), str(theirs.fileno())]
            # Its environment can be read in the sandbox, and its working directory must not keep a folder from going.
            process = subprocess.Popen(
                arguments,
                env={name: value for name in _LOADER if (value := os.environ.get(name))},
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for its owner, which goes on with it to the end of a step
            )
        place.belongs((process.pid,))
        with _file(plan) as text:
            socket.send_fds(ours, [b"?"], [text.fileno()])
    except BaseException:
        place.remove()
        raise
    ours.setblocking(False)
    _alive.add(ours)
    return cls(place, process, ours), groups


async def _message(source: socket.socket) -> dict[str, Json]:
    """The next message; an empty one where there are no more."""
    try:
        data = await asyncio.get_running_loop().sock_recv(source, _MESSAGE_BYTES)
    except ConnectionError:
        data = b""
    return json.loads(data) if data else {}


async def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    if process.poll() is not None:
        return True
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, gone.set)
    try:
        async with asyncio.timeout(within_s):
            await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True


def _file(content: Mapping[str, Json]) -> BinaryIO:
    """A file in memory: a message may be longer than a socket takes."""
    file = os.fdopen(os.memfd_create("rlkit"), "wb")
    file.write(json.dumps(content).encode())
    file.flush()
    return file


def _null() -> FileIO:
    return FileIO(os.devnull, "r+")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"a path in a sandbox must be absolute, not {path!r}")
    return path


def _let_go() -> None:
    """In a process that was forked: it would keep alive what its parent's death should end."""
    for owner in list(_alive):
        owner.close()


os.register_at_fork(after_in_child=_let_go)
