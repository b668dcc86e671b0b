"""Paths of rlkit's data: runs and engine state in the user's home, models in the user's cache.

Never a temporary directory: many machines clear those on reboot, and a run is worth more than that.

Invariant: paths are absolute, and a relative one means the same for as long as the process runs, whatever an
environment does to the working directory.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

ARTEFACTS = "artefacts"
"""Subfolder of a run, with a folder for each environment that writes files of its own."""


def runs_dir() -> Path:
    """Return the folder of all runs: `$RLKIT_RUNS_DIR`, by default `~/rlkit-runs`."""
    return _from_env("RLKIT_RUNS_DIR") or Path.home() / "rlkit-runs"


def engine_dir() -> Path:
    """Return the engine's folder of checkpoints: `$RLKIT_ENGINE_DIR`, by default `.engine` in the folder of runs."""
    return _from_env("RLKIT_ENGINE_DIR") or runs_dir() / ".engine"


def cache_dir() -> Path:
    """Return the folder of fetched and converted models: `$RLKIT_CACHE_DIR`, by default `rlkit` in the user's cache."""
    base = _from_env("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _from_env("RLKIT_CACHE_DIR") or base / "rlkit"


def _from_env(name: str) -> Path | None:
    value = os.environ.get(name)
    return _absolute(Path(value).expanduser()) if value else None


@cache
def _absolute(path: Path) -> Path:
    return path.absolute()
