"""A lock file has one holder, which can be found, and which no forked child replaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit._util.files.lock import LockFile, find_holder, make_once
from tests.limits import HANG_S, wait_until

FORKS_AND_DIES = """
import os, sys, time
from pathlib import Path
from rlkit._util.files.lock import LockFile
run = Path(sys.argv[1])
held = LockFile(run / "lock")
assert held.acquire() is None
if (child := os.fork()) == 0:
    time.sleep(600)
(run / "child").write_text(str(child))
with LockFile(run / "lock") as other:
    (run / "told").write_text(f"{os.getpid()} {other.acquire()}")
os.kill(os.getpid(), 9)
"""


def acquire(path: Path) -> str | None:
    """Lock a file and unlock it at once; the holder that prevents it."""
    with LockFile(path) as lock:
        return lock.acquire()


def test_the_holder_is_named_and_keeps_the_lock(tmp_path: Path) -> None:
    with LockFile(tmp_path / "lock") as lock:
        assert lock.acquire() is None
        for _ in range(2):
            assert acquire(tmp_path / "lock") == str(os.getpid())
    assert acquire(tmp_path / "lock") is None


def test_only_the_current_holder_is_named(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rlkit._util.files.lock import LockFile; "
        "LockFile(Path(sys.argv[1])).acquire()"
    )
    earlier = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "lock")])
    assert earlier.wait(100) == 0
    assert (tmp_path / "lock").read_text() == f"{earlier.pid}\n"
    with LockFile(tmp_path / "lock") as lock:
        assert lock.acquire() is None
        assert acquire(tmp_path / "lock") == str(os.getpid())


def test_holder_can_be_found_without_taking_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert find_holder(path) is None
    with LockFile(path) as lock:
        assert lock.acquire() is None
        assert find_holder(path) == str(os.getpid())
        path.write_text("")
        assert find_holder(path) == "of unknown number"
        assert acquire(path) == "of unknown number"
    assert find_holder(path) is None
    assert acquire(path) is None  # asking took nothing


def test_closed_lock_is_free_while_a_process_has_a_copy_of_its_file(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "lock")
    assert lock.acquire() is None
    copy = os.dup(lock.fileno())
    try:
        lock.close()
        assert acquire(tmp_path / "lock") is None
    finally:
        os.close(copy)


def test_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS_AND_DIES, str(tmp_path)], check=False, timeout=HANG_S)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)  # it lives
        wait_until(lambda: find_holder(tmp_path / "lock") is None)  # it closes its copy as soon as it runs
        assert acquire(tmp_path / "lock") is None
    finally:
        os.kill(child, signal.SIGKILL)
    process, _, holder = (tmp_path / "told").read_text().partition(" ")
    assert holder == process  # the fork did not let go of its parent's lock


@pytest.mark.parametrize("leftover", ["file", "folder"])
def test_a_folder_is_made_once_and_appears_complete(tmp_path: Path, leftover: str) -> None:
    path, calls = tmp_path / "new" / "made", list[Path]()
    path.parent.mkdir()
    unfinished = path.with_suffix(".unfinished")  # left by a killed process
    if leftover == "file":
        unfinished.touch()
    else:
        (unfinished / "part").mkdir(parents=True)
    path.mkdir()  # an empty folder is not complete

    def make(place: Path) -> None:
        calls.append(place)
        place.mkdir()
        (place / "part").touch()
        if len(calls) == 1:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        make_once(path, make)
    assert [entry.name for entry in path.parent.iterdir() if entry.suffix != ".lock"] == ["made"]
    for _ in range(2):
        assert make_once(path, make) == path
    assert calls == [unfinished, unfinished]
    assert [entry.name for entry in path.iterdir()] == ["part"]
