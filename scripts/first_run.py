"""Install rlkit in this clone, then run one of its commands, with one line of progress.

    python3 scripts/first_run.py train examples/arithmetic.yaml

It needs Python with pip. uv goes to `.uv`, and the packages of uv.lock go to `.venv`; what is there is not installed
again. The command shows the rest of its preparation on the same line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = ROOT / ".uv" / "bin" / "uv"
RLKIT = ROOT / ".venv" / "bin" / "rlkit"

_DOWNLOAD = re.compile(r"Download(?P<state>ing|ed) (?P<name>\S+)(?: \((?P<size>[\d.]+)(?P<unit>[KMG]iB)\))?")
_MIB = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}


def show(text: str) -> None:
    """Replace the line of progress on a terminal."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns  # a longer text would take two lines, of which one is replaced
        sys.stderr.write(f"\r\x1b[2K{text[: columns - 1]}")
        sys.stderr.flush()


def install_uv() -> None:
    """Install uv with pip, unless it is there."""
    if not UV.exists():
        show("installing uv")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--root-user-action", "ignore"]
        subprocess.run([*pip, "--target", str(ROOT / ".uv"), "uv"], check=True)


def install_packages() -> None:
    """Install the packages with uv, and show how much is downloaded; exit with uv's message if it fails."""
    show("installing packages")
    if not sys.stderr.isatty() and not RLKIT.exists():
        print("installing the packages of uv.lock, 6 GB on the disk", file=sys.stderr, flush=True)
    # More packages than those of the lock may stay: the developers' tools.
    command = [UV, "sync", "--frozen", "--no-dev", "--inexact", "--project", ROOT]
    lines, sizes, done = list[str](), dict[str, float](), set[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := _DOWNLOAD.search(line):
                if match["state"] == "ed":
                    done.add(match["name"])
                elif match["size"]:
                    sizes[match["name"]] = float(match["size"]) * _MIB[match["unit"]]
                total, present = sum(sizes.values()), sum(sizes.get(name, 0) for name in done)
                show(f"installing packages: {present:,.0f} of {total:,.0f} MiB")
    show("")
    if process.returncode:
        sys.exit("".join(lines) + f"error: uv could not install the packages; exit code {process.returncode}")
    sys.stderr.writelines(line for line in lines if line.startswith("Installed "))


if __name__ == "__main__":
    try:
        install_uv()
        install_packages()
    except KeyboardInterrupt:
        show("")
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: pip could not install uv; exit code {error.returncode}")
    os.execv(RLKIT, [str(RLKIT), *sys.argv[1:]])
