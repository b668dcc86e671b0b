"""Base of rlkit's own environments for Harbor."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentResourceCapabilities


class OwnEnvironment(BaseEnvironment):
    """An environment that limits processors and memory."""

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _absolute(self, path: str, *, workdir: str | None = None) -> PurePosixPath:
        """A path from the task's folder of work, or else from that of the image."""
        return PurePosixPath(self.task_env_config.workdir or workdir or "/") / path


def result(out: bytes, err: bytes, code: int) -> ExecResult:
    """What a command printed, as text, and its exit code."""
    return ExecResult(stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=code)
