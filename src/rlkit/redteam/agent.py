"""Harbor agent that runs the script of a cheat in the trial's environment.

Invariant: the agent never works on the task. Its trajectory file, for tests that read it, has one empty message.
"""

from __future__ import annotations

import json
from typing import cast, override

from harbor.agents.base import BaseAgent
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field

from rlkit._util.files import write_text

RECORD = "trajectory.json"
REPORT = "cheat.json"
"""File in a trial's agent folder with the exit code and output of the script."""

SCRIPT_S = 60  # time limit of a script
_OUTPUT_CHARS = 2000  # maximum recorded characters of a script's output, from its end


class _Options(AgentOptions):
    script: str = Field(description="Commands for bash.")
    variables: dict[str, str] = Field(default_factory=dict, description="Variables of the environment for it.")


class CheatingAgent(BaseAgent):
    """Agent that runs the script of a cheat, once in each step of a task."""

    options_model = _Options

    @staticmethod
    @override
    def name() -> str:
        return "rlkit-red-team"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: the agent needs no installation."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the script, and record its exit code and output."""
        options = cast("_Options", self.options)
        result = await environment.exec(
            options.script, env={**options.variables, "INSTRUCTION": instruction}, timeout_sec=SCRIPT_S
        )
        output = f"{result.stdout or ''}\n{result.stderr or ''}".strip()[-_OUTPUT_CHARS:]
        steps = [{"step_id": 1, "source": "agent", "message": ""}]
        record = {"schema_version": "ATIF-v1.4", "steps": steps}
        # Replaces the files, because the script may have left links in a mounted folder.
        write_text(self.logs_dir / RECORD, json.dumps(record))
        write_text(self.logs_dir / REPORT, json.dumps({"exit_code": result.return_code, "output": output}))
