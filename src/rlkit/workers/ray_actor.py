"""Workers on the machines of a Ray cluster: an actor on a machine starts a worker there, and relays its messages.

Invariant: an actor and its worker end with the run, however that ends. If Ray loses an actor, no rollout is blamed.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import cast

from rlkit._util.frames import describe_error
from rlkit.errors import MissingError, missing_extra
from rlkit.rollout.task_guard import CLEAN_UP_S, GRACE_S
from rlkit.workers.connection import Connect, Connection, WorkerLoss, WorkerOwner
from rlkit.workers.local import LocalWorker

type _Event = bytes | str | WorkerLoss | None
"""A frame of the worker, a line of its raw output, its loss, or None after `close`."""

_PATIENCE_S = 20.0  # seconds without an actor after which the run says that it waits; an idle machine needs a few
_CONNECT_S = 10.0  # time limit for a connection to the cluster's address
_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Variables of an actor: Ray must not kill the keeper of a worker, which would no longer kill the worker."""


class RayWorker(Connection):
    """A worker on a Ray cluster, where rlkit must be installed; arguments as of `LocalWorker`.

    Args:
        reserves: let Ray reserve the processors; otherwise it starts the worker even on a full cluster.

    Raises:
        MissingError: Ray is not installed, or RAY_ADDRESS names no cluster.
    """

    def __init__(
        self, owner: WorkerOwner, *, cpus: int = 1, memory_bytes: float = math.inf, reserves: bool = True
    ) -> None:
        self._owner = owner
        self._ray = _connect()
        host = self._ray.remote(_Host).options(
            num_cpus=cpus if reserves else 0, max_restarts=0, runtime_env={"env_vars": _VARIABLES}
        )
        path, folder = [entry or str(Path.cwd()) for entry in sys.path], Path.cwd()
        self._actor = host.remote(path, folder, partial(LocalWorker, cpus=cpus, memory_bytes=memory_bytes))
        self._frames = asyncio.Queue[bytes]()
        self._has_started = asyncio.Event()
        self._is_closing = False
        self._watching = asyncio.create_task(self._watch(f"waiting for {cpus} free processors of the Ray cluster"))

    def send(self, frame: bytes) -> None:  # noqa: D102  inherited
        self._frames.put_nowait(frame)

    async def close(self) -> None:  # noqa: D102  inherited
        self._is_closing = True
        try:
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                if self._has_started.is_set():
                    async with asyncio.timeout(CLEAN_UP_S + 4 * GRACE_S):  # longer than that of the worker
                        await self._actor.close.remote()
                        await self._watching
        finally:
            self._watching.cancel()
            self._ray.kill(self._actor)

    async def _watch(self, notice: str) -> None:
        waiting = asyncio.get_running_loop().call_later(_PATIENCE_S, self._owner.show, notice)
        pushing = asyncio.create_task(self._push())
        try:
            await self._actor.start.remote()
            self._has_started.set()
            waiting.cancel()
            loss = await self._relay_events()
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].strip().partition(". ")[0]
            loss = WorkerLoss(f"the machine of the worker was lost or cannot start it ({reason})", None)
        except Exception as error:  # unpickling runs the user's code
            loss = WorkerLoss(f"a message of the worker cannot be read: {describe_error(error)}", 0)
        finally:
            waiting.cancel()
            pushing.cancel()
            self._ray.kill(self._actor)
        if loss is not None and not self._is_closing:
            self._owner.lose(loss)

    async def _push(self) -> None:
        await self._has_started.wait()
        with suppress(self._ray.exceptions.RayError):  # `_watch` reports it
            while True:  # Ray does not keep the order of calls that are on their way together
                await self._actor.send.remote(await _take(self._frames))

    async def _relay_events(self) -> WorkerLoss | None:
        while True:
            for event in cast("list[_Event]", await self._actor.receive.remote()):
                if isinstance(event, bytes):
                    self._owner.receive(event)
                elif isinstance(event, str):
                    self._owner.show(event)
                else:
                    return event


class _Events(asyncio.Queue[_Event]):
    """Messages and lines of an actor's worker, in order."""

    receive = lose = show = asyncio.Queue[_Event].put_nowait


class _Host:
    """The actor.

    Args:
        path: module search path of the run.
        folder: working directory of the run.
        connect: starts the worker.
    """

    def __init__(self, path: Sequence[str], folder: Path, connect: Connect) -> None:
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        if folder.is_dir():
            os.chdir(folder)
        self._connect = connect
        self._worker: Connection | None = None
        self._events = _Events()

    async def start(self) -> None:
        self._worker = self._connect(self._events)

    async def send(self, frames: Sequence[bytes]) -> None:
        assert self._worker is not None  # `start` is the first call
        for frame in frames:
            self._worker.send(frame)

    async def receive(self) -> list[_Event]:
        return await _take(self._events)

    async def close(self) -> None:
        assert self._worker is not None  # as above
        await self._worker.close()
        self._events.put_nowait(None)


def count_processors() -> int:
    """Return the number of processors of the cluster; errors as of `RayWorker`."""
    return int(_connect().cluster_resources().get("CPU", 1))


def _connect() -> ModuleType:
    # Under `uv run`, Ray would start each actor with `uv run` in a copy of the working directory. This takes minutes
    # and sometimes hangs; rlkit must be installed there anyway.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        module = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise missing_extra("ray") from None
    if not module.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdecimal():  # Ray itself tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            module.init(log_to_driver=False, include_dashboard=False)  # RAY_ADDRESS, or a new cluster if there is none
        except (OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise MissingError(
                f"cannot connect to a Ray cluster ({reason}): start one with `ray start --head`, or correct or unset "
                f"RAY_ADDRESS ({address or 'not set'})"
            ) from error
    return module


async def _take[T](queue: asyncio.Queue[T]) -> list[T]:
    """Wait for an item, and return all items of a queue."""
    return [await queue.get(), *(queue.get_nowait() for _ in range(queue.qsize()))]
