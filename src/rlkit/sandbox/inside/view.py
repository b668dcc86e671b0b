"""Server outside of a sandbox that starts jobs in a view of it.

Invariant: no process of the sandbox can see, trace or signal this server, trace or signal its jobs, or access a view's
private folders. The server and its jobs have another mount namespace and are in no Landlock domain; all processes that
the first process starts are in one.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from typing import NoReturn

from . import job, kernel, root, view_root
from .job_server import JobServer, receive_descriptors, send_message, write

_REASON_BYTES = 4000


class ViewServer(JobServer):
    """Server of views of a sandbox, which starts jobs in the open view.

    Args:
        first: id of the sandbox's first process on the host.
        namespaces: socket on which the first process sends a descriptor of its mount namespace.
    """

    def __init__(self, owner: socket.socket, plan: root.Plan, *, first: int, namespaces: socket.socket) -> None:
        super().__init__(owner)
        with namespaces:
            self._sandbox = next(iter(receive_descriptors(namespaces, 16)[1]), -1)  # -1 if the first process has ended
        self._plan = plan
        self._first = first
        self._namespace = -1
        self._views = 0
        self._is_ending = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def enter(self) -> None:
        """Join the control groups and the mount namespace of the view."""
        if self._namespace < 0:
            raise OSError("this sandbox has no open view")
        os.umask(0o022)
        for path in self._plan["cgroups"]:
            write(path, "0")
        os.setns(self._namespace, os.CLONE_NEWNS)

    def handle(self, request: job.Request, status: socket.socket) -> bool:
        """Open or close a view, if requested."""
        if "view" not in request and "close_view" not in request:
            return False
        try:
            self._end_view()
            if "view" in request:
                self._namespace = self._open(request["view"])
            send_message(status, {"exit": 0})
        except OSError as error:
            send_message(status, {"failed": kernel.describe(error)})
        return True

    def is_ending(self) -> bool:
        """Return whether the owner is gone: the kernel then kills the jobs here before the first process ends."""
        if not self._is_ending and select.select([self.owner], [], [], 0)[0]:
            self._is_ending = not self.owner.recv(1, socket.MSG_PEEK)
        return self._is_ending

    def close(self) -> None:
        """Do nothing: `note_end` ends this process with the first process, which has the same owner."""

    def note_end(self, pid: int, wait_status: int) -> None:
        """End this process with the first process."""
        if pid == self._first:
            os._exit(os.waitstatus_to_exitcode(wait_status) & 0xFF)

    def _open(self, view: job.View) -> int:
        """Build a view, and return a descriptor of its mount namespace."""
        self._views += 1
        own_end, child_end = socket.socketpair()
        with own_end:
            pid = os.fork()
            if pid == 0:
                own_end.close()
                self._build(view, child_end)
            child_end.close()
            reason, descriptors = receive_descriptors(own_end, _REASON_BYTES)
            os.waitpid(pid, 0)
        if not descriptors:
            raise OSError(reason.decode(errors="replace") or "its process was killed")
        return descriptors[0]

    def _end_view(self) -> None:
        """Kill all processes in the view: they are in no Landlock domain, and could access the next view."""
        if self._namespace < 0:
            return
        thaw_reader, thaw_writer = os.pipe()
        frozen_reader, frozen_writer = os.pipe()
        pid = os.fork()
        if pid == 0:  # in the sandbox, where -1 stands for all processes except this one and the first
            os.close(thaw_writer)
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # all at once, so that none starts another process
            os.write(frozen_writer, b"!")
            os.read(thaw_reader, 1)
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)
            os._exit(0)
        os.read(frozen_reader, 1)
        namespace = os.fstat(self._namespace)
        for number in filter(str.isdigit, os.listdir("/proc")):
            if int(number) != pid and _is_in(number, namespace):
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
        os.close(thaw_writer)
        os.waitpid(pid, 0)
        for descriptor in (thaw_reader, frozen_reader, frozen_writer, self._namespace):
            os.close(descriptor)
        self._namespace = -1

    def _build(self, view: job.View, answer: socket.socket) -> NoReturn:
        try:
            kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.umask(0o022)
            view_root.build(self._plan, view, sandbox=self._sandbox, number=self._views)
            send_namespace(answer)
        except BaseException as error:
            answer.sendall((kernel.describe(error) or type(error).__name__).encode()[:_REASON_BYTES])
        os._exit(0)


def _is_in(number: str, namespace: os.stat_result) -> bool:
    """Return whether any thread of a process is in a mount namespace; the main thread may have ended."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{number}/task"):
            with suppress(OSError):
                mount = os.stat(f"/proc/{number}/task/{thread}/ns/mnt")
                if (mount.st_dev, mount.st_ino) == (namespace.st_dev, namespace.st_ino):
                    return True
    return False


def send_namespace(target: socket.socket) -> None:
    """Send a descriptor of this process's mount namespace, which other processes may not be allowed to open."""
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    socket.send_fds(target, [b"namespace"], [namespace])
    os.close(namespace)
