"""Agents of tests, which Harbor makes by their import paths."""

from __future__ import annotations

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class Shell(BaseAgent):
    """Runs one command, whatever the task says."""

    def __init__(self, *args: object, command: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  Harbor's own
        self._command = command

    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await environment.exec(self._command, timeout_sec=60)
        (self.logs_dir / "trajectory.json").write_text('{"steps": []}')
