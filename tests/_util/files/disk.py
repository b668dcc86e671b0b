"""A disk that loses what was not flushed, and one that is nearly full."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """Record by inode what was flushed: the size of a file, and the names in a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._root = root
        self._fsync = os.fsync
        self._sizes: dict[int, int] = {}
        self._names: dict[int, set[tuple[str, int]]] = {}
        monkeypatch.setattr(os, "fsync", self._flush)

    def assert_holds(self, path: Path) -> None:
        """Check that the content of a file would survive a power cut."""
        assert self._sizes.get(path.stat().st_ino) == path.stat().st_size, path
        while path != self._root:
            flushed_names = self._names.get(path.parent.stat().st_ino, set())
            assert (path.name, path.stat().st_ino) in flushed_names, f"the name of {path}"
            path = path.parent

    def _flush(self, file: int) -> None:
        about = os.fstat(file)
        self._sizes[about.st_ino] = about.st_size
        for folder in [self._root, *self._root.rglob("*")]:
            if folder.is_dir() and folder.stat().st_ino == about.st_ino:
                self._names[about.st_ino] = {(path.name, path.stat().st_ino) for path in folder.iterdir()}
        self._fsync(file)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system writes what fits and refuses the rest, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
