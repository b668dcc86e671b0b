"""Control groups: limits on a sandbox as a whole.

Invariant: a group is made below or beside this process's own group, so the limits of this process also apply to its
sandboxes. A group that cannot be made is left out, and `Groups` reports which limits are enforced.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlkit.sandbox.spec import Limits

_MOUNTS = Path("/proc/self/mounts")
_OWN_GROUPS = Path("/proc/self/cgroup")
_PERIOD_US = 100_000
_REMOVE_TIMEOUT_S = 2.0
_POLL_S = 0.005


@dataclass(frozen=True)
class Groups:
    """The control groups of one sandbox: their folders, and the controllers whose limits they enforce."""

    folders: tuple[Path, ...] = ()
    enforced: Set[str] = frozenset()


def make(name: str, limits: Limits) -> Groups:
    """Make the control groups that this process is allowed to make."""
    own_groups = _find_own_groups()
    unified = _find_unified_parent(own_groups)
    if unified is not None:
        written = _make_group(unified / name, _files_v2(limits), required=("memory.max", "pids.max"))
        if written:
            return Groups((unified / name,), {file.partition(".")[0] for file in written})
    folders: list[Path] = []
    enforced = set[str]()
    for controller, files in _files_v1(limits).items():
        parent = own_groups.get(controller)
        if parent is not None and files and _make_group(parent / name, files, required=tuple(files)[:1]):
            enforced.add(controller)
            folders.append(parent / name)
    return Groups(tuple(folders), enforced)


def remove(folders: tuple[Path, ...]) -> None:
    """Kill the remaining processes of the groups, and remove the groups."""
    end_s = time.monotonic() + _REMOVE_TIMEOUT_S
    for folder in folders:
        while folder.exists() and time.monotonic() < end_s:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    return
                _kill_processes(folder)
                time.sleep(_POLL_S)


def _kill_processes(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            if int(pid):  # 0 stands for processes outside this process's namespace
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _make_group(folder: Path, files: dict[str, str], *, required: tuple[str, ...]) -> list[str]:
    try:
        folder.mkdir()
    except OSError:
        return []
    written: list[str] = []
    for name, value in files.items():
        with suppress(OSError):
            (folder / name).write_text(value)
            written.append(name)
    if all(name in written for name in required) and os.access(folder / "cgroup.procs", os.W_OK):
        return written
    with suppress(OSError):
        folder.rmdir()
    return []


def _files_v1(limits: Limits) -> dict[str, dict[str, str]]:
    memory = str(limits.memory_bytes)
    quota = {"cpu.cfs_quota_us": str(int(limits.cpus * _PERIOD_US))} if limits.cpus else {}
    return {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "pids": {"pids.max": str(limits.processes)},
        "cpu": quota,
    }


def _files_v2(limits: Limits) -> dict[str, str]:
    files = {"memory.max": str(limits.memory_bytes), "memory.swap.max": "0", "pids.max": str(limits.processes)}
    return files | ({"cpu.max": f"{int(limits.cpus * _PERIOD_US)} {_PERIOD_US}"} if limits.cpus else {})


def _find_own_groups() -> dict[str, Path]:
    """Return this process's groups by controller; the group of version 2 has the key ``."""
    groups: dict[str, Path] = {}
    with suppress(OSError):
        mounts = [line.split()[1:4] for line in _MOUNTS.read_text().splitlines()]
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for mount, kind, options in mounts:
                names = set(controllers.split(","))
                is_mount = kind == "cgroup" and names <= set(options.split(",")) if controllers else kind == "cgroup2"
                if is_mount and (folder := Path(mount) / path.lstrip("/")).is_dir():
                    groups |= dict.fromkeys(names, folder)
    return groups


def _find_unified_parent(own_groups: dict[str, Path]) -> Path | None:
    """Return this process's nearest group of version 2, usually an ancestor, whose children have the controllers."""
    folder = own_groups.get("")
    while folder is not None and (control := folder / "cgroup.subtree_control").is_file():
        with suppress(OSError):
            if {"memory", "pids"} <= set(control.read_text().split()):
                return folder
        folder = folder.parent
    return None
