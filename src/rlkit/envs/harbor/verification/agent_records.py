"""Records that an agent's program writes on rlkit's side, such as a trajectory, which tests can read.

Invariant: a verifier reads exactly the records of the agent's program. They must be restored, because Harbor overwrites
them with the environment's folder of logs, to which processes left by the agent can write.
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

records_by_environment = WeakKeyDictionary[BaseEnvironment, "AgentRecords"]()
"""Records of the agent of each environment."""


class AgentRecords:
    """Copies of the files written to a folder of logs while an agent ran, without subfolders.

    The agent cannot access the folder `copies`, which is created on demand.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._before = dict[str, _Stamp]()

    def begin(self) -> None:
        """Record the files that exist before the agent runs."""
        self._before = self._stamps()

    def save(self) -> None:
        """Copy the files that were written since `begin`."""
        for name, stamp in self._stamps().items():
            if self._before.get(name) != stamp:
                self._copies.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._folder / name, self._copies / name, follow_symlinks=False)

    def restore(self) -> None:
        """Replace the folder's files by the copies, and remove the copies."""
        if not self._copies.is_dir():
            return
        for copy in self._copies.iterdir():
            target = self._folder / copy.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            copy.replace(target)  # replaces a link instead of following it
        self._copies.rmdir()

    def _stamps(self) -> dict[str, _Stamp]:
        stamps = dict[str, _Stamp]()
        if self._folder.is_dir():
            for entry in os.scandir(self._folder):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    stamps[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)
        return stamps


def write_record(path: Path, data: bytes, log: logging.Logger) -> None:
    """Write a record in a folder to which the agent can also write, without following a link at `path`.

    A failure is only logged, so that it does not hide the end of the agent.
    """
    try:
        write_bytes(path, data)
    except OSError as error:
        log.warning("%s was not written: %s", path, error)
