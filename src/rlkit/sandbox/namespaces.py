"""Start and stop of sandboxes, and views of them.

Invariant: a sandbox lives as long as its owner holds its socket. Shortly after the owner's death, however it dies, the
sandbox has no process and no mount; after `stop` it has no file either. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakSet

from rlkit._util.threads import in_sandbox_thread as in_thread
from rlkit.errors import EnvironmentFault, MissingError
from rlkit.sandbox import cgroups, sandbox_folders
from rlkit.sandbox.commands import Commands, receive_message, send_message
from rlkit.sandbox.forwarder import Forwarder
from rlkit.sandbox.plan import describe_limits, make_plan, make_start_error
from rlkit.sandbox.spec import Spec, shared_paths
from rlkit.types import Json

_PACKAGE_FOLDER = Path(__file__).parent
_START_PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.first_process import main; main()"
_START_LIMIT_S = 300.0  # only to detect hangs: a start is slow on a busy machine
_END_LIMIT_S = 10.0

OWNED_SOCKETS = WeakSet[socket.socket]()
"""Sockets to processes that live as long as this process holds the socket."""


class View(Commands):
    """A view of a sandbox: the same files and processes, and folders that no process of the sandbox can reach.

    Commands in the view see the sandbox's processes and can signal them. Processes of the sandbox cannot trace the
    view's commands; with Landlock 6 or later, they cannot signal them either. A view ends with its sandbox, and when
    another view is opened.
    """

    async def close(self) -> None:
        """End all processes in the view."""
        await self._request_view({"close_view": True})


class Sandbox(Commands):
    """A running sandbox, from `await Sandbox.start(spec)`."""

    def __init__(
        self,
        folder: sandbox_folders.SandboxFolder,
        process: subprocess.Popen[bytes],
        owner: socket.socket,
        views: socket.socket,
    ) -> None:
        super().__init__(owner)
        self._folder = folder
        self._process = process
        self._views = views
        self._forwarders = list[Forwarder]()
        self._has_host_network = False
        self.limit_descriptions: tuple[str, ...] = ()  # limits in force, in words
        self.seal_problem = ""
        """Reason why this kernel cannot keep the sandbox's processes out of a view; empty if it can."""

    @staticmethod
    async def start(spec: Spec) -> Sandbox:
        """Start a sandbox.

        Raises:
            MissingError: the system cannot run sandboxes.
            EnvironmentFault: the sandbox did not start.
        """
        if sys.platform != "linux":
            raise MissingError("a local sandbox needs Linux: use a container engine or a cloud environment instead")
        launch = asyncio.ensure_future(in_thread(_launch, spec))
        try:
            sandbox, groups = await asyncio.shield(launch)
        except asyncio.CancelledError:
            await (await launch)[0].stop()  # the thread starts it anyway, and nobody else would stop it
            raise
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                message: dict[str, Json] = {}
                while "ready" not in message:
                    message = await receive_message(sandbox._channel)
                    if "pid" in message:
                        await in_thread(sandbox._folder.add_resources, (int(str(message["pid"])),))
                    elif "ready" not in message:
                        raise make_start_error(message)
        except BaseException as error:
            await asyncio.shield(sandbox.stop())
            if isinstance(error, TimeoutError):
                raise EnvironmentFault(f"a sandbox did not start within {_START_LIMIT_S:g} s") from None
            raise
        sandbox._limits, sandbox.limit_descriptions = describe_limits(
            spec, groups, filtered=bool(message.get("filtered"))
        )
        sandbox._has_host_network = spec.network
        sandbox.seal_problem = str(message.get("seal_problem", ""))
        return sandbox

    async def open_view(self, *, private: Sequence[str], shared: Sequence[str] | None = None) -> View:
        """Open a view of the sandbox in its current state.

        Args:
            private: folders that exist only in the view, initially empty and owned by root.
            shared: folders of the sandbox that the view shows; all else is from the original image. None for the whole
                sandbox.

        Raises:
            MissingError: the kernel cannot keep the sandbox's processes out of the view.
            UsageError: a shared path is not absolute, has a `..`, or overlaps a private folder.
            EnvironmentFault: the view could not be opened, or the sandbox has ended.
        """
        if self.seal_problem:
            raise MissingError(f"a view of a sandbox cannot be sealed: {self.seal_problem}")
        paths = None if shared is None else list(shared_paths(shared, private=private))
        view = View(self._views)
        view._limits = dict(self._limits)
        await view._request_view({"view": {"private": list(private), "shared": paths}})
        return view

    @asynccontextmanager
    async def forward_port(self, port: int) -> AsyncGenerator[None]:
        """Forward a TCP port of the sandbox's 127.0.0.1 to the same port of the host, until the end of the block.

        Does nothing if the sandbox shares the host's network.

        Raises:
            EnvironmentFault: the port is in use in the sandbox, or the sandbox has ended.
        """
        if self._has_host_network:
            yield
            return
        forwarder = Forwarder(await self._request_listener(port))
        self._forwarders.append(forwarder)
        try:
            yield
        finally:
            await forwarder.close()

    async def kill_processes(self) -> None:
        """Kill all processes of the sandbox and of its views; commands still work afterwards.

        Raises:
            EnvironmentFault: a process did not end, or the sandbox has ended.
        """
        with self._send_request({"kill_all": True}) as status:
            try:
                async with asyncio.timeout(_END_LIMIT_S):
                    message = await receive_message(status)
            except TimeoutError:
                raise EnvironmentFault(f"processes of a sandbox did not end within {_END_LIMIT_S:g} s") from None
        if not message:
            raise EnvironmentFault("a sandbox ended while its processes were killed")

    async def stop(self, *, keep: Path | None = None) -> None:
        """End all processes of the sandbox, and remove it; may be called more than once.

        Args:
            keep: destination of the written files, one folder per tree of `spec`; on the file system of rlkit's cache.
        """
        self._views.close()  # first: the view's process then knows why its jobs end
        self._channel.close()
        for forwarder in self._forwarders:
            await forwarder.close()
        end = asyncio.ensure_future(in_thread(self._process.wait))
        if not (await asyncio.wait({end}, timeout=_END_LIMIT_S))[0]:
            self._process.kill()
        await end
        for stream in self._background_streams:
            stream.close()
        if keep is not None:
            await in_thread((self._folder.path / "upper").rename, keep)
        await in_thread(self._folder.remove)


