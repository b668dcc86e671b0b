"""Virtual environments for verifiers and the packages of an environment, made by uv in rlkit's cache.

Invariant: an installation never changes, except for local folders, which are installed in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from rlkit._util.paths import cache_dir, expand_user
from rlkit._util.redaction import is_secret_name
from rlkit.errors import MissingError, UsageError

VERIFIERS = "verifiers==0.4.0"


@dataclass(frozen=True)
class Installation:
    """A virtual environment, and the variables with secrets that its programs may read."""

    folder: Path
    secrets: tuple[str, ...]

    def make_command(self, *arguments: str) -> list[str]:
        """Return the command that runs the worker."""
        return [str(self.folder / "bin/python"), "-I", str(Path(__file__).with_name("worker.py")), *arguments]

    def make_variables(self) -> dict[str, str]:
        """Return the variables for the worker: no secrets of the run, and uv, with which verifiers runs programs."""
        variables = {
            name: text for name, text in os.environ.items() if name in self.secrets or not is_secret_name(name)
        }
        path = [str(self.folder / "bin"), str(Path(_find_uv()).parent), variables.get("PATH", os.defpath)]
        return {**variables, "PATH": os.pathsep.join(path), "VIRTUAL_ENV": str(self.folder)}

    def list_versions(self) -> Sequence[str]:
        """Return all packages from indexes as `name==version`."""
        command = [_find_uv(), "pip", "freeze", "--python", str(self.folder)]
        return [line for line in run(command, field="packages").splitlines() if "==" in line]


def install(packages: Sequence[str], secrets: Sequence[str]) -> Installation:
    """Return the installation of these packages; make it first if there is none."""
    from filelock import FileLock

    requirements = list[str]()
    for package in packages:
        folder = expand_user(package).resolve()
        if not folder.is_dir() and not re.search(r"==[^*]+$| @ ", package):
            raise UsageError(f"packages: {package!r} is neither a folder nor pinned: write {package}==VERSION")
        requirements += ["--editable", str(folder)] if folder.is_dir() else [package]
    if not any(re.match(r"verifiers\W", requirement) for requirement in requirements):
        requirements.append(VERIFIERS)
    for secret in secrets:
        if secret not in os.environ:
            raise MissingError(f"secrets: {secret} is not set: export it, or write it into .env")
    digest = blake2b(json.dumps([sys.version, requirements]).encode(), digest_size=8).hexdigest()
    folder = cache_dir() / "verifiers" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            run([_find_uv(), "venv", "--clear", "--python", sys.executable, str(folder)], field="packages")
            run([_find_uv(), "pip", "install", "--python", str(folder), *requirements], field="packages")
            (folder / "complete").touch()
    return Installation(folder, tuple(secrets))


def run(command: Sequence[str], *, field: str, variables: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; raise UsageError with the end of its messages if it fails."""
    completed = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise UsageError(f"{field}: {' '.join(completed.stderr[-1000:].split())}")
    return completed.stdout


def _find_uv() -> str:
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise MissingError("uv is not installed, and verifiers needs it: run `pip install uv`")
    return uv
