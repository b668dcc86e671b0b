"""Server with preloaded libraries that forks a process for each program.

Invariant: the server and all its processes live as long as the owner holds the other end of the server's socket. Each
program has a keeper process, which kills it and its descendants at its time limit, or when its caller is gone.
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
from .program import IsolationSetup, Request, isolate, run_program

_LINUX = sys.platform == "linux"
_POLL_S = 0.01
_SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
)
_LENGTH = struct.Struct("<Q")
_REASON_BYTES = 4096
_NICE = 5  # increment of the nice value, so that the trainer's own work has priority over programs


class Plan(TypedDict):
    """Setup of the server, sent by its owner."""

    layers: list[str]
    preload: list[str]
    package: str


def main() -> None:
    """Serve programs; the first argument is the descriptor of the owner's socket."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    plan: Plan = json.loads(receive(owner)[0])
    notes: dict[str, str] = {}
    with suppress(OSError):
        os.nice(_NICE)
    if _LINUX:
        with suppress(OSError):
            write("/proc/self/oom_score_adj", KILLED_FIRST)
    in_namespaces = "namespaces" in plan["layers"] and _LINUX and _enter_namespaces(notes)
    if in_namespaces and (pid := os.fork()):
        owner.close()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    if in_namespaces:
        kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in plan["preload"]:
        with suppress(ImportError):
            importlib.import_module(name)
    setup: IsolationSetup = {
        "layers": plan["layers"],
        "readable": _list_readable_paths(plan["package"]),
        "listed": _list_python_folders(),
        "writable": ["/dev/null"],
        "base_bytes": _measure_mapped_bytes(),
    }
    if in_namespaces:
        _hide_processes()
    setup["layers"] = _find_working_layers(setup, notes, in_namespaces=in_namespaces)
    send_message(owner, {"notes": notes, "layers": setup["layers"]})
    gc.collect()
    gc.disable()
    gc.freeze()
    _serve(owner, setup, in_namespaces=in_namespaces)


def _enter_namespaces(notes: dict[str, str]) -> bool:
    """Put this process's children into new namespaces; return whether the kernel permits it."""
    flags = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    for extra_flags in (0, os.CLONE_NEWUSER) if uid == 0 else (os.CLONE_NEWUSER,):
        try:
            os.unshare(flags | extra_flags)
            if extra_flags:
                for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                    write(f"/proc/self/{name}", text)
        except OSError as error:
            notes["namespaces"] = f"denied by the kernel: {error.strerror}"
            continue
        notes["namespaces"] = "processes, network, mounts, IPC" + (", users" if extra_flags else "")
        return True
    return False


def _hide_processes() -> None:
    """Hide all processes: mount an empty `/proc`."""
    with suppress(OSError):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_RDONLY, "size=0")


def _list_python_folders() -> list[str]:
    """Return the folders of Python's standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(
        folders | {path for path in sys.path if path.endswith(("site-packages", "dist-packages", "lib-dynload"))}
    )


def _list_readable_paths(package: str) -> list[str]:
    """Return the readable paths: libraries of the system and of Python, and installed packages, without `package`.

    `package` (rlkit) has published solutions of the problems that programs solve. Their helper modules are preloaded.
    """
    paths: list[str] = []
    for folder in (*_SYSTEM, *_list_python_folders()):
        if os.path.realpath(package).startswith(os.path.realpath(folder) + os.sep):
            paths += _list_without(folder, os.path.realpath(package))
        else:
            paths.append(folder)
    return paths


def _list_without(folder: str, excluded: str) -> list[str]:
    """Return the entries of a folder; replace each ancestor of `excluded` by its entries, and omit `excluded`."""
    entries: list[str] = []
    for entry in os.scandir(folder):
        path = os.path.realpath(entry.path)
        if excluded.startswith(path + os.sep):
            entries += _list_without(path, excluded)
        elif path != excluded:
            entries.append(entry.path)
    return entries


def _measure_mapped_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _find_working_layers(setup: IsolationSetup, notes: dict[str, str], *, in_namespaces: bool) -> list[str]:
    """Return the layers that work here, each tried in a separate process."""
    is_applied = {"environment": True, "session": True, "namespaces": in_namespaces}  # before this process began
    layers: list[str] = []
    for layer in setup["layers"]:
        problem = None if layer in is_applied else _find_layer_problem(layer, setup)
        if problem is not None:
            notes[layer] = problem
        elif is_applied.get(layer, True):
            layers.append(layer)
    if "landlock" in layers:
        notes["landlock"] = f"version {landlock.version()}"
    return layers


def _find_layer_problem(layer: str, setup: IsolationSetup) -> str | None:
    """Return the reason why a layer cannot be applied; None if it can."""
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
            layer_setup: IsolationSetup = {**setup, "layers": [*needed, layer]}
            isolate(layer_setup, cpu_s=60, memory_bytes=1 << 30)
        except BaseException as error:
            os.write(writer, (str(error) or type(error).__name__).encode()[:1000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        problem = stream.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return problem or None


def _serve(owner: socket.socket, setup: IsolationSetup, *, in_namespaces: bool) -> NoReturn:
    signal.signal(signal.SIGCHLD, note_signal)  # interrupts the wait, so that keepers are reaped
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
            _run_keeper(text, status_socket, descriptors[1:], setup, in_namespaces=in_namespaces)
        status_socket.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def _run_keeper(
    text: bytes, status_socket: socket.socket, streams: list[int], setup: IsolationSetup, *, in_namespaces: bool
) -> NoReturn:
    """Start a program, wait for it, kill it at its time limit, and send its outcome."""
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
            run_program(request, text[_LENGTH.size + length :], setup, streams, writer)
        for descriptor in (*streams, writer):
            os.close(descriptor)
        late, status, used_s = _wait_for_end(pid, status_socket, request["timeout_s"])
        code = os.waitstatus_to_exitcode(status)
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            if failure := os.read(reader, _REASON_BYTES):
                raise OSError(f"its isolation could not be set up: {failure.decode(errors='replace')}")
        send_message(
            status_socket, {"exit": code, "late": late, "seconds": time.monotonic() - started, "cpu_s": used_s}
        )
    except BaseException as error:
        send_message(status_socket, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _wait_for_end(pid: int, status_socket: socket.socket, timeout_s: float) -> tuple[bool, int, float]:
    """Wait for a process; return whether it reached its time limit, its status, and its processor seconds."""
    end_s = time.monotonic() + timeout_s
    exit_fd = os.pidfd_open(pid) if _LINUX else -1
    watched = [status_socket, *([exit_fd] if _LINUX else [])]
    late = False
    while (left_s := end_s - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left_s if _LINUX else min(_POLL_S, left_s))[0]
        if ready:  # it has ended, or its caller is gone
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
    _end_group(pid)  # before the wait: afterwards its id could be reused
    _, status, used = os.wait4(pid, 0)
    return late, status, used.ru_utime + used.ru_stime


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_ = array  # loaded early: socket.recv_fds imports it at its first call
if __name__ == "__main__":
    main()
