# beaker is optional.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Harbor environment that is a Beaker job with an existing image.

Invariant: a created job is cancelled, whatever happens to the trial. A job whose owner has died ends after `_IDLE_S`
without requests, and at the latest at its timeout.

Beaker cannot run a command in a running job. Therefore the job runs a small server (`beaker_agent`), which prints its
port and executes requests with its token. The trainer must be able to reach the cluster's nodes.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import tarfile
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast, override

import httpx
from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from rlkit._util.threads import in_thread
from rlkit.envs.harbor import beaker_agent
from rlkit.envs.harbor.base_environment import LimitedEnvironment
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.launch.beaker import make_client
from rlkit.launch.job import Job, Priority, make_spec
from rlkit.sandbox import CommandTimeout

if TYPE_CHECKING:
    from beaker import Beaker
    from beaker.types import BeakerWorkload

_POLL_S = 1.0
_ALIVE_S = 30.0  # interval of the heartbeats to a job
_IDLE_S = 300  # time without requests after which a job ends
_REQUEST_S = 60.0
_TOKEN_BYTES = 32


class BeakerSandbox(LimitedEnvironment):
    """Beaker job as a Harbor environment.

    Args:
        workspace: workspace of the job; the account's default workspace by default.
        image: image in place of the task's `docker_image`: `docker:NAME`, or the name of an image in Beaker.
        timeout: maximum lifetime of a job, such as `4h`.
        python: command that runs Python 3.9 or later in the image.
    """

    def __init__(
        self,
        *args: object,
        workspace: str | None = None,
        budget: str | None = None,
        clusters: list[str] | None = None,
        image: str | None = None,
        priority: Priority = "normal",
        timeout: str = "4h",
        python: str = "python3",
        **kwargs: object,
    ) -> None:
        self._workspace, self._budget, self._clusters = workspace, budget, clusters or []
        self._priority: Priority = priority
        self._chosen_image, self._timeout, self._python = image, timeout, python
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._client: httpx.AsyncClient | None = None
        self._exits = AsyncExitStack()
        """Ends the heartbeats and the requests, then cancels the job and closes the client of Beaker."""
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]  Harbor's arguments, passed through

    @staticmethod
    @override
    def type() -> str:
        return "beaker"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @override
    def _validate_definition(self) -> None:
        if not self._image:
            raise UsageError(
                f"{self.environment_dir}: Beaker cannot build images: set docker_image in the task, or "
                "environment_kwargs.image"
            )

    @property
    def _image(self) -> str | None:
        task_image = self.task_env_config.docker_image
        return self._chosen_image or (f"docker:{task_image}" if task_image else None)

    @override
    async def start(self, force_build: bool) -> None:
        await self.stop(delete=True)
        creation = asyncio.ensure_future(in_thread(self._create_job))
        try:
            beaker, workload = await asyncio.shield(creation)
            while (address := await in_thread(self._find_address, beaker, workload)) is None:  # noqa: ASYNC110  Beaker has no callback
                await asyncio.sleep(_POLL_S)  # Harbor limits the time of a start
            self.logger.debug(f"{self.session_id}: {beaker.workload.url(workload)} at {address}")
            self._client = await self._exits.enter_async_context(
                httpx.AsyncClient(
                    base_url=address,
                    headers={"Authorization": f"Bearer {self._token}"},
                    timeout=_REQUEST_S,
                    trust_env=False,
                )
            )
            await self._request("alive")
            self._exits.callback(asyncio.create_task(self._send_heartbeats()).cancel)
            await self._upload_environment_dir_after_start()
        except BaseException:
            await asyncio.shield(self._stop_after(creation))
            raise

    async def _stop_after(self, creation: asyncio.Future[tuple[Beaker, BeakerWorkload]]) -> None:
        """Wait for the creation of the job, then stop it."""
        await asyncio.wait([creation])
        await self.stop(delete=True)

    @override
    async def stop(self, delete: bool) -> None:
        self._client = None
        await self._exits.aclose()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        request = {
            "command": command,
            "cwd": cwd or self.task_env_config.workdir,
            "env": self._merge_env(env) or {},
            "timeout_s": timeout_sec,
            "user": self._resolve_user(user),
        }
        wait_s = None if timeout_sec is None else timeout_sec + _REQUEST_S
        answer = json.loads(await self._request("run", json.dumps(request).encode(), timeout_s=wait_s))
        if answer["late"]:
            raise CommandTimeout(f"a command took longer than {timeout_sec} s")
        return ExecResult(stdout=answer["out"], stderr=answer["err"], return_code=answer["code"])

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._resolve_path(target_path)
        await self._put(Path(source_path), str(target.parent), name=target.name)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._put(Path(source_dir), str(self._resolve_path(target_dir)), name=".")

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        await self._get(str(self._resolve_path(source_path)), target.parent, name=target.name)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._get(str(self._resolve_path(source_dir)), Path(target_dir), name=".")

    async def _put(self, source: Path, folder: str, *, name: str) -> None:
        archive = await in_thread(beaker_agent.pack, str(source), name)
        await self._request("put", archive, {"X-Path": folder}, timeout_s=None)

    async def _get(self, source: str, folder: Path, *, name: str) -> None:
        data = await self._request("get", b"", {"X-Path": source, "X-Name": name}, timeout_s=None)

        def unpack() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(data)) as file:
                file.extractall(folder, filter="data")  # no member can leave the folder

        await in_thread(unpack)

    async def _request(
        self,
        action: str,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float | None = _REQUEST_S,
    ) -> bytes:
        if self._client is None:
            raise EnvironmentFault(f"{self.session_id}: the job has not been started, or was stopped")
        try:
            answer = await self._client.post(f"/{action}", content=content, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise EnvironmentFault(f"{self.session_id}: the job does not respond: {type(error).__name__}") from error
        if not answer.is_success:
            raise EnvironmentFault(f"{self.session_id}: {action}: {answer.text or answer.status_code}")
        return answer.content

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_S)
            with suppress(EnvironmentFault):  # the next request raises it again
                await self._request("alive")

    def _create_job(self) -> tuple[Beaker, BeakerWorkload]:
        exits = ExitStack()
        self._exits.push_async_callback(in_thread, exits.close)
        beaker = make_client(self._workspace)
        exits.callback(beaker.close)
        from beaker.types import BeakerExperimentSpec

        job = Job(
            command=[self._python, "-c", Path(beaker_agent.__file__).read_text()],
            name="rlkit-task",
            image=cast("str", self._image),
            budget=self._budget,
            description=f"a Harbor task: {self.environment_name}",
            clusters=self._clusters,
            cpus=self._effective_cpus,
            memory=None if self._effective_memory_mb is None else f"{self._effective_memory_mb}MiB",
            priority=self._priority,
            preemptible=False,
            host_networking=True,
            timeout=self._timeout,
        )
        experiment = make_spec(job)
        (task,) = cast("list[dict[str, object]]", experiment["tasks"])
        # The token is valid only for this job; users who can see it in the job can cancel the job anyway.
        task["envVars"] = [
            {"name": "RLKIT_AGENT_TOKEN", "value": self._token},
            {"name": "RLKIT_AGENT_IDLE_S", "value": str(_IDLE_S)},
        ]
        workload = beaker.experiment.create(spec=BeakerExperimentSpec.from_json(experiment))
        exits.callback(beaker.workload.cancel, workload)
        return beaker, workload

    def _find_address(self, beaker: Beaker, workload: BeakerWorkload) -> str | None:
        """Return the address of the job's server; None if the server is not running yet."""
        job = beaker.workload.get_latest_job(workload)
        if job is None or not job.status.HasField("started"):
            if job is not None and job.status.HasField("finalized"):
                raise EnvironmentFault(f"{self.session_id}: the job ended before its start: {job.status.message}")
            return None
        for entry in beaker.job.logs(job):
            words = entry.message.decode(errors="replace").split()
            if words[:-1] == beaker_agent.READY.split():
                node = beaker.node.get(job.assignment_details.node_id)
                return f"http://{node.hostname}:{int(words[-1])}"
        if job.status.HasField("finalized"):
            raise EnvironmentFault(f"{self.session_id}: the job ended: does its image have {self._python}?")
        return None
