"""Open the workers that a configuration describes.

Invariant: environments with equal settings share workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from rlkit.config.schema.sampling import WorkersConfig
from rlkit.env import Env, Task, TaskSource
from rlkit.rollout.runner import RolloutRunner, Runners
from rlkit.tasks.sources import Tasks
from rlkit.workers.local import LocalWorker
from rlkit.workers.pool import WorkerPool

if TYPE_CHECKING:
    from rlkit.config.schema import Config
    from rlkit.workers.local import Connect

type Setting = int | str | WorkersConfig
"""Value of `rollouts.workers`; a text is `auto`."""


@asynccontextmanager
async def open_workers(
    config: Config,
    runner: RolloutRunner,
    tasks: Mapping[str, Tasks],
    eval_tasks: Mapping[str, Sequence[Env]],
) -> AsyncGenerator[Runners]:
    """Start the workers of a run, and end them with the block.

    Args:
        runner: plays the rollouts in the workers.
        tasks: tasks of each environment; one is sent to each worker, to find out whether it can be loaded.

    Raises:
        UsageError: a task cannot be pickled, or a worker cannot start.
        MissingError: Ray is not installed.
    """
    run = config.rollouts.workers
    trained = {name: run if env.workers is None else env.workers for name, env in config.envs.items()}
    settings = [(True, name, trained[name], tasks[name]) for name in tasks]
    settings += [(False, name, trained.get(name, run), eval_tasks[name]) for name in eval_tasks]
    users = dict[WorkersConfig, list[tuple[bool, str, Tasks]]]()
    for is_training, name, setting, env_tasks in settings:
        if (workers := _resolve(setting)) is not None:
            users.setdefault(workers, []).append((is_training, name, env_tasks))
    async with AsyncExitStack() as stack:
        opened = list[WorkerPool]()
        pools: tuple[dict[str, WorkerPool], dict[str, WorkerPool]] = {}, {}
        for workers, envs in users.items():
            firsts = [Task(0, name, env) for _, name, source in envs if (env := _first_task(source)) is not None]
            opened.append(
                pool := await stack.enter_async_context(
                    WorkerPool.open(_count(workers), _connector(workers), runner, tasks=firsts, show=_print_line)
                )
            )
            for is_training, name, _ in envs:
                pools[0 if is_training else 1][name] = pool
        yield Runners(runner, *pools, partial(_merge_metrics, opened))


def _merge_metrics(pools: Sequence[WorkerPool]) -> dict[str, float]:
    """Return the metrics of all workers since the last call, see `WorkerPool.metrics`."""
    parts = [pool.metrics() for pool in pools]
    total = {f"workers/{name}": sum(part[name] for part in parts) for name in ("live", "restarts", "rollouts")}
    busy = sum(part["busy"] * part["live"] for part in parts) / max(total["workers/live"], 1.0)
    return {**total, "workers/busy": busy}


def _resolve(setting: Setting) -> WorkersConfig | None:
    if isinstance(setting, WorkersConfig):
        return setting
    return WorkersConfig.model_validate({"count": setting}) if setting else None


def _count(workers: WorkersConfig) -> int:
    return len(os.sched_getaffinity(0)) if workers.count == "auto" else workers.count


def _connector(workers: WorkersConfig) -> Connect:
    return partial(LocalWorker, cpus=workers.cpus)


def _first_task(tasks: Tasks) -> Env | None:
    if not isinstance(tasks, TaskSource):
        return next(iter(tasks), None)
    state = tasks.state_dict()
    task = tasks.next()
    tasks.load_state_dict(state)
    return task


def _print_line(env: str, line: str) -> None:
    print(f"{env or 'worker'}: {line}", file=sys.stderr, flush=True)
