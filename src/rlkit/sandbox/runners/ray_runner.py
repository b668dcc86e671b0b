"""Programs on the machines of a Ray cluster, with the same isolation layers as on this machine.

Invariant: a program runs in a fork of the server that a Ray worker starts, never in the worker. Ray only schedules
programs and transfers their parsed results, which are numbers and text.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import EnvironmentFault, MissingError, RlkitError, missing_extra
from rlkit.sandbox.runners.fork_server import PRELOADED, ForkServer
from rlkit.sandbox.runners.programs import Isolation, Level, Program, ProgramLimits, ProgramOutcome, ProgramResult

if TYPE_CHECKING:
    from types import ModuleType

type _ServerSettings = tuple[int, Level | None, tuple[str, ...]]
"""Settings of a worker's server: processors, minimum isolation, and preloaded modules."""

type _ResultFields = tuple[ProgramOutcome, NDArray[np.float64] | None, str, str, float, float]

_NO_CLUSTER = (
    "cannot connect to a Ray cluster ({error}): start a cluster with `ray start --head`, set RAY_ADDRESS, or call "
    "ray.init() first"
)


class _Remote(Protocol):
    def options(self, **settings: object) -> _Remote: ...

    def remote(self, *arguments: object) -> Awaitable[object]: ...


class RayRunner:
    """A `CodeRunner` on a Ray cluster; rlkit must be installed on each machine.

    Args:
        cpus: processors that Ray reserves for each program.
        workers: maximum number of concurrent programs; None for as many as Ray can schedule.
        min_isolation: minimum isolation level, required on every machine.
        preload: modules loaded before programs start.

    Raises:
        MissingError: Ray is not installed, or no cluster was found.
    """

    def __init__(
        self,
        *,
        cpus: int = 1,
        workers: int | None = None,
        min_isolation: Level | None = None,
        preload: Sequence[str] = PRELOADED,
    ) -> None:
        self._ray = _connect()
        self._settings: _ServerSettings = (cpus, min_isolation, tuple(preload))
        self._slots = workers or 2**20  # practically unlimited
        self._semaphore: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def isolation(self) -> Isolation:
        """Return the isolation on the machine that answers first; see `CodeRunner`."""
        layers, notes = cast("tuple[tuple[str, ...], dict[str, str]]", await self._call(_probe_worker, self._settings))
        return Isolation.of(layers, notes)

    async def run(self, program: Program, limits: ProgramLimits) -> ProgramResult:
        """Run a program to its end on one of the machines, when a slot is free; see `CodeRunner`."""
        arrays = {name: np.asarray(array, np.float64) for name, array in program.arrays.items()}
        fields = (program.source, program.entry, dict(program.arguments), arrays, dict(program.helpers))
        async with self._concurrency_limit():
            result = await self._call(_run_in_worker, self._settings, fields, limits)
        return ProgramResult(*cast("_ResultFields", result))

    def close(self) -> None:
        """Do nothing: the cluster is shared, and each program ends with the call that waits for it."""

    def _concurrency_limit(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._loop is not loop:
            self._semaphore, self._loop = asyncio.Semaphore(self._slots), loop
        return self._semaphore

    async def _call(self, function: Callable[..., object], *arguments: object) -> object:
        remote = cast("_Remote", self._ray.remote(function)).options(num_cpus=self._settings[0], max_retries=0)
        reference = remote.remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RlkitError):
                raise cause from error
            raise EnvironmentFault(f"Ray failed: {str(error).strip().splitlines()[-1]}") from error


def _connect() -> ModuleType:
    # Under `uv run`, Ray would start each worker with `uv run` in a copy of the working directory. This takes minutes
    # and sometimes hangs; rlkit must be installed there anyway.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        module = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise missing_extra("ray") from None
    if not module.is_initialized():
        try:
            module.init(address="auto", log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise MissingError(_NO_CLUSTER.format(error=str(error).strip().splitlines()[0])) from error
    return module


@cache
def _server(settings: _ServerSettings) -> ForkServer:
    """Return the server of this Ray worker, which runs one program at a time."""
    cpus, min_isolation, preload = settings
    return ForkServer(workers=1, cpus=cpus, min_isolation=min_isolation, preload=preload)


def _probe_worker(settings: _ServerSettings) -> tuple[tuple[str, ...], Mapping[str, str]]:
    isolation = asyncio.run(_server(settings).isolation())
    return isolation.layers, dict(isolation.notes)


def _run_in_worker(
    settings: _ServerSettings,
    fields: tuple[str, str, dict[str, float], dict[str, NDArray[np.float64]], dict[str, str]],
    limits: ProgramLimits,
) -> _ResultFields:
    result = asyncio.run(_server(settings).run(Program(*fields), limits))
    return result.outcome, result.value, result.error, result.stdout, result.seconds, result.cpu_s
