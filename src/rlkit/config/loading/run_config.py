"""Directories of runs, and the configurations recorded in them."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

from rlkit._util.files import json_lines
from rlkit._util.paths import runs_dir
from rlkit.config.loading.load import load_config
from rlkit.config.schema import Config
from rlkit.errors import UsageError, did_you_mean


def is_run_directory(directory: Path) -> bool:
    """Return whether a directory holds a run."""
    return (directory / "run.json").exists()


def find_run(run: str | Path) -> Path:
    """Return the directory of a run, given its name or the directory itself; UsageError if there is none."""
    directories = [runs_dir() / run, Path(run).absolute()]
    for directory in directories:
        if is_run_directory(directory):
            return directory
    for directory in directories:
        if (directory / "journal").is_dir():
            raise UsageError(f"{directory} is a run's folder, but its run.json is missing: put it back from a copy")
    names = [path.name for path in runs_dir().iterdir() if is_run_directory(path)] if runs_dir().is_dir() else []
    near = did_you_mean(str(run), names) or " `rlkit runs` lists the runs"
    raise UsageError(f"there is no run {str(run)!r} in {runs_dir()}, and no run's folder of this name.{near}")


def load_run_config(directory: Path) -> Config:
    """Return a run's recorded configuration, even if the file is cut off; UsageError if it cannot be read."""
    return load_config([directory / "config.yaml"]).config


def find_run_config(directory: Path) -> Path:
    """Return the path of a run's recorded configuration; UsageError if the file is missing or cut off."""
    path = directory / "config.yaml"
    remedy = "resume with the file that the run was started with: rlkit train FILE --name NAME --resume"
    if not path.is_file():
        raise UsageError(f"{path} is missing; {remedy}")
    end = json_lines.read_object(directory / "run.json").get("config_end")
    if isinstance(end, str) and end not in path.read_text(errors="replace").splitlines():
        raise UsageError(f"{path} is damaged: its last line, {end!r}, is missing; {remedy}")
    return path


def choose_run_directory(config: Config, runs: Path) -> Path:
    """Return the named run's folder below `runs`, or a new folder named after the environments and the time."""
    if config.name is not None:
        return runs / config.name
    stem = f"{'+'.join(config.envs)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(runs / name for name in names if not (runs / name).exists())


def require_run_directory(config: Config) -> Path:
    """Return the folder of the run that a configuration names; raise `UsageError` if it has no `name`."""
    if config.name is None:
        raise UsageError("name: the run to resume is selected by its name (--name)")
    return choose_run_directory(config, runs_dir())
