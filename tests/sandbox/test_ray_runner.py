"""Programs on a real Ray cluster of this machine. Skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from rlkit.errors import MissingError
from rlkit.sandbox.inside import landlock, program_filter
from tests.limits import HANG_S

WITH_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (rlkit[ray])")
KEPT_APART = pytest.mark.skipif(
    sys.platform != "linux" or not landlock.version() or program_filter.program() is None,
    reason="programs would not be kept apart",
)

SCRIPT = """
import asyncio, time
import numpy as np
import ray
from rlkit.envs.discovery.runners import RunnerChoice, shared_runner
from rlkit.errors import EnvironmentFault
from rlkit.sandbox.runners.programs import Program, ProgramLimits

LIMITS = ProgramLimits(timeout_s=20)

async def main():
    runner = shared_runner(RunnerChoice("ray", preload=("statistics",)))
    found = await runner.isolation()
    assert found.level == "os", found
    sources = [f"def run(seed): return h * {n} + seed" for n in range(6)]
    programs = [Program(source, arguments={"seed": 1}, arrays={"h": np.arange(3.0)}) for source in sources]
    for number, ran in enumerate(await asyncio.gather(*(runner.run(one, LIMITS) for one in programs))):
        assert ran.value.tolist() == [1.0, 1.0 + number, 1.0 + 2 * number], ran
    ran = await runner.run(Program("def run():\\n    print('said')\\n    return 1 / 0"), LIMITS)
    assert (ran.outcome, ran.stdout) == ("error", "said\\n"), ran
    ran = await runner.run(Program("def run(): return len(open('/etc/shadow').read())"), LIMITS)
    assert "Permission denied" in ran.error
    ran = await runner.run(Program("while True: pass"), ProgramLimits(timeout_s=0.5))
    assert ran.outcome == "timeout"

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
try:
    asyncio.run(main())
finally:
    ray.shutdown()
print("done")
"""


@WITH_RAY
@KEPT_APART
def test_programs_run_on_cluster_machines_in_the_same_layers() -> None:
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # as the runner sets it where it is the one that connects
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=False, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")


def test_missing_ray_or_cluster_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.sandbox.runners.ray_runner import RayRunner

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match="uv sync --extra ray"):
        RayRunner()
