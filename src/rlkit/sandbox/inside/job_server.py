"""Server that starts jobs for the owner of a sandbox, and reaps them.

Invariant: each request gets one answer on its own socket: the job's exit code, or the reason why it did not start. A
job whose socket closes is killed with all its descendants.
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
"""Value of `oom_score_adj` that makes the kernel kill a process early if memory is short."""
_SWEEPS = 64  # maximum number of passes over the processes of a killed job: a job may fork forever


class JobServer:
    """Server of the requests that arrive on a socket, until its other end closes."""

    def __init__(self, owner: socket.socket) -> None:
        self.owner = owner
        self._jobs: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def enter(self) -> None:
        """Join the namespaces in which this server's jobs run; called in the job's process."""

    def handle(self, request: job.Request, status: socket.socket) -> bool:
        """Answer a request on `status` if it needs no process of its own; return True if it was answered."""
        if "kill_all" in request:
            self._kill_all()
            send_message(status, {"exit": 0})
            return True
        if "listen" not in request:
            return False
        try:
            with socket.create_server(("127.0.0.1", request["listen"])) as listener:
                socket.send_fds(status, [b"{}"], [listener.fileno()])
        except OSError as error:
            send_message(status, {"failed": kernel.describe(error)})
        return True

    def is_ending(self) -> bool:
        """Return whether the sandbox is ending; the exit codes of its jobs are then not reported."""
        return False

    def close(self) -> None:
        """End this process, because the owner is gone."""
        os._exit(0)

    def note_end(self, pid: int, wait_status: int) -> None:
        """Handle the end of a child process that is not a job."""

    def serve(self) -> None:
        """Serve requests; never returns."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, note_signal)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        owner = self.owner.fileno()
        for descriptor in (wake_reader, owner):
            self._poll.register(descriptor, select.POLLIN)
        self._reap()  # a child may have ended before the signal handler was set
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            self._reap()
            for pid, status in self._jobs.items():
                if status.fileno() in ready:
                    self._poll.unregister(status)  # the caller asks to end the command, or is gone
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
        except OSError as error:  # the limit on processes or memory is reached
            send_message(status, {"failed": f"no process can be started: {error.strerror}"})
            status.close()
            return
        if pid == 0:
            self.owner.close()
            for other in self._jobs.values():
                other.close()
            job.run_request(request, status, streams, self._prepare_job)  # never returns
        self._jobs[pid] = status
        self._poll.register(status, select.POLLIN)

    def _prepare_job(self) -> None:
        with suppress(OSError):
            kernel.control(kernel.PR_SET_DUMPABLE, 1)  # needed by users other than root to write the file
            write("/proc/self/oom_score_adj", KILLED_FIRST)
        kernel.control(kernel.PR_SET_DUMPABLE, 0)
        self.enter()

    def _kill_all(self) -> None:
        """Kill all processes of the sandbox, and wait for their end.

        Only for the first process: -1 stands for all processes except itself, and it inherits all orphans. It starts no
        process for this, because those of the sandbox may have reached the limit on processes.
        """
        if os.getpid() != 1:
            raise RuntimeError("only the first process of a namespace may kill all others")
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self._reap(0)

    def _reap(self, options: int = os.WNOHANG) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            status = self._jobs.pop(pid, None)
            if status is None:
                self.note_end(pid, wait_status)
                continue
            with suppress(KeyError):
                self._poll.unregister(status)
            exit_code = os.waitstatus_to_exitcode(wait_status)
            if not self.is_ending():
                send_message(status, {"exit": exit_code if exit_code >= 0 else 128 - exit_code})
            status.close()


def receive(source: socket.socket) -> tuple[bytes, list[int]]:
    """Return the text of the file sent as the first descriptor, and the other descriptors; empty if the owner died."""
    descriptors = list[int]()
    with suppress(ConnectionError):
        _, descriptors = receive_descriptors(source, 1, count=8)
    if not descriptors:
        return b"", []
    text = os.pread(descriptors[0], min(os.fstat(descriptors[0]).st_size, _MESSAGE_BYTES), 0)
    os.close(descriptors[0])
    return text, descriptors[1:]


def receive_descriptors(source: socket.socket, size: int, *, count: int = 1) -> tuple[bytes, list[int]]:
    """Return data, and descriptors that programs started by this process do not inherit."""
    data, descriptors, _, _ = socket.recv_fds(source, size, count)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, descriptors


def send_message(target: socket.socket, message: dict[str, object]) -> None:
    """Send a message, unless the receiver is gone."""
    with suppress(OSError):
        target.sendall(json.dumps(message).encode() + b"\n")


def write(path: str, text: str) -> None:
    """Write a file of the kernel, such as one in `/proc`."""
    with open(path, "w") as file:
        file.write(text)


def note_signal(number: int, frame: object) -> None:
    """Do nothing: only signals with a handler interrupt a wait."""


def _kill(leader: int) -> None:
    """Kill a command: its process group and all its descendants. Daemons, which are no descendants, survive."""
    stopped: set[int] = set()
    for _ in range(_SWEEPS):
        processes = _find_descendants(leader) - stopped
        if not processes:
            break
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # so that it starts no process during the search for the others
        stopped |= processes
    for pid in stopped | {leader}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _find_descendants(leader: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{int(name)}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    processes = {leader}
    while children := {pid for pid, parent in parents.items() if parent in processes} - processes:
        processes |= children
    return processes
