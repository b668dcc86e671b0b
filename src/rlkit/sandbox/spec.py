"""Specification of a sandbox.

Invariant: every limit is enforced, by a control group if possible and otherwise by the kernel's limits on a process;
`Sandbox.limit_descriptions` reports which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rlkit.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a sandbox."""

    memory_bytes: int = 4096 * MIB  # memory of all its processes; without a control group, data of each one
    processes: int = 1024  # maximum number of processes and threads; not limited as root without a control group
    cpus: float | None = None  # processor seconds per second, with a control group; None for all processors
    cpu_s: int = 3600  # processor seconds of a single process
    file_bytes: int = 8192 * MIB  # size of a single file
    open_files: int = 65_536  # open files of a single process


@dataclass(frozen=True, kw_only=True)
class Layers:
    """An overlay of a sandbox's file system: read-only folders, the top first, and their mount point."""

    target: str
    lower: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A file or folder of the host mounted in the sandbox."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A sandbox to start."""

    trees: tuple[Layers, ...]  # overlays of its file system; the first is mounted at `/`
    hostname: str = "sandbox"
    network: bool = False  # share the host's network; otherwise only a private loopback
    binds: tuple[Bind, ...] = ()
    # Folders to make unless they exist, as modes by path.
    folders: Mapping[str, int] = field(default_factory=dict[str, int])
    limits: Limits = field(default_factory=Limits)
    uses: tuple[str, ...] = ()  # names of cached layers to keep while the sandbox lives


def shared_paths(paths: Sequence[str], *, private: Sequence[str]) -> tuple[str, ...]:
    """Return the absolute folders that a view shows, outermost only; UsageError for an invalid or private one."""
    folders: list[PurePosixPath] = []
    for path in paths:
        folder = PurePosixPath("/" + path.lstrip("/"))
        if not path.startswith("/") or ".." in folder.parts:
            raise UsageError(f"a path in a sandbox must be absolute and without '..', not {path!r}")
        for place in private:
            if folder.is_relative_to(place) or PurePosixPath(place).is_relative_to(folder):
                raise UsageError(f"{path} cannot be shared with a view: {place} is private to the view")
        folders.append(folder)
    return tuple(
        str(folder)
        for folder in dict.fromkeys(folders)
        if not any(folder != other and folder.is_relative_to(other) for other in folders)
    )
