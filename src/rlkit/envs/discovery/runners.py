"""The runner that the tasks of a search share.

Invariant: equal choices have one runner in a process, so that no more programs run at once than were asked for.
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
    """What runs programs, and how far from the machine.

    Args:
        kind: `local`, on this machine; `ray`, on the machines of a Ray cluster.
        workers: programs at once; None for as many as there are processors for.
        min_isolation: below which nothing is run; None for `os` on Linux and `limits` elsewhere.
        preload: modules that hold the helpers of programs.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int | None = None
    cpus: int = 1
    min_isolation: Level | None = None
    preload: tuple[str, ...] = ()


@cache
def shared_runner(choice: RunnerChoice) -> CodeRunner:
    """The runner of this process for a choice; it ends with the process.

    Raises:
        MissingError: Ray is not installed, or there is no cluster.
    """
    preload = (*PRELOADED, *choice.preload)
    if choice.kind == "ray":
        from rlkit.sandbox.runners.ray_runner import RayRunner

        return RayRunner(cpus=choice.cpus, workers=choice.workers, min_isolation=choice.min_isolation, preload=preload)
    runner = ForkServer(cpus=choice.cpus, workers=choice.workers, min_isolation=choice.min_isolation, preload=preload)
    atexit.register(runner.close)
    return runner


@cache
def demand(choice: RunnerChoice) -> None:
    """See once whether programs can be run as a choice says, before anything is paid for that they would follow.

    Raises:
        MissingError: Ray is not installed, there is no cluster, or the isolation here is less than was asked for.
    """
    if choice.kind == "ray":
        shared_runner(choice)
        return
    tried = ForkServer(workers=1, min_isolation=choice.min_isolation, preload=())  # ready in a moment
    try:
        tried.start()
    finally:
        tried.close()
