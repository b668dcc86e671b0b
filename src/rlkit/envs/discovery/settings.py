"""Settings for playing the tasks of a search, and the runners of programs that they choose.

Invariant: equal choices of a runner share one per process, which limits the number of concurrent programs.
"""

from __future__ import annotations

import atexit
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache

from rlkit.sandbox.runners.fork_server import PRELOADED, ForkServer
from rlkit.sandbox.runners.programs import Level, ProgramLimits

BUDGET_SHARE = 0.9  # share of the time limit that the prompt grants a program


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """Settings for playing the tasks of a search; prompts state the limits and helpers of programs."""

    limits: ProgramLimits = field(default_factory=ProgramLimits)
    helpers: bool = True  # true if programs may call the problem's local search
    polish_s: float = 0.0  # seconds of local search on each child before it is archived; 0 for no local search
    workers: int | None = None  # maximum number of concurrent programs; None for the processors divided by `cpus`
    min_isolation: Level | None = None  # required isolation of programs; None for `os` on Linux and `limits` elsewhere
    preload: tuple[str, ...] = ()  # modules with helper functions for programs
    record: bool = False  # state the best published value in the prompt
    target: float | None = None  # value to reach, stated in the prompt; None for none

    @property
    def budget_s(self) -> float:
        """Time in seconds that the prompt grants a program."""
        return float(f"{self.limits.timeout_s * BUDGET_SHARE:.3g}")

    @property
    def runner(self) -> ForkServer:
        """Runner of programs of this process; it ends with the process."""
        return _share_runner(self.limits.cpus, self.workers, self.min_isolation, self.preload)


@cache
def _share_runner(cpus: int, workers: int | None, min_isolation: Level | None, preload: tuple[str, ...]) -> ForkServer:
    runner = ForkServer(cpus=cpus, workers=workers, min_isolation=min_isolation, preload=(*PRELOADED, *preload))
    atexit.register(runner.close)
    return runner


@cache
def check_isolation(min_isolation: Level | None) -> None:
    """Check once that this machine can run programs with an isolation, before a run pays for sampling.

    Raises:
        MissingError: the isolation of this machine is too weak.
    """
    # Without preloads it starts quickly.
    with closing(ForkServer(workers=1, min_isolation=min_isolation, preload=())) as server:
        server.start()
