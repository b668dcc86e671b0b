"""Shared runners for the programs of a search.

Invariant: equal choices share one runner per process, which limits the number of concurrent programs.
"""

from __future__ import annotations

import atexit
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from rlkit.sandbox.runners.fork_server import PRELOADED, ForkServer
from rlkit.sandbox.runners.programs import Level


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """Runner of programs, with its isolation from the machine."""

    workers: int | None = None  # maximum number of concurrent programs; None for the processors divided by `cpus`
    cpus: int = 1
    min_isolation: Level | None = None  # required isolation of programs; None for `os` on Linux and `limits` elsewhere
    preload: tuple[str, ...] = ()  # modules with helper functions for programs


@cache
def shared_runner(choice: RunnerChoice) -> ForkServer:
    """Return the runner of this process for a choice; it ends with the process."""
    preload = (*PRELOADED, *choice.preload)
    runner = ForkServer(cpus=choice.cpus, workers=choice.workers, min_isolation=choice.min_isolation, preload=preload)
    atexit.register(runner.close)
    return runner


@cache
def check_runner(choice: RunnerChoice) -> None:
    """Check once that a choice can run programs, before a run pays for sampling.

    Raises:
        MissingError: the isolation of this machine is too weak.
    """
    # Without preloads it starts quickly.
    with closing(ForkServer(workers=1, min_isolation=choice.min_isolation, preload=())) as server:
        server.start()
