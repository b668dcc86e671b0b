"""Programs on the machines of a Ray cluster, each behind the same layers as on this one.

Invariant: a program runs in a fork of a server of its own machine, never in a Ray worker. Ray says where and when; what
it carries is what the worker has read of a program's result, which is numbers and text.
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

type _Setting = tuple[int, Level | None, tuple[str, ...]]
"""Of a worker's server: processors, the least isolation, and what is loaded."""

type _Told = tuple[ProgramOutcome, NDArray[np.float64] | None, str, str, float, float]

_NO_CLUSTER = (
    "there is no Ray cluster to connect to ({error}): start one with `ray start --head`, set RAY_ADDRESS, or call "
    "ray.init() first"
)


class _Remote(Protocol):
    def options(self, **settings: object) -> _Remote: ...

    def remote(self, *arguments: object) -> Awaitable[object]: ...


class RayRunner:
    """A `CodeRunner` on a Ray cluster, which must have rlkit installed on each machine.

    Args:
        cpus: processors for each program, which Ray reserves.
        workers: programs at once; None for as many as Ray finds room for.
        min_isolation: below which nothing is run, on whatever machine.
        preload: modules that programs find loaded.

    Raises:
        MissingError: Ray is not installed, or there is no cluster.
    """

    def __init__(
        self,
        *,
        cpus: int = 1,
        workers: int | None = None,
        min_isolation: Level | None = None,
        preload: Sequence[str] = PRELOADED,
    ) -> None:
        self._ray = _connected()
        self._setting: _Setting = (cpus, min_isolation, tuple(preload))
        self._slots = workers
        self._free: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def isolation(self) -> Isolation:
        """Return what is between programs and the machine that answers first; see `CodeRunner`."""
        layers, notes = cast("tuple[tuple[str, ...], dict[str, str]]", await self._asked(_isolation, self._setting))
        return Isolation.of(layers, notes)

    async def run(self, program: Program, limits: ProgramLimits) -> ProgramResult:
        """Run a program to its end on one of the machines, once there is room; see `CodeRunner`."""
        arrays = {name: np.asarray(one, np.float64) for name, one in program.arrays.items()}
        given = (program.source, program.entry, dict(program.arguments), arrays, dict(program.helpers))
        async with self._room():
            told = await self._asked(_run, self._setting, given, limits)
        return ProgramResult(*cast("_Told", told))

    def close(self) -> None:
        """Nothing: the cluster is not this runner's, and what it runs ends with the call that waits for it."""

    def _room(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._free is None or self._loop is not loop:
            self._free, self._loop = asyncio.Semaphore(self._slots or 1 << 20), loop
        return self._free

    async def _asked(self, function: Callable[..., object], *arguments: object) -> object:
        remote = cast("_Remote", self._ray.remote(function)).options(num_cpus=self._setting[0], max_retries=0)
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


def _connected() -> ModuleType:
    # Of what `uv run` has started Ray starts each worker with `uv run` again, in a copy of the working directory: for
    # minutes, and at times for ever. rlkit must be installed there anyway.
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
def _server(setting: _Setting) -> ForkServer:
    """Of the Ray worker that this runs in; Ray gives it one program at a time."""
    cpus, least, preload = setting
    return ForkServer(workers=1, cpus=cpus, min_isolation=least, preload=preload)


def _isolation(setting: _Setting) -> tuple[tuple[str, ...], Mapping[str, str]]:
    found = asyncio.run(_server(setting).isolation())
    return found.layers, dict(found.notes)


def _run(
    setting: _Setting,
    given: tuple[str, str, dict[str, float], dict[str, NDArray[np.float64]], dict[str, str]],
    limits: ProgramLimits,
) -> _Told:
    ran = asyncio.run(_server(setting).run(Program(*given), limits))
    return ran.outcome, ran.value, ran.error, ran.stdout, ran.seconds, ran.cpu_s
