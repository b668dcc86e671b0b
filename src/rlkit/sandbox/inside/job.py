"""Jobs in a sandbox: commands and file transfers, each in a forked process.

Invariant: before untrusted code runs, a job has only the capabilities of the sandbox, cannot gain any, and holds only
the three standard descriptors.
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
from typing import BinaryIO, NoReturn, NotRequired, TypedDict

from . import kernel, sandbox_filter

CANNOT_START = 126

_filter: bytes | None = None
_is_rootless = False


class View(TypedDict):
    """A view of a sandbox to open.

    private: empty folders that exist only in the view. shared: folders of the sandbox that the view exposes; all
    else is the original image. None exposes the whole sandbox.
    """

    private: list[str]
    shared: list[str] | None


class Request(TypedDict):
    """A request for a job.

    command: programs to try in turn. put, get: path to extract a tar stream to, or to archive from. single: transfer
    one file. limits: values by constant of `resource`, such as RLIMIT_CPU. view: a view to open.
    close_view: end the open view and its processes. listen: TCP port of the sandbox's loopback to listen on.
    kill_all: kill all processes of the sandbox except its first.
    """

    command: list[list[str]]
    put: NotRequired[str]
    single: bool
    get: NotRequired[str]
    user: str | None
    cwd: str | None
    env: dict[str, str]
    limits: dict[str, int]
    view: NotRequired[View]
    close_view: NotRequired[bool]
    listen: NotRequired[int]
    kill_all: NotRequired[bool]


def prepare(is_rootless: bool) -> bool:
    """Load the seccomp filter before the host's files are unmounted; return True if this processor type has one."""
    global _filter, _is_rootless
    _filter, _is_rootless = sandbox_filter.program(), is_rootless
    return _filter is not None


def run_request(request: Request, status: socket.socket, streams: list[int], enter: Callable[[], None]) -> NoReturn:
    """Run a request in this forked process and exit; `enter` joins its namespaces and control groups."""
    try:
        enter()
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for name, value in request["limits"].items():
            lower_limit(getattr(resource, name), value)
        # Copies are made as root: the tables of users are files of the sandbox, and may be invalid.
        if "put" in request:
            _drop_privileges()
            _unpack(request["put"], single=request["single"])
        elif "get" in request:
            _drop_privileges()
            pack(request["get"], sys.stdout.buffer, single=request["single"])
            sys.stdout.buffer.flush()
        else:
            home = _become_user(request["user"])
            os.chdir(request["cwd"] or "/")
            _drop_privileges()
            _execute(request["command"], {"HOME": home, **request["env"]})
        os._exit(0)
    except BaseException as error:
        is_missing = "get" in request and isinstance(error, FileNotFoundError | NotADirectoryError)
        status.send(json.dumps({"failed": kernel.describe(error)[:4000], "missing": is_missing}).encode())
    os._exit(CANNOT_START)


def lower_limit(number: int, value: int) -> None:
    """Set both values of a limit of `resource`, or keep the hard one if it is lower."""
    hard = resource.getrlimit(number)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (limit, limit))


def _drop_privileges() -> None:
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
    """Take on the ids of a user and group, and return the home folder."""
    name, _, group = (user or "0").partition(":")
    account = next((fields for fields in _read_table("/etc/passwd", 7) if name in (fields[0], fields[2])), None)
    if account is None and name == "root":
        name = "0"  # a root file system may have no /etc/passwd
    if account is None and not name.isdigit():
        raise ValueError(f"there is no user {name!r} in the sandbox")
    uid = int(account[2] if account else name)
    gid = int(account[3]) if account else uid
    if group:
        entry = next((fields for fields in _read_table("/etc/group", 4) if group in (fields[0], fields[2])), None)
        if entry is None and not group.isdigit():
            raise ValueError(f"there is no group {group!r} in the sandbox")
        gid = int(entry[2] if entry else group)
    if _is_rootless and (uid, gid) != (0, 0):
        raise ValueError(
            f"user {user!r} is available only if rlkit runs as root; otherwise the sandbox has only the user root"
        )
    if not _is_rootless:
        gids = {
            int(fields[2]) for fields in _read_table("/etc/group", 4) if account and account[0] in fields[3].split(",")
        }
        os.setgroups([gid] if group else sorted({gid, *gids}))
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    return account[5] if account and account[5] else "/"


def _read_table(path: str, fields: int) -> list[list[str]]:
    try:
        with open(path, errors="replace") as file:
            lines = [line.rstrip("\n").split(":") for line in file]
    except FileNotFoundError:
        return []
    return [line for line in lines if len(line) == fields and line[2].isdigit()]


def _unpack(target: str, *, single: bool) -> None:
    """Extract the tar stream on stdin below `target`; replace existing files, but not folders.

    A single file is written to `target` itself, unless `target` is a folder.
    """
    is_file_target = single and not os.path.isdir(target)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            path = os.path.normpath(target if is_file_target else os.path.join(target, member.name))
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
    """Make a folder and its parents; replace anything on the path that is not a folder, such as a dangling link."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        ancestor = "/"
        for part in path.strip("/").split("/"):
            ancestor = os.path.join(ancestor, part)
            if os.path.lexists(ancestor) and not os.path.isdir(ancestor):
                os.unlink(ancestor)
        os.makedirs(path, exist_ok=True)


def pack(source: str, stream: BinaryIO, *, single: bool) -> None:
    """Write a file, or the contents of a folder, as a tar stream owned by root; skip sockets, pipes and devices."""
    if not os.path.exists(source):
        raise FileNotFoundError(f"{source} does not exist")
    if not single and not os.path.isdir(source):
        raise NotADirectoryError(f"{source} is not a folder")
    if single and os.path.isdir(source):
        raise IsADirectoryError(f"{source} is a folder")
    if single and not os.path.isfile(source):
        raise ValueError(f"{source} is neither a file nor a folder")
    with open_archive(stream) as archive:
        if single:
            add_entry(archive, os.path.realpath(source), os.path.basename(source))
            return
        for folder, folders, files in os.walk(source, onerror=_raise):
            folders.sort()
            for name in sorted([*folders, *files]):
                path = os.path.join(folder, name)
                add_entry(archive, path, os.path.relpath(path, source))


def open_archive(stream: BinaryIO) -> tarfile.TarFile:
    """Return an archive that writes to a stream."""
    return tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT)


def _raise(error: OSError) -> NoReturn:
    raise error


def add_entry(archive: tarfile.TarFile, path: str, name: str, *, mode: int | None = None) -> None:
    """Write a file, a folder without its contents, or a link, owned by root; skip anything else.

    Not by `TarFile.add`, which reads the tables of users: in a sandbox a program may have replaced them by a pipe.
    """
    status = os.lstat(path)
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode) if mode is None else mode
    member.mtime = status.st_mtime
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
        with open(path, "rb") as file:
            archive.addfile(member, file)
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(member)
