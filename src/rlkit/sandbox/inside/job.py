"""Jobs that the first process forks: a command, or a transfer of files.

Invariant: before any foreign code runs, a job has no capability beyond those of the sandbox, cannot gain any, and holds
only the three standard descriptors.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import sys
import tarfile
from collections.abc import Callable
from typing import NoReturn, TypedDict

from . import kernel, sandbox_filter

CANNOT_START = 126

_filter: bytes | None = None
_as_user = False


class View(TypedDict):
    """A view of a sandbox to open: folders that are its own and empty, and those of the sandbox that it shows.

    `shared` is None for all of the sandbox; else the view shows the image as it was, with these folders.
    """

    private: list[str]
    shared: list[str] | None


class Request(TypedDict):
    """A request: `command` holds programs to try in turn, `put` and `get` a path, `view` a view to open.

    `close_view` ends the open view, with all its processes.
    """

    command: list[list[str]]
    put: str | None
    single: bool
    get: str | None
    user: str | None
    cwd: str | None
    env: dict[str, str]
    limits: dict[str, int]
    view: View | None
    close_view: bool


def prepare(as_user: bool) -> bool:
    """Prepare jobs while the host's files are in reach, and return whether there is a filter of system calls."""
    global _filter, _as_user
    _filter, _as_user = sandbox_filter.program(), as_user
    return _filter is not None


def become(request: Request, status: socket.socket, streams: list[int], enter: Callable[[], None]) -> NoReturn:
    """Turn this forked process into what was asked for, after it has gone where that runs."""
    try:
        enter()
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        _limit(request["limits"])
        home = _become_user(request["user"])
        if request["put"] is not None:
            _restrict()
            _unpack(request["put"], single=request["single"])
        elif request["get"] is not None:
            _restrict()
            _pack(request["get"], single=request["single"])
            sys.stdout.buffer.flush()
        else:
            os.chdir(request["cwd"] or "/")
            _restrict()
            _execute(request["command"], {"HOME": home, **request["env"]})
        os._exit(0)
    except BaseException as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
        status.send(json.dumps({"failed": (text + name)[:4000]}).encode())
    os._exit(CANNOT_START)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def _restrict() -> None:
    kernel.keep_capabilities(kernel.ROOT_CAPABILITIES if os.geteuid() == 0 else frozenset())
    kernel.control(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if _filter is not None:
        kernel.install_filter(_filter)


def _execute(programs: list[list[str]], env: dict[str, str]) -> NoReturn:
    missing: OSError | None = None
    for arguments in programs:
        try:
            os.execvpe(arguments[0], arguments, env)
        except FileNotFoundError as error:
            missing = error
            missing.filename = arguments[0]
    raise missing or FileNotFoundError("no command")


def _become_user(user: str | None) -> str:
    """Take on the user's ids; the home folder."""
    name, _, group = (user or "0").partition(":")
    account = next((fields for fields in _table("/etc/passwd", 7) if name in (fields[0], fields[2])), None)
    if account is None and name == "root":
        name = "0"  # a root file system may have no table of users
    if account is None and not name.isdigit():
        raise ValueError(f"there is no user {name!r} in the sandbox")
    uid = int(account[2] if account else name)
    gid = int(account[3]) if account else uid
    if group:
        entry = next((fields for fields in _table("/etc/group", 4) if group in (fields[0], fields[2])), None)
        if entry is None and not group.isdigit():
            raise ValueError(f"there is no group {group!r} in the sandbox")
        gid = int(entry[2] if entry else group)
    if _as_user and (uid, gid) != (0, 0):
        raise ValueError(f"user {user!r} needs rlkit to run as root: here the sandbox's root is the only user")
    if not _as_user:
        member = {
            int(fields[2]) for fields in _table("/etc/group", 4) if account and account[0] in fields[3].split(",")
        }
        os.setgroups([gid] if group else sorted({gid, *member}))
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    return account[5] if account and account[5] else "/"


def _table(path: str, fields: int) -> list[list[str]]:
    try:
        with open(path, errors="replace") as file:
            lines = [line.rstrip("\n").split(":") for line in file]
    except FileNotFoundError:
        return []
    return [line for line in lines if len(line) == fields and line[2].isdigit()]


def _unpack(target: str, *, single: bool) -> None:
    """Write what comes as a tar stream below `target`, in the place of what is there and no folder.

    A single file is written to `target` itself, unless that is a folder.
    """
    whole = single and not os.path.isdir(target)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            path = os.path.normpath(target if whole else os.path.join(target, member.name))
            _make_folder(os.path.dirname(path))
            if member.isdir():
                if not os.path.isdir(path):
                    os.mkdir(path)
                    os.chmod(path, member.mode)
                continue
            if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                os.unlink(path)
            member.name = os.path.basename(path)
            archive.extract(member, os.path.dirname(path), numeric_owner=True, filter="fully_trusted")
    while sys.stdin.buffer.read(1 << 16):  # the end of the archive is padded
        continue


def _make_folder(path: str) -> None:
    """Make a folder and those that it is in; what lies there and is none, such as a link to nowhere, makes way."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        here = "/"
        for part in path.strip("/").split("/"):
            here = os.path.join(here, part)
            if os.path.lexists(here) and not os.path.isdir(here):
                os.unlink(here)
        os.makedirs(path, exist_ok=True)


def _pack(source: str, *, single: bool) -> None:
    """Write a file, or all that is in a folder, as a tar stream; what is neither file, folder nor link is left out."""
    if not os.path.exists(source):
        raise FileNotFoundError(f"there is no {source}")
    if os.path.isdir(source) == single:
        raise ValueError(f"{source} is {'a' if single else 'no'} folder")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        if single:
            _add(archive, source, "")
            return
        for folder, folders, files in os.walk(source, onerror=_raise):
            inside = os.path.relpath(folder, source)
            for name in (*folders, *files):
                _add(archive, os.path.join(folder, name), os.path.normpath(os.path.join(inside, name)))


def _raise(error: OSError) -> NoReturn:
    raise error


def _add(archive: tarfile.TarFile, path: str, name: str) -> None:
    about = os.lstat(path) if name else os.stat(path)
    if stat.S_ISREG(about.st_mode):
        with open(path, "rb") as file:
            about, member = os.fstat(file.fileno()), tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = about.st_size, stat.S_IMODE(about.st_mode), int(about.st_mtime)
            archive.addfile(member, file)
    elif stat.S_ISDIR(about.st_mode) or stat.S_ISLNK(about.st_mode):
        archive.addfile(archive.gettarinfo(path, name))
    elif not name:
        raise ValueError(f"{path} is neither a file nor a folder")
