from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.store.lock import acquire_lock, find_lock_holder
from tests.limits import HANG_S, wait_until

FORKS_AND_DIES = """
import os, sys, time
from pathlib import Path
from rlkit.store.lock import acquire_lock, find_lock_holder
run = Path(sys.argv[1])
held = acquire_lock(run)
if (child := os.fork()) == 0:
    time.sleep(600)
(run / "child").write_text(str(child))
try:
    acquire_lock(run)
except Exception as error:
    (run / "told").write_text(f"{os.getpid()} {error}")
os.kill(os.getpid(), 9)
"""


def test_the_holder_is_named(tmp_path: Path) -> None:
    with (
        acquire_lock(tmp_path),
        pytest.raises(UsageError, match=f"another process is writing to .*: process {os.getpid()}$"),
    ):
        acquire_lock(tmp_path)
    acquire_lock(tmp_path).close()


def test_only_the_current_holder_is_named(tmp_path: Path) -> None:
    imports = "import sys; from pathlib import Path; from rlkit.store.lock import acquire_lock"
    earlier = subprocess.Popen([sys.executable, "-c", f"{imports}; acquire_lock(Path(sys.argv[1]))", str(tmp_path)])
    assert earlier.wait(100) == 0
    assert (tmp_path / "lock").read_text() == f"{earlier.pid}\n"
    with acquire_lock(tmp_path), pytest.raises(UsageError) as refused:
        acquire_lock(tmp_path)
    assert str(refused.value) == f"another process is writing to {tmp_path}: process {os.getpid()}"


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file, but a run needs a folder: choose another name"):
        acquire_lock(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot write to .*; set RLKIT_RUNS_DIR to a writable folder"):
        acquire_lock(tmp_path / "file" / "run")


def test_holder_can_be_found_without_taking_the_lock(tmp_path: Path) -> None:
    assert find_lock_holder(tmp_path / "none") is None
    with acquire_lock(tmp_path):
        assert find_lock_holder(tmp_path) == str(os.getpid())
        (tmp_path / "lock").write_text("")
        assert find_lock_holder(tmp_path) == "of unknown number"
    assert find_lock_holder(tmp_path) is None
    acquire_lock(tmp_path).close()  # asking took nothing


def test_closed_lock_is_free_while_a_process_has_a_copy_of_its_file(tmp_path: Path) -> None:
    lock = acquire_lock(tmp_path)
    copy = os.dup(lock.fileno())
    try:
        lock.close()
        acquire_lock(tmp_path).close()
    finally:
        os.close(copy)


def test_process_forked_by_an_environment_does_not_hold_the_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS_AND_DIES, str(tmp_path)], check=False, timeout=HANG_S)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)  # it lives
        wait_until(lambda: find_lock_holder(tmp_path) is None)  # it closes its copy as soon as it runs
        acquire_lock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
    process, _, message = (tmp_path / "told").read_text().partition(" ")
    assert message.endswith(f": process {process}")  # the fork did not let go of its parent's lock
