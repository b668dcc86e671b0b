"""Control groups: limits on a sandbox as a whole.

Invariant: a group is made below or beside this process's own, so that what limits this process limits its sandboxes;
what cannot be made is left out, and said.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlkit.sandbox.spec import Limits

_MOUNTS = Path("/proc/self/mounts")
_OWN = Path("/proc/self/cgroup")
_PERIOD_US = 100_000
_GONE_S = 2.0
_POLL_S = 0.005


@dataclass(frozen=True)
class Groups:
    """The groups of one sandbox: their folders, and which limits hold by them."""

    folders: tuple[Path, ...] = ()
    memory: bool = False
    processes: bool = False
    cpus: bool = False


def make(name: str, limits: Limits) -> Groups:
    """Make what can be made."""
    own = _own()
    unified = _unified(own)
    if unified is not None:
        made = _made(unified / name, _files_v2(limits), needed=("memory.max", "pids.max"))
        if made:
            return Groups((unified / name,), memory=True, processes=True, cpus="cpu.max" in made)
    folders: list[Path] = []
    held: dict[str, bool] = {}
    for controller, files in _files_v1(limits).items():
        parent = own.get(controller)
        if parent is not None and files and parent / name not in folders:
            held[controller] = bool(_made(parent / name, files, needed=tuple(files)[:1]))
            folders += [parent / name] * held[controller]
    of = {name: held.get(name, False) for name in ("memory", "pids", "cpu")}
    return Groups(tuple(folders), memory=of["memory"], processes=of["pids"], cpus=of["cpu"])


def remove(folders: tuple[Path, ...]) -> None:
    """End what is left in the groups, and remove them."""
    end_s = time.monotonic() + _GONE_S
    for folder in folders:
        while folder.exists() and time.monotonic() < end_s:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    return
                _end(folder)
                time.sleep(_POLL_S)


def _end(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            if int(pid):  # 0 is a process that is out of this one's sight
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _made(folder: Path, files: dict[str, str], *, needed: tuple[str, ...]) -> list[str]:
    try:
        folder.mkdir()
    except OSError:
        return []
    made: list[str] = []
    for name, value in files.items():
        with suppress(OSError):
            (folder / name).write_text(value)
            made.append(name)
    if all(name in made for name in needed) and os.access(folder / "cgroup.procs", os.W_OK):
        return made
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


def _own() -> dict[str, Path]:
    """Return this process's own group under each controller; under `` that of version 2."""
    found: dict[str, Path] = {}
    with suppress(OSError):
        places = [line.split()[1:4] for line in _MOUNTS.read_text().splitlines()]
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for place, kind, options in places:
                names = set(controllers.split(","))
                fits = kind == "cgroup" and names <= set(options.split(",")) if controllers else kind == "cgroup2"
                if fits and (folder := Path(place) / path.lstrip("/")).is_dir():
                    found |= dict.fromkeys(names, folder)
    return found


def _unified(own: dict[str, Path]) -> Path | None:
    """Return the nearest group of version 2 whose children have the controllers; this process's own seldom does."""
    folder = own.get("")
    while folder is not None and (control := folder / "cgroup.subtree_control").is_file():
        with suppress(OSError):
            if {"memory", "pids"} <= set(control.read_text().split()):
                return folder
        folder = folder.parent
    return None
