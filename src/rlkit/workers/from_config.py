"""Open the workers that a configuration describes.

Invariant: environments with equal settings share workers.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from rlkit._util.activity import current_activity
from rlkit.config.schema import Config
from rlkit.config.schema.sampling import WorkersConfig
from rlkit.env import Env, Task, TaskSource
from rlkit.errors import UsageError
from rlkit.policy import Samplers
from rlkit.rollout.runner import GroupScores, Rollout, RolloutRunner
from rlkit.sandbox.spec import MIB
from rlkit.tasks.sources import Tasks
from rlkit.types import Episode
from rlkit.workers.connection import Connect
from rlkit.workers.local import LocalWorker
from rlkit.workers.pool import WorkerPool

_MEMORY_SHARE = 0.9  # part of the machine's memory for its workers together
_MEMORY_MIN_BYTES = 2048 * MIB  # least limit of a worker by default; one needs about 600 MiB with a model's tokenizer


@asynccontextmanager
async def open_runner(
    config: Config, local: RolloutRunner, tasks: Mapping[str, Tasks], eval_tasks: Mapping[str, Sequence[Env]]
) -> AsyncGenerator[RolloutRunner]:
    """Start the workers of a run, if it has any, and end them with the block.

    Args:
        local: plays the rollouts in the workers, and those of environments without workers in this process.
        tasks: tasks of each environment; one is sent to each worker, to find out whether it can be loaded.

    Raises:
        UsageError: a task cannot be pickled, or workers cannot start here with these settings.
        MissingError: Ray is not installed, or RAY_ADDRESS names no cluster.
    """
    run = config.rollouts.workers
    settings = {name: run if env.workers is None else env.workers for name, env in config.envs.items()}
    settings |= dict.fromkeys(config.envs.keys() - config.reinforced_envs.keys())  # they play nothing
    users = dict[WorkersConfig, dict[str, list[Tasks]]]()
    for name in {**tasks, **eval_tasks}:
        if workers := settings.get(name, run):
            env_tasks = [source[name] for source in (tasks, eval_tasks) if name in source]
            users.setdefault(workers, {})[name] = env_tasks
    if not users:
        yield local
        return
    async with AsyncExitStack() as stack:
        pools = dict[str, WorkerPool]()
        for workers, envs in users.items():
            firsts = [
                Task(0, name, env)
                for name, sources in envs.items()
                for source in sources
                if (env := _first_task(source)) is not None
            ]
            field = "rollouts.workers" if workers == run else f"envs.{next(iter(envs))}.workers"
            if workers.runner == "local" and sys.platform != "linux":
                raise UsageError(f"{field}: workers on this machine need Linux; set it to 0, or use `runner: ray`")
            count = _count(workers, field=field)
            connect, connect_extra = _make_connectors(workers, count)
            # Lines of processes that environments start have the name of the only environment, or none.
            source = next(iter(envs)) if len(envs) == 1 else "worker"
            show = partial(_print_line, source)
            pool = WorkerPool(count, connect, local, tasks=firsts, show=show, connect_extra=connect_extra)
            try:
                pools |= dict.fromkeys(envs, await stack.enter_async_context(pool.open()))
            except UsageError as error:
                fix = "set it to 0 to play in the run's own process"
                raise UsageError(f"{field}: no worker for {', '.join(envs)} can start; {fix}: {error}") from error
        runner = _PoolsByEnv(local, pools)
        runner.metrics()  # shows the workers
        stack.callback(asyncio.create_task(runner.show_queue()).cancel)
        yield runner


@dataclass(frozen=True, eq=False)
class _PoolsByEnv(RolloutRunner):
    """The pools of a run; environments without one run in this process."""

    local: RolloutRunner
    pools: Mapping[str, WorkerPool]

    batch_wait_s = WorkerPool.batch_wait_s

    async def play(self, task: Task, rollout: Rollout, samplers: Samplers) -> Episode:
        return await self._of(task).play(task, rollout, samplers)

    async def score(self, task: Task, episodes: Sequence[Episode], *, timeout_s: float) -> GroupScores:
        return await self._of(task).score(task, episodes, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return and display the metrics of all workers since the last call, see `WorkerPool.metrics`."""
        parts = [pool.metrics() for pool in set(self.pools.values())]
        total = {f"workers/{name}": sum(part[name] for part in parts) for name in ("live", "restarts", "queue")}
        busy = sum(part["busy"] * part["live"] for part in parts) / max(total["workers/live"], 1.0)
        activity = current_activity()
        activity.put("workers", round(total["workers/live"]))
        activity.put("workers busy (%)", round(100 * busy))
        activity.put("workers replaced", round(total["workers/restarts"]))
        return {**total, "time/env_busy": busy}

    async def show_queue(self) -> None:
        """Display the rollouts that wait for a worker, each second."""
        while True:
            current_activity().put("waiting for a worker", sum(pool.queue for pool in set(self.pools.values())))
            await asyncio.sleep(1.0)

    def _of(self, task: Task) -> RolloutRunner:
        return self.pools.get(task.name, self.local)


def _count(workers: WorkersConfig, *, field: str) -> int:
    if workers.count != "auto":
        return workers.count
    if workers.runner == "ray":
        from rlkit.workers.ray_actor import count_processors

        processors, place = count_processors(), "the Ray cluster"
    else:
        processors, place = len(os.sched_getaffinity(0)), "this machine"
    if processors < workers.cpus:
        raise UsageError(
            f"{field}.cpus: {workers.cpus} is more than the processors of {place} ({processors}): lower it, or set "
            f"{field}.count to share processors"
        )
    return processors // workers.cpus


def _make_connectors(workers: WorkersConfig, count: int) -> tuple[Connect, Connect]:
    """Return what starts a worker, and what starts one more than `count`."""
    if workers.runner == "ray":
        from rlkit.workers.ray_actor import RayWorker

        connect = partial(RayWorker, cpus=workers.cpus, memory_bytes=MIB * (workers.memory_mb or math.inf))
        return connect, partial(connect, reserves=False)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share_bytes = max(_MEMORY_SHARE * machine_bytes / count, _MEMORY_MIN_BYTES)
    memory_bytes = MIB * workers.memory_mb if workers.memory_mb else share_bytes
    connect = partial(LocalWorker, cpus=workers.cpus, memory_bytes=memory_bytes)
    return connect, connect


def _first_task(tasks: Tasks) -> Env | None:
    if not isinstance(tasks, TaskSource):
        return next(iter(tasks), None)
    state = tasks.state_dict()
    task = tasks.next()
    tasks.load_state_dict(state)
    return task


def _print_line(source: str, env: str, line: str) -> None:
    print(f"{env or source}: {line}", file=sys.stderr, flush=True)
