from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlkit.errors import MissingError
from rlkit.sandbox import sandbox_folders
from tests.limits import HANG_S


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sandbox"


def owned_by_the_dead(store: Path, name: str, **record: object) -> Path:
    folder = store / "live" / "1-dead" / name
    (folder / "upper").mkdir(parents=True)
    (folder / "belongs.json").write_text(json.dumps(record))
    (folder.parent / "lock").touch()
    return folder


def test_leftovers_of_dead_owners_are_removed_by_the_next_owner(store: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process, subprocess.Popen(["sleep", "60"]) as other:
        owner = sandbox_folders.Process.of(process.pid)
        assert owner is not None
        whole = owned_by_the_dead(
            store, "rlkit-1", processes=[[owner.pid, owner.start_time], [other.pid, "1"]], groups=[]
        )
        torn = owned_by_the_dead(store, "rlkit-2")
        (torn / "belongs.json").write_text('{"proc')
        place = sandbox_folders.SandboxFolder(())
        assert process.wait(HANG_S) == -9
        assert other.poll() is None  # its number was given again: it is not the one that was written down
        other.kill()
    assert not whole.exists()
    assert not torn.parent.exists()
    assert place.path.exists()
    place.remove()


def test_sandboxes_of_live_owners_are_never_touched(store: Path) -> None:
    place = sandbox_folders.SandboxFolder(("layer",))
    code = "from rlkit.sandbox.sandbox_folders import *; SandboxFolder(()).remove(); print(list_layers_in_use())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=True, capture_output=True, text=True)
    assert done.stdout == "{'layer'}\n"
    assert sandbox_folders.sweep() == 0
    assert place.path.exists()
    place.remove()
    assert [path.name for path in place.path.parent.iterdir()] == ["lock"]


def test_a_forked_process_does_not_own_its_parents_sandboxes(store: Path) -> None:
    place = sandbox_folders.SandboxFolder(())
    child = os.fork()
    if child == 0:
        os._exit(0 if sandbox_folders.SandboxFolder(()).path.parent != place.path.parent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sandbox_folders.sweep() == 1  # the child's, which ended without a word
    place.remove()


def test_concurrent_threads_are_one_owner(store: Path) -> None:
    sandbox_folders._claim_owner_folder.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        places = list(threads.map(lambda _: sandbox_folders.SandboxFolder(()), range(8)))
    assert len({place.path.parent for place in places}) == 1
    for place in places:
        place.remove()


def test_the_error_on_an_unwritable_store_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(MissingError, match="set RLKIT_CACHE_DIR"):
        sandbox_folders.SandboxFolder(())
