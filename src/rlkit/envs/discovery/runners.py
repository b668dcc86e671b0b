"""The runner that the tasks of a search share.

Invariant: equal choices have one runner in a process, so that no more programs run at once than were asked for.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import cache

from rlkit.sandbox.fork_server import PRELOADED, ForkServer
from rlkit.sandbox.programs import CodeRunner, Level


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """What runs programs, and how far from the machine.

    Args:
        workers: programs at once; None for as many as there are processors for.
        cpus: processors for each.
        min_isolation: below which nothing is run; None for `os` on Linux and `limits` elsewhere.
        preload: modules that hold the helpers of programs.
    """

    workers: int | None = None
    cpus: int = 1
    min_isolation: Level | None = None
    preload: tuple[str, ...] = ()


@cache
def shared_runner(choice: RunnerChoice) -> CodeRunner:
    """The runner of this process for a choice; it ends with the process."""
    runner = ForkServer(
        workers=choice.workers,
        cpus=choice.cpus,
        min_isolation=choice.min_isolation,
        preload=(*PRELOADED, *choice.preload),
    )
    atexit.register(runner.close)
    return runner