def _launch(spec: Spec) -> tuple[Sandbox, cgroups.Groups]:
    folder = sandbox_folders.SandboxFolder(spec.uses)
    try:
        groups = cgroups.make(folder.name, spec.limits)
        folder.add_resources((), groups.folders)
        plan = make_plan(spec, folder, groups)
        owner, remote_owner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        views, remote_views = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote_owner, remote_views:
            arguments = ["-S", "-c", _START_PROGRAM, str(_PACKAGE_FOLDER)]
            environment = loader_environment()  # the sandbox can read it
            # Ctrl-C must reach the owner only, which needs the sandbox until a step ends.
            process = start_python(arguments, remote_owner, remote_views, env=environment, new_session=True)
        folder.add_resources((process.pid,))
        send_message(owner, json.dumps(plan).encode())
    except BaseException:
        folder.remove()
        raise
    for channel in (owner, views):
        channel.setblocking(False)
        OWNED_SOCKETS.add(channel)
    return Sandbox(folder, process, owner, views), groups


def start_python(
    arguments: Sequence[str], *sockets: socket.socket, env: Mapping[str, str] | None, new_session: bool
) -> subprocess.Popen[bytes]:
    """Start an isolated Python with the descriptors of sockets as its last arguments."""
    numbers = [end.fileno() for end in sockets]
    return subprocess.Popen(
        [sys.executable, "-I", *arguments, *map(str, numbers)],
        env=env,
        cwd="/",  # any other folder could not be removed while the process runs
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=new_session,
    )


def loader_environment() -> dict[str, str]:
    """Return the environment variables that this interpreter may need to start."""
    return {name: value for name in ("LD_LIBRARY_PATH",) if (value := os.environ.get(name))}


def _close_owned_sockets() -> None:
    """Close the sockets in a forked process: open copies would keep sandboxes alive after the parent's death."""
    for owner in list(OWNED_SOCKETS):
        owner.close()


os.register_at_fork(after_in_child=_close_owned_sockets)
