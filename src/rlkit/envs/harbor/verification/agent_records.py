"""The records that an agent writes on rlkit's side of its environment, such as a trajectory, which tests may read.

Invariant: what a verifier reads of them is what the agent's own program wrote. Harbor copies the folder of logs out of
the environment over them, and what the agent left running there can write to that folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path
from weakref import WeakKeyDictionary

from harbor.environments.base import BaseEnvironment

from rlkit._util.files import write_bytes

type _Stamp = tuple[int, int, int]

_records = WeakKeyDictionary[BaseEnvironment, "AgentRecords"]()


class AgentRecords:
    """Copies of the files that were written to a folder of logs while an agent ran; its subfolders do not count.

    The agent cannot reach the folder `copies`, which is made when it is needed.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._before = dict[str, _Stamp]()

    def begin(self) -> None:
        """Take note of what is there before the agent runs."""
        self._before = self._stamps()

    def save(self) -> None:
        """Copy what was written since then."""
        for name, stamp in self._stamps().items():
            if self._before.get(name) != stamp:
                self._copies.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._folder / name, self._copies / name, follow_symlinks=False)

    def restore(self) -> None:
        """Put the copies back in the place of what is there now, and remove them."""
        if not self._copies.is_dir():
            return
        for copy in self._copies.iterdir():
            target = self._folder / copy.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            copy.replace(target)  # which replaces a link, and follows none
        self._copies.rmdir()

    def _stamps(self) -> dict[str, _Stamp]:
        stamps = dict[str, _Stamp]()
        if self._folder.is_dir():
            for entry in os.scandir(self._folder):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    stamps[entry.name] = (found.st_ino, found.st_mtime_ns, found.st_size)
        return stamps


def watch_records(environment: BaseEnvironment, folder: Path, copies: Path) -> AgentRecords:
    """Return the records of the agent that plays in an environment, under which `records_of` finds them."""
    return _records.setdefault(environment, AgentRecords(folder, copies))


def records_of(environment: BaseEnvironment) -> AgentRecords | None:
    """Return the records of the agent that plays in an environment; None where nobody watches them."""
    return _records.get(environment)


def write_record(path: Path, data: bytes, log: logging.Logger) -> None:
    """Write a record in a folder that the agent may write to as well, through no link in its place.

    A record that cannot be written is logged: how the agent ended matters more.
    """
    try:
        write_bytes(path, data)
    except OSError as error:
        log.warning("%s was not written: %s", path, error)
