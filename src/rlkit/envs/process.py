"""`ProcessEnv`: a task whose agent is a program, with a client of its own for the model.

Invariant: the grader alone gives a reward, after a program that its model answered or a limit refused. However an
episode ends, no file is left, and no process except those that leave the process group of a program without a sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from rlkit._util.sections import Positive, check_fields
from rlkit._util.stopwatch import Stopwatch, current_stopwatches, use_stopwatches
from rlkit._util.threads import in_sandbox_thread as in_thread
from rlkit.endpoint import open_endpoint
from rlkit.env import Env
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Policy
from rlkit.sandbox import Limits, Sandbox, Spec, image
from rlkit.sandbox.files import SourceMissing
from rlkit.sandbox.inside.job import CANNOT_START
from rlkit.sandbox.sandbox_folders import remove_folder
from rlkit.sandbox.streams import Stream
from rlkit.types import Outcome

SANDBOX_FOLDER = "/run/task"
"""Folder of a program in a sandbox; `host_folders` are elsewhere."""

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables of the run that a program without a sandbox gets; it needs no keys."""

type _Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
type _VariableName = Annotated[str, Field(pattern=r"^[^=\x00]+$")]


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """A program that has ended.

    Args:
        exit_code: 128 plus the number of the signal that ended it; None if it was killed at the time limit.
        folder: its folder, or the copy of that of a sandbox; removed when the grader has returned.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class ProcessEnv(Env):
    """A program that works on a task, with the policy as its model.

    It finds the policy's endpoint in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; each
    request is a turn. If it is killed at the time limit, or turns or context run out, its work is graded, and the
    episode is truncated. A program without a turn fails the episode.

    Args:
        argv: the program and its arguments.
        grade: returns the outcome or reward of a result; an ordinary or a coroutine function.
        task_id: name of the task in records; by default the draw.
        content: text of the task, to keep evaluated tasks out of training; None if it has none.
        files: contents by path in the program's folder; a file that begins with `#!` is executable.
        variables: further environment variables.
        timeout_s: time limit of the program; outages of the service do not count.
        output_bytes: bytes kept of each output stream.
        folder_bytes: size of the files in a sandbox's folder; more fails the episode.
        sandbox: run in a local sandbox that reaches the endpoint only; otherwise in a temporary folder of the host.
        limits: limits of the sandbox.
        host_folders: folders of the host that the sandbox shows, besides the system's programs.
    """

    argv: Annotated[Sequence[_Text], Field(min_length=1)]
    grade: Callable[[ProcessResult], Outcome | float | Awaitable[Outcome | float]]
    task_id: str | None = None
    content: str | None = None
    files: Mapping[_Text, str | bytes] = field(default_factory=dict[str, str | bytes])
    variables: Mapping[_VariableName, _Text] = field(default_factory=dict[str, str])
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    output_bytes: Positive = 1 << 20
    folder_bytes: Positive = 256 << 20
    sandbox: bool = True
    limits: Limits | None = None
    host_folders: Sequence[str] = ()

    stochastic = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise UsageError(f"files: {name!r} is not a path inside the program's folder")
            if not self.files.keys().isdisjoint(map(str, path.parents)):
                raise UsageError(f"files: {name!r} is below another file")
        for name, value in (("limits", self.limits), ("host_folders", self.host_folders)):
            if value and not self.sandbox:
                raise UsageError(f"{name} has no effect without a sandbox: leave it out, or set sandbox=True")

    async def rollout(self, policy: Policy) -> Outcome:
        """Run the program, and grade its work.

        Raises:
            EnvironmentFault: the program could not be started, its model never answered it, or its sandbox failed.
        """
        turn_count = len(policy.turns)
        async with _make_temporary_folder() as folder:
            stopwatch = Stopwatch()
            await in_thread(self._write_files, folder)
            with use_stopwatches({*current_stopwatches(), stopwatch}):
                async with open_endpoint(policy) if self.sandbox else policy.endpoint() as endpoint:
                    variables = {**endpoint.variables, **self.variables}
                    if self.sandbox:
                        port = urlsplit(endpoint.root).port or 0
                        result = await self._play_in_sandbox(folder, variables, port, stopwatch)
                    else:
                        result = await self._play_on_host(folder, variables, stopwatch)
            if len(policy.turns) == turn_count and endpoint.limit is None:
                ending = "time limit" if result.exit_code is None else f"exit code {result.exit_code}"
                stderr = result.stderr[-1000:].strip() or "no stderr"
                raise EnvironmentFault(f"the program ended without a reply of its model ({ending}): {stderr}")
            grade = self.grade(result)
            grade = await grade if inspect.isawaitable(grade) else grade
        outcome = grade if isinstance(grade, Outcome) else Outcome(grade)
        return replace(outcome, truncated=outcome.truncated or result.exit_code is None or endpoint.limit is not None)

    def _write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path, data = folder / name, content.encode() if isinstance(content, str) else content
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if data.startswith(b"#!") else 0o644)

    async def _play_in_sandbox(
        self, folder: Path, variables: Mapping[str, str], port: int, stopwatch: Stopwatch
    ) -> ProcessResult:
        base = await in_thread(lambda: image.base(image.HOST, folders=tuple(self.host_folders)))
        spec = Spec(trees=image.trees(base), folders={SANDBOX_FOLDER: 0o755}, limits=self.limits or Limits())
        output = {"stdout": bytearray(), "stderr": bytearray()}

        async def keep(data: bytes, stream: str) -> None:
            output[stream] += data

        sandbox = await Sandbox.start(spec)
        try:
            await sandbox.put(folder, SANDBOX_FOLDER)
            async with sandbox.forward_port(port):
                running = sandbox.run(
                    self.argv, cwd=SANDBOX_FOLDER, env=variables, output_bytes=self.output_bytes, on_output=keep
                )
                completed = await self._wait(running, stopwatch)
            if completed and completed.exit_code == CANNOT_START and completed.stderr != bytes(output["stderr"]):
                raise EnvironmentFault(f"argv: {completed.stderr.decode(errors='replace').strip()}")
            await in_thread(remove_folder, folder)
            await sandbox.kill_processes()  # a background process could change files while they are copied
            with suppress(SourceMissing):
                await sandbox.get(SANDBOX_FOLDER, folder, folder=True, max_bytes=self.folder_bytes)
        finally:
            await sandbox.stop()
        stdout, stderr = (stream.decode(errors="replace") for stream in output.values())
        return ProcessResult(completed and completed.exit_code, stdout, stderr, folder)

    async def _play_on_host(self, folder: Path, variables: Mapping[str, str], stopwatch: Stopwatch) -> ProcessResult:
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ} | {**variables}
        streams = [Stream(name, self.output_bytes, None) for name in ("stdout", "stderr")]
        ends = [stream.write_end for stream in streams]
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv, cwd=folder, env=env, stdin=DEVNULL, stdout=ends[0], stderr=ends[1], start_new_session=True
            )
            try:
                for stream in streams:
                    stream.begin()
                code = await self._wait(process.wait(), stopwatch)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            for stream in streams:
                await stream.finish()
        except OSError as error:
            raise EnvironmentFault(f"argv: {error.strerror}: {error.filename}") from error
        finally:
            for stream in streams:
                stream.close()
        await in_thread(_restore_folder, folder)
        stdout, stderr = (stream.content.decode(errors="replace") for stream in streams)
        return ProcessResult(code if code is None or code >= 0 else 128 - code, stdout, stderr, folder)

    async def _wait[T](self, running: Coroutine[object, object, T], stopwatch: Stopwatch) -> T | None:
        """Return the result of a program; None if it was killed at the time limit."""
        task = asyncio.create_task(running)
        try:
            is_late = await stopwatch.wait_for_limit(stopwatch.played_s + self.timeout_s, task)
            return None if is_late else task.result()
        finally:
            task.cancel()  # without effect on a finished one
            await asyncio.wait([task])


@asynccontextmanager
async def _make_temporary_folder() -> AsyncGenerator[Path]:
    """Make a folder for a program, and remove it at the end of the block with whatever the program wrote there."""
    folder = Path(mkdtemp(prefix="rlkit-"))
    try:
        yield folder
    finally:
        with suppress(OSError):  # a machine without free processes must not discard the reward
            await asyncio.shield(in_thread(remove_folder, folder))


def _restore_folder(folder: Path) -> None:
    """Make an empty folder if the program has removed or replaced its own."""
    if not folder.is_dir():
        remove_folder(folder)
        folder.mkdir()
