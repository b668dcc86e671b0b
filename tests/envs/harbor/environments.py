"""Environments of tests, which Harbor makes by their import paths."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from rlkit.envs.harbor.sandbox import LocalSandbox


class SlowToStop(LocalSandbox):
    """Takes its time to stop, as a container engine does: until `may_stop`, where that is set."""

    stopped: ClassVar[list[str]] = []
    may_stop: ClassVar[asyncio.Event | None] = None

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            if self.may_stop is not None:
                await self.may_stop.wait()
            self.stopped.append(self.session_id)
        await super().stop(delete)


class SometimesThere(LocalSandbox):
    """Does not start the first times."""

    failures: ClassVar[int] = 0

    async def start(self, force_build: bool) -> None:
        if self._failing():
            raise RuntimeError("the sandbox did not come up")
        await super().start(force_build)

    @classmethod
    def _failing(cls) -> bool:
        cls.failures -= 1
        return cls.failures >= 0


class SaysWhyNot(LocalSandbox):
    """Does not start, and says why at length, as a container engine does."""

    async def start(self, force_build: bool) -> None:
        layers = "\n".join(f"layer {number}" for number in range(100))
        raise RuntimeError(f"docker compose failed\n{layers}\nno space left on device\n\n")


class NeverThere(LocalSandbox):
    """Does not start."""

    async def start(self, force_build: bool) -> None:
        raise RuntimeError("the sandbox did not come up")


class WithoutView(LocalSandbox):
    """Gives a verifier no view of its own, as a container engine does not."""

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        self.seal_problem = "it is a container"


class Mounted(WithoutView):
    """Mounts the trial's folders of logs, as a container engine does: the agent writes to the host's."""

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=True)

    def _user_mounts(self) -> list[Any]:
        return list(self._mounts)


class NotListed(WithoutView):
    """Cannot say which processes it has."""

    async def exec(self, command: str, *args: object, **kwargs: object) -> object:
        if "list()" in command:
            return ExecResult(stdout="", stderr="no /proc", return_code=1)
        return await super().exec(command, *args, **kwargs)  # type: ignore[arg-type]


class RecordingSandbox(LocalSandbox):
    """Sandbox that records the region and the limits of each start."""

    starts: ClassVar[list[tuple[str, int | None, int | None, int | None]]] = []

    def __init__(self, *arguments: Any, region: str = "nowhere", **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._region = region

    async def start(self, force_build: bool) -> None:
        limits = (self._effective_cpus, self._effective_memory_mb, self._effective_storage_mb)
        self.starts.append((self._region, *limits))
        await super().start(force_build)
