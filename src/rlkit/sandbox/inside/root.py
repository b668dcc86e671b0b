"""Root file system of a sandbox.

Invariant: after `build`, the sandbox can access only the host paths in the plan. Target paths of the plan are resolved
inside the sandbox, so a link there cannot lead out of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

from . import kernel
from .kernel import MS_BIND, MS_MOVE, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/kallsyms", "/proc/kmsg")
_EMPTIED = ("/proc/acpi", "/proc/scsi", "/proc/driver")


class Tree(TypedDict):
    """An overlay: mount point, lower folders (the top first), and folders for writes."""

    target: str
    lower: list[str]
    upper: str
    work: str
    stage: str


class Bind(TypedDict):
    """A file or folder of the host that is mounted in the sandbox."""

    source: str
    target: str
    read_only: bool


class Plan(TypedDict):
    """Plan of a sandbox, from its owner. Relative paths are relative to `store`."""

    store: str
    run_path: str
    hostname: str
    network: bool
    user: list[int] | None
    trees: list[Tree]
    binds: list[Bind]
    cgroups: list[str]
    files: dict[str, str]
    folders: dict[str, int]
    shm_bytes: int


def build(plan: Plan, finish: Callable[[], None] = lambda: None) -> None:
    """Mount the file system and make it the root; `finish` is called while relative paths are still the host's."""
    kernel.mount("none", "/", "", MS_REC | MS_PRIVATE)
    os.chdir(plan["store"])
    for tree in plan["trees"]:
        _mount_overlay(tree, is_rootless=plan["user"] is not None)
    host = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    os.chdir(plan["trees"][0]["stage"])
    kernel.pivot_root(".", ".")
    # Until the old root is unmounted, relative paths from `host` are the host's, and absolute paths the sandbox's.
    for tree in plan["trees"][1:]:
        os.makedirs(tree["target"], exist_ok=True)
        os.fchdir(host)
        os.chdir(plan["store"].lstrip("/"))
        kernel.mount(tree["stage"], tree["target"], "", MS_MOVE)
    os.fchdir(host)
    _make_devices(plan)
    _mount_proc()
    for bind in plan["binds"]:
        _mount_bind(bind)
    _write_files(plan)
    finish()
    kernel.unmount(".")
    os.close(host)
    os.chdir("/")


def _mount_overlay(tree: Tree, *, is_rootless: bool) -> None:
    options = [f"lowerdir={':'.join(tree['lower'])}", f"upperdir={tree['upper']}", f"workdir={tree['work']}"]
    options += ["userxattr"] if is_rootless else []
    kernel.mount("overlay", tree["stage"], "overlay", MS_NOSUID | MS_NODEV, ",".join(options))


def _make_devices(plan: Plan) -> None:
    os.makedirs("/dev", exist_ok=True)
    kernel.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=65536k,nr_inodes=4096")
    for name, number in _DEVICES.items():
        if plan["user"]:  # users cannot make devices; a sandbox without root cannot change the host's
            _touch(f"/dev/{name}")
            kernel.mount(f"dev/{name}", f"/dev/{name}", "", MS_BIND)
        else:
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(*number))
            os.chmod(f"/dev/{name}", 0o666)
    os.mkdir("/dev/pts")
    groups = "" if plan["user"] else ",gid=5"
    kernel.mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=620{groups}")
    os.mkdir("/dev/shm")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={plan['shm_bytes']}")
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")


def _mount_proc() -> None:
    os.makedirs("/proc", exist_ok=True)
    kernel.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path in filter(os.path.exists, _READ_ONLY):
        kernel.mount(path, path, "", MS_BIND | MS_REC)
        kernel.restrict_mount(path, MS_RDONLY)
    for path in filter(os.path.exists, _MASKED):
        kernel.mount("/dev/null", path, "", MS_BIND)
    for path in filter(os.path.isdir, _EMPTIED):
        kernel.mount("tmpfs", path, "tmpfs", MS_RDONLY, "size=0")


def _mount_bind(bind: Bind) -> None:
    source, target = bind["source"].lstrip("/"), bind["target"]
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _touch(target)
    kernel.mount(source, target, "", MS_BIND | MS_REC)
    kernel.restrict_mount(target, MS_NOSUID | MS_NODEV | (MS_RDONLY if bind["read_only"] else 0))


def _write_files(plan: Plan) -> None:
    for path, mode in plan["folders"].items():
        if not os.path.isdir(path):
            os.makedirs(path)
            os.chmod(path, mode)
        elif stat.S_IMODE(os.stat(path).st_mode) | mode != stat.S_IMODE(os.stat(path).st_mode):
            os.chmod(path, mode)
    for path, text in plan["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(path)  # it may be a link, or a file shared by layers
        with open(path, "w") as file:
            file.write(text)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o644))
