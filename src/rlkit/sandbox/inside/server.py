"""A process that has loaded the libraries of programs, and forks for each program that it is given.

Invariant: it lives as long as its owner holds the other end of its socket, and so does all that it has started. Each
program has a keeper, which ends it and its descendants at its time limit, or as soon as nobody waits for it any more.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from contextlib import suppress
from typing import NoReturn, TypedDict

from . import kernel, landlock, program_filter
from .job_server import KILLED_FIRST, note_signal, receive, send_message, write
from .program import Request, Walls, become, enclose

_LINUX = sys.platform == "linux"
_POLL_S = 0.01
_SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
)
_LENGTH = struct.Struct("<Q")
_REASON_BYTES = 4096
_NICE = 5
"""A trainer's own work comes before that of its programs."""


class Plan(TypedDict):
    """Request of the owner."""

    layers: list[str]
    preload: list[str]
    package: str


def main() -> None:
    """Serve; the first argument is the descriptor of the owner's socket."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    plan: Plan = json.loads(receive(owner)[0])
    notes: dict[str, str] = {}
    with suppress(OSError):
        os.nice(_NICE)
    if _LINUX:
        with suppress(OSError):
            write("/proc/self/oom_score_adj", KILLED_FIRST)
    in_namespaces = "namespaces" in plan["layers"] and _LINUX and _separated(notes)
    if in_namespaces and (pid := os.fork()):
        owner.close()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    if in_namespaces:
        kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in plan["preload"]:
        with suppress(ImportError):
            importlib.import_module(name)
    walls: Walls = {
        "layers": plan["layers"],
        "readable": _libraries(plan["package"]),
        "listed": _folders(),
        "writable": ["/dev/null"],
        "base_bytes": _mapped_bytes(),
    }
    if in_namespaces:
        _hide_processes()
    walls["layers"] = _standing(walls, notes, in_namespaces=in_namespaces)
    send_message(owner, {"notes": notes, "layers": walls["layers"]})
    gc.collect()
    gc.disable()
    gc.freeze()
    _serve(owner, walls, in_namespaces=in_namespaces)


def _separated(notes: dict[str, str]) -> bool:
    """Have this process's children in namespaces of their own; whether that is permitted."""
    flags = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    for more in (0, os.CLONE_NEWUSER) if uid == 0 else (os.CLONE_NEWUSER,):
        try:
            os.unshare(flags | more)
            if more:
                for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                    write(f"/proc/self/{name}", text)
        except OSError as error:
            notes["namespaces"] = f"refused by the kernel: {error.strerror}"
            continue
        notes["namespaces"] = "processes, network, mounts, IPC" + (", users" if more else "")
        return True
    return False


def _hide_processes() -> None:
    """No process is seen from here on, not even in `/proc`."""
    with suppress(OSError):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_RDONLY, "size=0")


