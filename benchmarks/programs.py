"""Measure the cost of running a model's program, compared with a plain subprocess that imports NumPy and SciPy.

    python benchmarks/programs.py [--programs 512] [--workers 1]

The programs do next to nothing, so the measurement is the overhead: requests, forks, isolation layers and results.
Processor time includes this process, the server and all processes that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine

import numpy as np

from rlkit.sandbox.runners.fork_server import ForkServer
from rlkit.sandbox.runners.programs import Program, ProgramLimits

SOURCE = "import numpy as np\nfrom scipy import optimize\ndef run(seed):\n    return np.roll(h, seed)\n"
LIMITS = ProgramLimits(timeout_s=30)
HEIGHTS = np.linspace(0, 1, 200)


def cpu_s() -> float:
    """Return the CPU seconds of this process and its ended children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


async def measured(
    name: str, count: int, run: Callable[[int], Coroutine[None, None, None]], close: Callable[[], None]
) -> None:
    wall, used = time.perf_counter(), cpu_s()
    await asyncio.gather(*(run(number) for number in range(count)))
    wall_s = time.perf_counter() - wall
    close()
    print(f"{name:<42} {1e3 * wall_s / count:8.1f} ms wall {1e3 * (cpu_s() - used) / count:8.1f} ms CPU per program")


async def main(programs: int, workers: int) -> None:
    server = ForkServer(workers=workers)
    began = time.perf_counter()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {programs} programs, {workers} concurrent")
    print(await server.isolation())
    print(f"the server started in {time.perf_counter() - began:.1f} s")

    async def forked(number: int) -> None:
        ran = await server.run(Program(SOURCE, arguments={"seed": number}, arrays={"h": HEIGHTS}), LIMITS)
        assert ran.value is not None, ran.error

    await measured("fork server, all layers", programs, forked, server.close)
    slots = asyncio.Semaphore(workers)

    async def started(number: int) -> None:
        async with slots:
            code = f"import numpy as np\nh = np.linspace(0, 1, 200)\n{SOURCE}\nrun({number})"
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, env=environ, stdout=subprocess.DEVNULL
            )
            assert await process.wait() == 0

    await measured("plain subprocess that imports SciPy", max(8, programs // 32), started, lambda: None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(main(options.programs, options.workers))
