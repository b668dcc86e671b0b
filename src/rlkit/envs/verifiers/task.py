"""Tasks of verifiers, and the process that plays them.

Invariant: verifiers is never imported here. Its own rubric gives the reward; a rollout that it did not score fails. A
process that died is started again by the next rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
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
_POLL_S = 0.05
_REPORT = TypeAdapter[Outcome | str](Outcome | str)


@dataclass(frozen=True)
class VerifiersTask(Env):
    """A row of a taskset, `data` in verifiers' format, and the process that plays it."""

    task_id: str
    data: Mapping[str, Json]
    process: WorkerResource[VerifiersProcess]

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

    def __init__(self, installation: Installation, config: str, socket: Path) -> None:
        self._installation = installation
        self._config = config
        self._socket = socket
        self._log = installation.folder / "log"
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def play(self, request: Mapping[str, Json]) -> Outcome:
        """Play a rollout."""
        reader, writer = await self._connect()
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            report = _REPORT.validate_json(await reader.readline())
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"ProcessError: verifiers sent no report, see {self._log}") from error
        finally:
            writer.close()
        if isinstance(report, str):
            raise EnvironmentFault(report)
        return report

    async def close(self) -> None:
        """End the process with all its rollouts."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        has_started = False
        async with self._starting:
            while self._is_running or not has_started:
                if not self._is_running:
                    self._process, has_started = await self._start(), True
                with suppress(OSError):  # it does not listen yet, or is about to end
                    return await asyncio.open_unix_connection(self._socket, limit=REPORT_BYTES)
                await asyncio.sleep(_POLL_S)
        raise EnvironmentFault(f"ProcessError: verifiers does not start, see {self._log}")

    async def _start(self) -> asyncio.subprocess.Process:
        self._socket.unlink(missing_ok=True)
        command = self._installation.make_command("serve", self._config, str(self._socket))
        variables = self._installation.make_variables()
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=log, stderr=log, env=variables, process_group=0
            )


@asynccontextmanager
async def _open_process(installation: Installation, config: str) -> AsyncGenerator[VerifiersProcess]:
    with tempfile.TemporaryDirectory(prefix="rlkit-") as folder:
        process = VerifiersProcess(installation, config, Path(folder) / "socket")
        try:
            yield process
        finally:
            await process.close()


@cache
def share_process(installation: Installation, config: str) -> WorkerResource[VerifiersProcess]:
    """Return the process of an environment, the same for its training and its evaluation."""
    return WorkerResource(partial(_open_process, installation, config), key=f"{installation} {config}")
