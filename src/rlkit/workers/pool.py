"""A pool of workers that plays the rollouts of environments.

Invariant: a rollout is played by one worker at a time. A worker that ends is replaced; the rollout whose code ended it
fails, and its other rollouts are played again with the same seeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Self, cast

from rlkit._util.threads import run_together
from rlkit.config.loading.objects import loaded_files
from rlkit.env import Task
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Samplers
from rlkit.rollout.runner import GroupScores, Rollout, RolloutRunner
from rlkit.types import Episode
from rlkit.workers.client import WorkerClient, WorkerLost
from rlkit.workers.connection import Connect
from rlkit.workers.messages import Play, Score, Start, encode
from rlkit.workers.task_pickles import TaskPickle, pickle_task

_REPLAYS_MAX = 5  # number of times that a rollout is played again because its worker ended
_SHARED_REPLAYS_MAX = 3  # number of these in a worker with others; they may be what ends it
_STARTS_MAX = 3  # number of replacements in a row that may fail to start; after that, the pool has a worker less
_PICKLES = 8
"""Number of pickled tasks in memory. The members of a group, which share one, begin together; it may be large."""


class WorkerPool(RolloutRunner):
    """Workers that play rollouts.

    ::

        async with WorkerPool(2, connect, LocalRunner(chat), tasks=tasks, show=print).open() as pool:
            player = Player(pool, settings, seed=0, slots=Slots(64))

    Args:
        tasks: a task of each environment, to find out whether workers can load it.
        show: receives each line that a worker prints, with the name of the environment or "".
        connect_extra: starts a worker that is not one of the `count`; by default `connect`.

    Raises:
        UsageError: a task cannot be pickled.
    """

    batch_wait_s = 0.25  # members of a group are in different workers

    def __init__(
        self,
        count: int,
        connect: Connect,
        runner: RolloutRunner,
        *,
        tasks: Sequence[Task],
        show: Callable[[str, str], None],
        connect_extra: Connect | None = None,
    ) -> None:
        self._count = count
        self._lone_workers = asyncio.Semaphore(count)
        self._connect, self._connect_extra = connect, connect_extra or connect
        self._start = encode(Start(loaded_files(), runner, [(task.name, pickle_task(task).data) for task in tasks]))
        self._show = show
        self._workers = list[WorkerClient]()
        self._pickle = lru_cache(_PICKLES)(pickle_task)
        self._lost_cpu_s = 0.0
        self._measured_s, self._measured_cpu_s = time.monotonic(), 0.0
        self._failed_starts = _STARTS_MAX  # until the first workers have started, none is replaced
        self._start_problem = ""
        self.restarts = 0  # number of workers that were replaced

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Self]:
        """Start the workers, and end them with the block; UsageError if one cannot start."""
        try:
            for _ in range(self._count):
                self._workers.append(self._add_worker(self._connect))
            starts = [worker.ready for worker in self._workers]
            for start in (await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION))[0]:
                start.result()
            self._failed_starts = 0
            yield self
        finally:
            workers, self._workers = self._workers, []  # none is replaced from here on
            await run_together(worker.close() for worker in workers)

    async def play(self, task: Task, rollout: Rollout, samplers: Samplers) -> Episode:  # noqa: D102  inherited
        pickle = self._pickle(task)
        began_s = asyncio.get_running_loop().time()
        try:
            return cast("Episode", await self._call(Play(0, pickle.number, rollout), pickle, samplers))
        except EnvironmentFault as fault:
            seconds = asyncio.get_running_loop().time() - began_s
            return Episode(rollout.member, rollout.attempt, (), "failed", None, {}, {}, seconds, str(fault))

    async def score(  # noqa: D102  inherited
        self, task: Task, episodes: Sequence[Episode], *, timeout_s: float
    ) -> GroupScores:
        pickle = self._pickle(task)
        try:
            return cast("GroupScores", await self._call(Score(0, pickle.number, episodes, timeout_s), pickle, None))
        except EnvironmentFault as fault:
            return None, f"{type(task.env).__name__}.score_group: {fault}"

    @property
    def queue(self) -> int:
        """Number of rollouts that do not wait for completions, minus one for each worker."""
        return sum(max(worker.computing - 1, 0) for worker in self._workers)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of workers, `restarts`, `queue` and `busy`.

        `busy` is the processor time of the workers since the last call, as a share of the time.
        """
        now_s, cpu_s = time.monotonic(), self._lost_cpu_s + sum(worker.cpu_s for worker in self._workers)
        passed_s = (now_s - self._measured_s) * max(len(self._workers), 1)
        busy = max(cpu_s - self._measured_cpu_s, 0.0) / passed_s if passed_s else 0.0
        self._measured_s, self._measured_cpu_s = now_s, cpu_s
        return {
            "live": float(len(self._workers)),
            "restarts": float(self.restarts),
            "busy": busy,
            "queue": float(self.queue),
        }

    async def _call(self, message: Play | Score, task: TaskPickle, samplers: Samplers | None) -> object:
        """Call a worker; raise EnvironmentFault if the call's code ended it, and UsageError without a worker.

        A call that perhaps ended its worker, or that others keep ending, is repeated in a worker of its own.
        """
        reason, is_alone = "", False
        for replays in range(1 + _REPLAYS_MAX):
            try:
                if is_alone:
                    return await self._call_alone(message, task, samplers)
                return await (await self._choose_worker()).call(message, task, samplers)
            except WorkerLost as loss:
                reason = str(loss)
                if loss.cause == "yes" or (loss.cause == "perhaps" and is_alone):
                    raise EnvironmentFault(reason) from loss
                is_alone = is_alone or loss.cause == "perhaps" or replays >= _SHARED_REPLAYS_MAX
        raise EnvironmentFault(f"{1 + _REPLAYS_MAX} workers ended while they ran its code; the last: {reason}")

    async def _call_alone(self, message: Play | Score, task: TaskPickle, samplers: Samplers | None) -> object:
        async with self._lone_workers:
            worker = self._add_worker(self._connect_extra)
            try:
                return await worker.call(message, task, samplers)
            finally:
                await worker.close()
                self._lost_cpu_s += worker.cpu_s

    async def _choose_worker(self) -> WorkerClient:
        """Return the started worker with the fewest calls; a replacement may wait long for a machine of a cluster."""
        while not (workers := [worker for worker in self._workers if worker.ready.done()]):
            if not self._workers:
                raise UsageError(f"no worker is left, and none can be started: {self._start_problem}")
            await asyncio.wait([worker.ready for worker in self._workers], return_when=asyncio.FIRST_COMPLETED)
        return min(workers, key=lambda worker: worker.load)

    def _add_worker(self, connect: Connect) -> WorkerClient:
        return WorkerClient(connect, self._start, print_line=self._show, replace=self._replace)

    def _replace(self, worker: WorkerClient) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._lost_cpu_s += worker.cpu_s
        if (problem := worker.ready.exception()) is None:
            self._failed_starts = 0
        else:
            self._failed_starts, self._start_problem = self._failed_starts + 1, str(problem)
        if self._failed_starts < _STARTS_MAX:
            self.restarts += 1
            try:
                self._workers.append(self._add_worker(self._connect))
            except UsageError as error:
                self._start_problem = str(error)
