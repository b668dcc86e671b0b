"""Workers: processes, on this machine or on a Ray cluster, that run the code of environments.

Invariant: at a fixed seed, a run has the same tokens, rewards and metrics wherever its rollouts are played.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.config.schema import Config
    from rlkit.env import Env
    from rlkit.rollout.runner import RolloutRunner
    from rlkit.tasks.sources import Tasks


@asynccontextmanager
async def open_runner(
    config: Config, local: RolloutRunner, tasks: Mapping[str, Tasks], eval_tasks: Mapping[str, Sequence[Env]]
) -> AsyncGenerator[RolloutRunner]:
    """Start the workers of a run, if it has any; errors as in `rlkit.workers.from_config.open_workers`."""
    if not config.has_workers:
        yield local
        return
    from rlkit.workers.from_config import open_workers

    async with open_workers(config, local, tasks, eval_tasks) as runner:
        yield runner
