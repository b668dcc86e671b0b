"""The run directory: everything that is known about a run, in files that other tools can read.

Invariant: what was finished is on disk before the run goes on; a reader never sees half a file, only at worst a torn
last line of a `.jsonl` file, which it can tell.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self, TextIO

from rlkit import atomic
from rlkit.config import Resolved, show_lines
from rlkit.errors import UsageError
from rlkit.trackers import Checkpoint
from rlkit.types import Json

FORMAT_VERSION = 1
"""Of the run directory; a reader refuses one that is newer than it knows."""

RECORDED_PACKAGES = ("rlkit", "tinker", "tinker-cookbook", "torch", "transformers", "numpy")


class RunStore:
    """The directory of one run, held by one process at a time.

    Args:
        directory: of the run; it is made. A run that ended before it did anything is replaced; any other is not.
        resolved: the configuration, written redacted with the origin of each value.

    Raises:
        UsageError: the directory holds a run, or another process writes to it.
    """

    def __init__(self, directory: Path, *, resolved: Resolved) -> None:
        self.directory = directory
        self._lock = _locked(directory)
        if (directory / "metrics.jsonl").exists() or (directory / "checkpoints.jsonl").exists():
            self._lock.close()
            raise UsageError(f"{directory} already holds a run: choose another name (--name)")
        self._about: dict[str, Json] = {
            "format": FORMAT_VERSION,
            "name": directory.name,
            "seed": resolved.config.seed,
            "started": time.time(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in RECORDED_PACKAGES}},
        }
        atomic.write_text(directory / "config.yaml", "\n".join(show_lines(resolved)) + "\n")
        self.set_status("running")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def set_status(self, status: Literal["running", "completed", "interrupted", "failed"], *, error: str = "") -> None:
        """Say how the run stands, for people and for other programs."""
        changed: dict[str, Json] = {"status": status, "updated": time.time()}
        if error:
            changed["error"] = error
        self._about.update(changed)
        atomic.write_text(self.directory / "run.json", json.dumps(self._about, indent=2) + "\n")

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl: `{"step": 3, "env/arithmetic/reward/mean": 0.5, …}`; null where not finite."""
        written = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, **written})

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """One line of checkpoints.jsonl."""
        self._append("checkpoints.jsonl", asdict(checkpoint))

    def _append(self, name: str, record: Mapping[str, Json]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _locked(directory: Path) -> TextIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise UsageError(
            f"cannot write to {directory}: {error.strerror}; set RLKIT_RUNS_DIR to a folder that can"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UsageError(f"another process is writing to {directory}") from None
    return lock
