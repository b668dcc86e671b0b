# beaker and grpc are optional.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""A fake of Beaker's servers, at the network: what beaker-py sends to it is what it would send to Beaker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlkit.sandbox import CompletedCommand, Sandbox, Spec, image

WORKLOAD = "01HZZZZZZZZZZZZZZZZZZZZZZZ"


@dataclass
class FakeBeaker:
    """Takes experiments and plays their jobs, one after the other.

    Args:
        jobs: what each prints, line by line; all but the last were preempted.
        ends: how the last one ends.
        execute: run the command of a job here, instead of playing it.
        contain: and in a sandbox, which has files of its own as a container has.
    """

    jobs: list[list[str]] = field(default_factory=lambda: [["hello"]])
    ends: str = "succeeded"
    token: str = "the-token"
    submitted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    address: str = ""
    rpc_address: str = ""
    played: int = 0
    execute: bool = False
    contain: bool = False
    process: subprocess.Popen[bytes] | None = None
    cancelled: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _sandbox: Sandbox | None = None
    _running: asyncio.Task[CompletedCommand] | None = None

    @property
    def over(self) -> bool:
        """True if a job has ended."""
        if self._running is not None:
            return self._running.done()
        return self.process is not None and self.process.poll() is not None

    async def create(self, request: Request) -> Response:
        """`POST /api/v3/workspaces/ID/experiments`."""
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"message": "who are you?"}, 401)
        spec = await request.json()
        place = {"workspace": request.path_params["workspace"], "name": request.query_params.get("name")}
        self.submitted.append({**place, "spec": spec})
        if self.contain:
            await self._run_contained(spec["tasks"][0])
        elif self.execute:
            self._run(spec["tasks"][0])
        return JSONResponse({"id": WORKLOAD})

    def _run(self, task: dict[str, Any]) -> None:
        """Run a job as a process of this machine."""
        variables = {variable["name"]: variable["value"] for variable in task.get("envVars", [])}
        self.process = subprocess.Popen(
            [*task["command"], *task["arguments"]],
            env={"PATH": os.environ["PATH"], **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.jobs = [[]]
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    async def _run_contained(self, task: dict[str, Any]) -> None:
        """Run a job in a sandbox with this machine's programs."""
        self._loop = asyncio.get_running_loop()
        self._sandbox = await Sandbox.start(Spec(trees=image.trees(image.base("host")), network=True))
        self.jobs = [[]]

        async def record_output(data: bytes, stream: str) -> None:
            self.jobs[0] += data.decode().splitlines()

        variables = {variable["name"]: variable["value"] for variable in task.get("envVars", [])}
        command = [*task["command"], *task["arguments"]]
        self._running = asyncio.create_task(self._sandbox.run(command, env=variables, on_output=record_output))

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.jobs[0].append(line.decode().rstrip("\n"))

    def kill(self) -> None:
        """End the job, as Beaker does on cancellation."""
        self.cancelled += 1
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._sandbox is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(self._sandbox), self._loop).result()

    async def _end(self, sandbox: Sandbox) -> None:
        await sandbox.stop()
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running.exception()  # that it is gone, which is known

    def config(self, path: Path) -> Path:
        """A configuration file of Beaker's that names this server."""
        path.write_text(
            f"user_token: {self.token}\nagent_address: {self.address}\nrpc_address: {self.rpc_address}\n"
            "default_workspace: me/mine\n"
        )
        return path


def _servicer(fake: FakeBeaker) -> object:
    from beaker import beaker_pb2 as pb2
    from beaker import beaker_pb2_grpc

    class Servicer(beaker_pb2_grpc.BeakerServicer):
        def ResolveWorkspaceName(self, request: Any, context: Any) -> Any:  # noqa: N802  Beaker's own name
            return pb2.ResolveWorkspaceNameResponse(workspace_id=f"{request.owner_name}-{request.workspace_name}")

        def ResolveOrganizationName(self, request: Any, context: Any) -> Any:  # noqa: N802
            return pb2.ResolveOrganizationNameResponse(organization_id=request.organization_name)

        def GetWorkload(self, request: Any, context: Any) -> Any:  # noqa: N802
            over = fake.played >= len(fake.jobs)
            status = f"STATUS_{fake.ends.upper()}" if over else "STATUS_RUNNING"
            workload = pb2.Workload(status=pb2.WorkloadStatus.Value(status))
            workload.experiment.id = WORKLOAD
            workload.experiment.tasks.add(id="task")
            return pb2.GetWorkloadResponse(workload=workload)

        def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
            return pb2.ListJobsResponse(jobs=[self._job(f"job-{min(fake.played, len(fake.jobs) - 1)}")])

        def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
            return pb2.GetJobResponse(job=self._job(request.job_id))

        def StreamJobLogs(self, request: Any, context: Any) -> Any:  # noqa: N802
            for line in fake.jobs[int(request.job_id.removeprefix("job-"))]:
                yield pb2.JobLog(message=f"{line}\n".encode())
            if not fake.execute:
                fake.played = int(request.job_id.removeprefix("job-")) + 1

        def GetNode(self, request: Any, context: Any) -> Any:  # noqa: N802
            return pb2.GetNodeResponse(node=pb2.Node(id=request.node_id, hostname="127.0.0.1"))

        def CancelWorkloads(self, request: Any, context: Any) -> Any:  # noqa: N802
            fake.kill()
            return pb2.CancelWorkloadsResponse(workload_ids=request.workload_ids)

        def _job(self, identity: str) -> Any:
            job = pb2.Job(id=identity)
            job.assignment_details.node_id = "node"
            job.status.started.GetCurrentTime()
            if fake.over:
                job.status.finalized.GetCurrentTime()
            if int(identity.removeprefix("job-")) < fake.played:
                job.status.finalized.GetCurrentTime()
            return job

    return Servicer()


@contextmanager
def fake_beaker(fake: FakeBeaker) -> Generator[FakeBeaker]:
    """The fake, listening."""
    import grpc
    from beaker import beaker_pb2_grpc

    rpc = grpc.server(ThreadPoolExecutor(4))
    beaker_pb2_grpc.add_BeakerServicer_to_server(_servicer(fake), rpc)
    fake.rpc_address = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    route = Route("/api/v3/workspaces/{workspace}/experiments", fake.create, methods=["POST"])
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=[route]), host="127.0.0.1", port=0, log_config=None, access_log=False)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    fake.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join()
    rpc.stop(0).wait()
