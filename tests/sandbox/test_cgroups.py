from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlkit.sandbox import cgroups
from rlkit.sandbox.spec import Limits
from tests.limits import HANG_S


def patch_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: str, own_groups: str) -> None:
    (tmp_path / "mounts").write_text(mounts.replace("ROOT", str(tmp_path)))
    (tmp_path / "own").write_text(own_groups)
    monkeypatch.setattr(cgroups, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "_OWN_GROUPS", tmp_path / "own")


def test_version_2_groups_are_made_where_children_have_the_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_mounts(monkeypatch, tmp_path, "cgroup2 ROOT/v2 cgroup2 rw 0 0\n", "0::/slice/service\n")
    (tmp_path / "v2/slice/service").mkdir(parents=True)
    (tmp_path / "v2/slice/cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "v2/slice/service/cgroup.subtree_control").write_text("\n")
    written: dict[str, str] = {}
    monkeypatch.setattr(
        cgroups, "_make_group", lambda folder, files, required: written.update(files, at=str(folder)) or [*files]
    )
    groups = cgroups.make("rlkit-x", Limits(memory_bytes=1000, processes=7, cpus=1.5))
    assert groups == cgroups.Groups((tmp_path / "v2/slice/rlkit-x",), {"memory", "pids", "cpu"})
    assert (written["memory.max"], written["pids.max"], written["cpu.max"]) == ("1000", "7", "150000 100000")
    assert written["at"] == str(tmp_path / "v2/slice/rlkit-x")


def test_without_writable_groups_no_limit_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_mounts(monkeypatch, tmp_path, "cgroup ROOT/memory cgroup rw,memory 0 0\n", "4:memory:/nowhere\n0::/\n")
    assert cgroups.make("rlkit-x", Limits()) == cgroups.Groups()


def test_a_group_without_its_limit_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_mounts(monkeypatch, tmp_path, "cgroup ROOT/pids cgroup rw,pids 0 0\n", "8:pids:/\n")
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(Path, "write_text", lambda self, text: (_ for _ in ()).throw(OSError()))
    assert cgroups.make("rlkit-x", Limits()) == cgroups.Groups()
    assert not (tmp_path / "pids" / "rlkit-x").exists()


def test_a_real_group_is_removed_with_its_children() -> None:
    groups = cgroups.make(f"rlkit-test-{os.getpid()}", Limits(processes=50))
    if not groups.folders:
        pytest.skip("no control group can be made here")
    with subprocess.Popen(["sleep", "60"]) as process:
        for folder in groups.folders:
            (folder / "cgroup.procs").write_text(str(process.pid))
        cgroups.remove(groups.folders[:1])
        assert process.wait(HANG_S) == -9
    cgroups.remove(groups.folders)
    assert not any(folder.exists() for folder in groups.folders)