def _folders() -> list[str]:
    """Return the folders of Python's own library and of what is installed."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(
        folders | {path for path in sys.path if path.endswith(("site-packages", "dist-packages", "lib-dynload"))}
    )


def _libraries(package: str) -> list[str]:
    """Return the readable paths: libraries of the system and of Python, and installed packages except `package`.

    `package` holds published solutions of the problems that programs solve; the modules that they need are loaded.
    """
    paths: list[str] = []
    for folder in (*_SYSTEM, *_folders()):
        if os.path.realpath(package).startswith(os.path.realpath(folder) + os.sep):
            paths += _without(folder, os.path.realpath(package))
        else:
            paths.append(folder)
    return paths


def _without(folder: str, left_out: str) -> list[str]:
    """Return the entries of a folder, and of the folders on the way to `left_out`, without `left_out`."""
    entries: list[str] = []
    for entry in os.scandir(folder):
        path = os.path.realpath(entry.path)
        if left_out.startswith(path + os.sep):
            entries += _without(path, left_out)
        elif path != left_out:
            entries.append(entry.path)
    return entries


def _mapped_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _standing(walls: Walls, notes: dict[str, str], *, in_namespaces: bool) -> list[str]:
    """Return the layers that can be put up, each tried in a process of its own."""
    standing: list[str] = []
    for layer in walls["layers"]:
        if layer == "namespaces":
            if in_namespaces:
                standing.append(layer)
        elif layer in ("environment", "session"):
            standing.append(layer)  # as this process was started
        elif (why := _refused(layer, walls)) is None:
            standing.append(layer)
        else:
            notes[layer] = why
    if "landlock" in standing:
        notes["landlock"] = f"version {landlock.version()}"
    return standing


def _refused(layer: str, walls: Walls) -> str | None:
    """Return the reason why a layer cannot be put up, if any."""
    if layer != "limits" and not _LINUX:
        return f"not on {sys.platform}"
    if layer == "landlock" and not landlock.version():
        return "not in this kernel"
    if layer == "seccomp" and program_filter.program() is None:
        return f"no filter for {os.uname().machine}"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            needed = ["no_new_privs"] if layer in ("landlock", "seccomp") else []
            layer_walls: Walls = {**walls, "layers": [*needed, layer]}
            enclose(layer_walls, cpu_s=60, memory_bytes=1 << 30)
        except BaseException as error:
            os.write(writer, (str(error) or type(error).__name__).encode()[:1000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        why = stream.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return why or None


def _serve(owner: socket.socket, walls: Walls, *, in_namespaces: bool) -> NoReturn:
    signal.signal(signal.SIGCHLD, note_signal)  # so that waiting is interrupted, and keepers are reaped
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([owner], [], [], 1.0)[0]:
            continue
        text, descriptors = receive(owner)
        if not text:
            os._exit(0)
        status_socket = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            send_message(status_socket, {"failed": f"no process can be started: {error.strerror}"})
            pid = -1
        if pid == 0:
            owner.close()
            _keep(
                text,
                status_socket,
                (descriptors[1], descriptors[2], descriptors[3]),
                walls,
                in_namespaces=in_namespaces,
            )
        status_socket.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def _keep(
    text: bytes, status_socket: socket.socket, streams: tuple[int, int, int], walls: Walls, *, in_namespaces: bool
) -> NoReturn:
    """Start a program, wait for it, end it when its time is over, and say how it went."""
    try:
        length = _LENGTH.unpack_from(text)[0]
        request: Request = json.loads(text[_LENGTH.size : _LENGTH.size + length])
        if _LINUX:
            kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if in_namespaces:
            os.unshare(os.CLONE_NEWPID)
        reader, writer = os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            become(request, text[_LENGTH.size + length :], walls, streams, writer)
        for descriptor in (*streams, writer):
            os.close(descriptor)
        late, status, used_s = _waited(pid, status_socket, request["timeout_s"])
        code = os.waitstatus_to_exitcode(status)
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            if broken := os.read(reader, _REASON_BYTES):
                raise OSError(f"its isolation could not be set up: {broken.decode(errors='replace')}")
        send_message(
            status_socket, {"exit": code, "late": late, "seconds": time.monotonic() - started, "cpu_s": used_s}
        )
    except BaseException as error:
        send_message(status_socket, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _waited(pid: int, status_socket: socket.socket, timeout_s: float) -> tuple[bool, int, float]:
    """Return whether a process ran into its time limit, its status, and the processor seconds that it took."""
    end_s = time.monotonic() + timeout_s
    watched: list[int | socket.socket] = [status_socket]
    exit_fd = -1
    if _LINUX:
        exit_fd = os.pidfd_open(pid)
        watched.append(exit_fd)
    late = False
    while (left_s := end_s - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left_s if _LINUX else min(_POLL_S, left_s))[0]
        if ready:  # it has ended, or nobody waits any more
            break
        ended_pid, status, used = os.wait4(pid, os.WNOHANG) if not _LINUX else (0, 0, None)
        if ended_pid and used is not None:
            _end_group(pid)
            return False, status, used.ru_utime + used.ru_stime
    else:
        late = True
    if late or exit_fd not in select.select(watched, [], [], 0)[0]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _end_group(pid)  # before it is waited for, so that its number is still its own
    _, status, used = os.wait4(pid, 0)
    return late, status, used.ru_utime + used.ru_stime


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_ = array  # socket.recv_fds imports it when it is called, which would be too late
if __name__ == "__main__":
    main()
