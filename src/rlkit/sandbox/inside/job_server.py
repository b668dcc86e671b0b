"""A process that starts jobs for the owner of a sandbox, and reaps them.

Invariant: each job that was asked for is answered once, on its own socket: how it ended, or why it could not start. A
job whose socket closes is ended with all that descends from it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from contextlib import suppress

from . import job, kernel

_MESSAGE_BYTES = 64 << 20
KILLED_FIRST = "500"
"""For the kernel's score of what it kills where memory is short."""
_SWEEPS = 64
"""The most passes over the processes of a job that is ended, before it is taken to fork without end."""


class JobServer:
    """Serve the requests that arrive on a socket, until its other end closes."""

    def __init__(self, owner: socket.socket) -> None:
        self.owner = owner
        self._jobs: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def enter(self) -> None:
        """Go where this server's jobs run; called in the process that becomes the job."""

    def handle(self, request: job.Request, status: socket.socket) -> bool:
        """Answer a request that needs no job of its own; return whether it was such a one."""
        return False

    def is_ending(self) -> bool:
        """Return whether jobs end because the sandbox does, so that how they ended says nothing."""
        return False

    def close(self) -> None:
        """End, since the owner is gone."""
        os._exit(0)

    def note_end(self, pid: int, status: int) -> None:
        """Take note of the end of a child that is no job."""

    def serve(self) -> None:
        """Serve; does not return."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, note_signal)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        owner = self.owner.fileno()
        for descriptor in (wake, owner):
            self._poll.register(descriptor, select.POLLIN)
        self._reap()  # a child may have ended before its signal was listened for
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if wake in ready:
                os.read(wake, 4096)
            self._reap()
            for pid, status in list(self._jobs.items()):
                if status.fileno() in ready and pid in self._jobs:
                    self._poll.unregister(status)  # whether it asks to end the command, or is gone
                    _kill(pid)
            if owner in ready:
                self._receive()

    def _receive(self) -> None:
        text, descriptors = receive(self.owner)
        if not descriptors:
            self._poll.unregister(self.owner)
            self.close()
            return
        status = socket.socket(fileno=descriptors[0])
        request: job.Request = json.loads(text)
        if self.handle(request, status):
            status.close()
        else:
            self._start(request, status, descriptors[1:])
        for descriptor in descriptors[1:]:
            os.close(descriptor)

    def _start(self, request: job.Request, status: socket.socket, streams: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # the limit on processes, or on memory
            send_message(status, {"failed": f"no process can be started: {error.strerror}"})
            status.close()
            return
        if pid == 0:
            self.owner.close()
            for other in self._jobs.values():
                other.close()
            job.become(request, status, streams, self._prepare_job)
        self._jobs[pid] = status
        self._poll.register(status, select.POLLIN)

    def _prepare_job(self) -> None:
        with suppress(OSError):
            kernel.control(kernel.PR_SET_DUMPABLE, 1)  # or a user could not write the next line
            write("/proc/self/oom_score_adj", KILLED_FIRST)
        kernel.control(kernel.PR_SET_DUMPABLE, 0)
        self.enter()

    def _reap(self) -> None:
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            status = self._jobs.pop(pid, None)
            if status is None:
                self.note_end(pid, code)
                continue
            with suppress(KeyError):
                self._poll.unregister(status)
            exit_code = os.waitstatus_to_exitcode(code)
            if not self.is_ending():
                send_message(status, {"exit": exit_code if exit_code >= 0 else 128 - exit_code})
            status.close()


def receive(source: socket.socket) -> tuple[bytes, list[int]]:
    """Return the text in the file whose descriptor came first, and the other descriptors; nothing from a dead owner."""
    try:
        _, descriptors, _, _ = socket.recv_fds(source, 1, 8)
    except ConnectionError:
        descriptors = list[int]()
    if not descriptors:
        return b"", []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    text = os.pread(descriptors[0], min(os.fstat(descriptors[0]).st_size, _MESSAGE_BYTES), 0)
    os.close(descriptors[0])
    return text, descriptors[1:]


def send_message(target: socket.socket, message: dict[str, object]) -> None:
    """Send a message, unless nobody listens any more."""
    with suppress(OSError):
        target.sendall(json.dumps(message).encode() + b"\n")


def write(path: str, text: str) -> None:
    """Write a file of the kernel's."""
    with open(path, "w") as file:
        file.write(text)


def describe(error: OSError) -> str:
    """Return an error in words, with the file that it is about."""
    return error.strerror + (f": {error.filename}" if error.filename else "") if error.strerror else str(error)


def note_signal(number: int, frame: object) -> None:
    """Do nothing: only a signal with a handler interrupts a wait."""


def _kill(leader: int) -> None:
    """End a command: its process group, and all that descend from it. What has made itself a daemon lives on."""
    stopped: set[int] = set()
    for _ in range(_SWEEPS):
        family = _descendants(leader) - stopped
        if not family:
            break
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that it starts nothing while the others are looked for
        stopped |= family
    for pid in stopped | {leader}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(leader: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    family = {leader}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family
