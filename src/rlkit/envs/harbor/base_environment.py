"""Base class of rlkit's environments for Harbor."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import override

from harbor.environments.base import BaseEnvironment
from harbor.environments.capabilities import EnvironmentResourceCapabilities


class LimitedEnvironment(BaseEnvironment):
    """An environment that limits processors and memory."""

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _resolve_path(self, path: str, *, workdir: str | None = None) -> PurePosixPath:
        """Return an absolute path, relative to the task's working directory or else to the image's."""
        return PurePosixPath(self.task_env_config.workdir or workdir or "/") / path
