"""Environments of tests, which Harbor makes by their import paths."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rlkit.envs.harbor.sandbox import LocalSandbox

STOP_S = 0.5


class SlowToStop(LocalSandbox):
    """Takes its time to stop, as a container engine does."""

    stopped: ClassVar[list[str]] = []

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await asyncio.sleep(STOP_S)
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


class NeverThere(LocalSandbox):
    """Does not start."""

    async def start(self, force_build: bool) -> None:
        raise RuntimeError("the sandbox did not come up")
