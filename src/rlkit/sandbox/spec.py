"""Specification of a sandbox.

Invariant: a limit always holds, by a control group where one can be made and by the kernel's limits on a process where
not; a sandbox says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rlkit.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a sandbox.

    Args:
        memory_bytes: memory of all its processes; without a control group, data of each one.
        processes: processes and threads at one time; not limited as root without a control group.
        cpus: processor seconds in a second, None for all; needs a control group.
        cpu_s: processor seconds of a single process.
        file_bytes: size of a single file.
        open_files: open files of a single process.
    """

    memory_bytes: int = 4096 * MIB
    processes: int = 1024
    cpus: float | None = None
    cpu_s: int = 3600
    file_bytes: int = 8192 * MIB
    open_files: int = 65_536


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
    """A sandbox to start.

    Args:
        trees: its file system; the first is seen at `/`.
        network: share the host's network; otherwise only a private loopback.
        folders: modes by path of folders to make unless they exist.
        uses: names of cached layers to keep while it lives.
    """

    trees: tuple[Layers, ...]
    hostname: str = "sandbox"
    network: bool = False
    binds: tuple[Bind, ...] = ()
    folders: Mapping[str, int] = field(default_factory=dict[str, int])
    limits: Limits = field(default_factory=Limits)
    uses: tuple[str, ...] = ()


def shared_paths(paths: Sequence[str], *, private: Sequence[str]) -> tuple[str, ...]:
    """Return the absolute folders of a sandbox that a view shows, without those inside another.

    Raises:
        UsageError: a path is not absolute, has a `..`, or holds or lies in a folder of the view's own.
    """
    folders: list[PurePosixPath] = []
    for path in paths:
        folder = PurePosixPath("/" + path.lstrip("/"))
        if not path.startswith("/") or ".." in folder.parts:
            raise UsageError(f"a path in a sandbox must be absolute and without '..', not {path!r}")
        for place in private:
            if folder.is_relative_to(place) or PurePosixPath(place).is_relative_to(folder):
                raise UsageError(f"{path} cannot be shared with a view, which has {place} to itself")
        folders.append(folder)
    return tuple(
        str(folder)
        for folder in dict.fromkeys(folders)
        if not any(folder != other and folder.is_relative_to(other) for other in folders)
    )
