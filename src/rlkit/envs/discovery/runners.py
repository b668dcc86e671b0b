"""Shared runners for the programs of a search.

Invariant: equal choices share one runner per process, which limits the number of concurrent programs.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rlkit.sandbox.runners.fork_server import PRELOADED, ForkServer
from rlkit.sandbox.runners.programs import CodeRunner, Level


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """Runner of programs, with its isolation from the machine.

    Args:
        kind: `local`, on this machine; `ray`, on the machines of a Ray cluster.
        workers: maximum number of concurrent programs; None for the number of processors divided by `cpus`.
        min_isolation: required isolation of programs; None for `os` on Linux and `limits` elsewhere.
        preload: modules with helper functions for programs.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int | None = None
    cpus: int = 1
    min_isolation: Level | None = None
    preload: tuple[str, ...] = ()


@cache
def shared_runner(choice: RunnerChoice) -> CodeRunner:
    """Return the runner of this process for a choice; it ends with the process.

    Raises:
        MissingError: Ray is not installed, or no cluster was found.
    """
    preload = (*PRELOADED, *choice.preload)
    if choice.kind == "ray":
        from rlkit.sandbox.runners.ray_runner import RayRunner

        return RayRunner(cpus=choice.cpus, workers=choice.workers, min_isolation=choice.min_isolation, preload=preload)
    runner = ForkServer(cpus=choice.cpus, workers=choice.workers, min_isolation=choice.min_isolation, preload=preload)
    atexit.register(runner.close)
    return runner


@cache
def check_runner(choice: RunnerChoice) -> None:
    """Check once that a choice can run programs, before a run pays for sampling.

    Raises:
        MissingError: Ray is not installed, no cluster was found, or this machine's isolation is too weak.
    """
    if choice.kind == "ray":
        shared_runner(choice)
        return
    server = ForkServer(workers=1, min_isolation=choice.min_isolation, preload=())  # without preloads it starts quickly
    try:
        server.start()
    finally:
        server.close()
