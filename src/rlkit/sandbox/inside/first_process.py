"""The first process of a sandbox: it builds the file system, starts the requested jobs and reaps them.

Invariant: the process lives as long as its owner holds the other end of its socket, and every process in the sandbox
dies with it. No process in the sandbox can signal or inspect it.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

from . import job, kernel, landlock, root
from .job_server import JobServer, receive, send_message, write
from .view import ViewServer, send_namespace

_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41
_NEVER_KILLED = "-1000"


def main() -> None:
    """Become a sandbox; the arguments are descriptors of two sockets: for jobs, and for jobs in a view."""
    owner, views = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    try:
        plan: root.Plan = json.loads(receive(owner)[0])
        _enter(plan)
        outside, inside = socket.socketpair()
        pid = os.fork()
    except OSError as error:
        send_message(owner, {"error": kernel.describe(error), "errno": error.errno or 0})
        sys.exit(1)
    if pid:
        send_message(owner, {"pid": pid})
        owner.close()
        inside.close()
        job.prepare(plan["user"] is not None)
        ViewServer(views, plan, first=pid, namespaces=outside).serve()
    views.close()
    outside.close()
    try:
        seal_problem = _prepare(plan, inside)
        filtered = job.prepare(plan["user"] is not None)
    except OSError as error:
        send_message(owner, {"error": kernel.describe(error), "errno": error.errno or 0})
        os._exit(1)
    send_message(owner, {"ready": True, "filtered": filtered, "seal_problem": seal_problem})
    JobServer(owner).serve()


def _enter(plan: root.Plan) -> None:
    flags = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    flags |= 0 if plan["network"] else os.CLONE_NEWNET
    user = plan["user"]
    os.unshare(flags | (os.CLONE_NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user[0]} 1"), ("gid_map", f"0 {user[1]} 1")):
            write(f"/proc/self/{name}", text)
    # Unmounts on the host also apply here; mounts made here are not visible on the host.
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_SLAVE)


def _prepare(plan: root.Plan, namespaces: socket.socket) -> str:
    """Build the sandbox around this process; return the reason why views cannot be sealed, or an empty text."""
    kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would let a process in the sandbox end it
    for path in plan["cgroups"]:
        write(path, "0")
    with suppress(OSError):  # needs root; otherwise jobs are only killed before this process
        write("/proc/self/oom_score_adj", _NEVER_KILLED)
    socket.sethostname(plan["hostname"])
    if not plan["network"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
            request = struct.pack("16sH14x", b"lo", _UP_AND_RUNNING)
            fcntl.ioctl(interface, _SIOCSIFFLAGS, request)
    os.unshare(os.CLONE_NEWNS)  # the view's process keeps the host's mounts
    with namespaces:
        send_namespace(namespaces)
    root.build(plan)
    seal_problem = landlock.confine()
    kernel.keep_capabilities(kernel.ROOT_CAPABILITIES | {kernel.CAP_SETPCAP})
    kernel.control(kernel.PR_SET_DUMPABLE, 0)
    return seal_problem


_ = array  # loaded early: socket.recv_fds imports it at its first call, when the host's files are unmounted
