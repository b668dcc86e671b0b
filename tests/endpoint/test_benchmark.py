"""The benchmark of the endpoint runs; its figures are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "endpoint.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads the CPU clocks of processes, which Linux has")
def test_the_benchmark_runs_without_peers() -> None:
    done = subprocess.run([sys.executable, BENCHMARK, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for measurement in ("plain request", "streamed request", "streams at once, all complete", "first byte"):
        assert measurement in done.stdout
