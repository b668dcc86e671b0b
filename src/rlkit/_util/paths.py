"""Paths of rlkit's data: runs and engine state in the user's home, models in the user's cache.

Temporary directories are not used, because many machines clear them on reboot.

Invariant: returned paths are absolute, and stay the same if an environment changes the working directory.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

ARTEFACTS = "artefacts"
"""Subfolder of a run for files written by environments, with a folder per environment."""


def runs_dir() -> Path:
    """Return the folder of all runs: `$RLKIT_RUNS_DIR`, by default `~/rlkit-runs`."""
    return _from_env("RLKIT_RUNS_DIR") or Path.home() / "rlkit-runs"


def engine_dir() -> Path:
    """Return the engine's folder of checkpoints: `$RLKIT_ENGINE_DIR`, by default `.engine` in the folder of runs."""
    return _from_env("RLKIT_ENGINE_DIR") or runs_dir() / ".engine"


def cache_dir() -> Path:
    """Return the folder of cached models: `$RLKIT_CACHE_DIR`, by default `rlkit` in the user's cache."""
    base = _from_env("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _from_env("RLKIT_CACHE_DIR") or base / "rlkit"


def expand_user(path: str | Path) -> Path:
    """Return a path with the home directory in place of `~user`; the path itself if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises RuntimeError for an unknown user


def _from_env(name: str) -> Path | None:
    value = os.environ.get(name)
    return _absolute(expand_user(value)) if value else None


@cache
def _absolute(path: Path) -> Path:
    return path.absolute()


def shorten_path(path: Path) -> str:
    """Return the path, relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
