"""Tasks of verifiers, and the process that plays them.

Invariant: verifiers is never imported here. Its own rubric gives the reward; a rollout that it did not score fails. A
process that died is started again by the next rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE

from pydantic import TypeAdapter

from rlkit.env import Env
from rlkit.envs.verifiers.installation import Installation
from rlkit.errors import EnvironmentFault
from rlkit.policy import Policy
from rlkit.types import Json, Outcome
from rlkit.workers.resource import WorkerResource

REPORT_BYTES = 16 << 20
STOP_S = 10.0
_REPORT = TypeAdapter[Outcome | str](Outcome | str)


@dataclass(frozen=True)
class VerifiersTask(Env):
    """A row of a taskset, `data` in verifiers' format, and the process that plays it."""

    task_id: str
    data: Mapping[str, Json]
    process: WorkerResource[VerifiersProcess]
    max_reward = float("inf")

    @property
    def content(self) -> str:
        """The row without its index."""
        return json.dumps({name: value for name, value in self.data.items() if name != "idx"}, sort_keys=True)

    async def rollout(self, policy: Policy) -> Outcome:
        """Let verifiers play and score the task; EnvironmentFault with the name of its error if it cannot."""
        process = await self.process.get()
        async with policy.endpoint() as endpoint:
            return await process.play({"task": self.data, "url": endpoint.url, "key": endpoint.key})


class VerifiersProcess:
    """Process with one environment; it starts with its first rollout, and listens at a socket."""

    def __init__(self, installation: Installation, config: str, path: Path) -> None:
        self._installation = installation
        self._config = config
        self._path = path
        self._log = installation.folder / "log"
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def play(self, request: Mapping[str, Json]) -> Outcome:
        """Play a rollout."""
        await self._start()
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=REPORT_BYTES)
            with closing(writer):
                writer.write(json.dumps(request).encode() + b"\n")
                report = _REPORT.validate_json(await reader.readline())
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"ProcessError: verifiers sent no report, see {self._log}") from error
        if isinstance(report, str):
            raise EnvironmentFault(report)
        return report

    async def aclose(self) -> None:
        """End the process with all its rollouts."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    async def _start(self) -> None:
        """Start the process if it does not run; it inherits a socket that listens already."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            self._path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener, self._log.open("ab") as log:
                listener.bind(str(self._path))
                listener.listen(socket.SOMAXCONN)
                command = self._installation.make_command("serve", self._config, str(listener.fileno()))
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._installation.make_variables(),
                    pass_fds=[listener.fileno()],
                    process_group=0,
                )


@asynccontextmanager
async def _open_process(installation: Installation, config: str) -> AsyncGenerator[VerifiersProcess]:
    with tempfile.TemporaryDirectory(prefix="rlkit-") as folder:
        async with aclosing(VerifiersProcess(installation, config, Path(folder) / "socket")) as process:
            yield process


@cache
def share_process(installation: Installation, config: str) -> WorkerResource[VerifiersProcess]:
    """Return the process of an environment, the same for its training and its evaluation."""
    return WorkerResource(partial(_open_process, installation, config), key=f"{installation} {config}")
