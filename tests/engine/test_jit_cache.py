"""Keeping compiled functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from tests.limits import HANG_S

PROGRAM = """
import numpy as np
from rlkit.engine.kernels import cpu_kernels
found = np.empty((1, 1), np.float32)
cpu_kernels.glu(np.array([[0, 3]], np.float32), found, 0, 1, False)
print(float(found[0, 0]))
stats = cpu_kernels.glu.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def run(folder: Path, before: str = "", package: Path | None = None) -> tuple[str, int, int]:
    path = {} if package is None else {"PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", before + PROGRAM],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **path},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    result, counts = done.stdout.splitlines()
    hits, misses = map(int, counts.split())
    return result, hits, misses


def test_compiled_code_is_cached_for_the_next_process(tmp_path: Path) -> None:
    assert run(tmp_path) == ("0.0", 0, 1)
    assert run(tmp_path) == ("0.0", 1, 0)


@pytest.mark.slow
def test_cached_code_is_not_used_after_a_source_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(Path(rlkit.__file__).parent, package / "rlkit", ignore=shutil.ignore_patterns("__pycache__"))
    changed = package / "rlkit/engine/kernels/llvm.py"
    assert run(tmp_path, package=package) == ("0.0", 0, 1)
    changed.write_text(changed.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert run(tmp_path, package=package) == ("0.0", 0, 1)


@pytest.mark.parametrize(
    "before",
    [
        "import numba.core.caching as c; c.CompileResultCacheImpl._locator_classes = []",
        """
import numba.core.caching as c
def full(*_): raise OSError(28, "full")
c.IndexDataCacheFile.save = full""",
    ],
    ids=["no place", "full disk"],
)
@pytest.mark.slow
def test_code_is_compiled_again_if_the_cache_is_unwritable(before: str, tmp_path: Path) -> None:
    assert run(tmp_path, before + "\n")[0] == "0.0"


@pytest.mark.slow
def test_a_truncated_cache_file_is_replaced(tmp_path: Path) -> None:
    run(tmp_path)
    for file in tmp_path.rglob("*.nb*"):
        file.write_bytes(file.read_bytes()[:9])
    assert run(tmp_path)[0] == "0.0"
    assert run(tmp_path) == ("0.0", 1, 0)
