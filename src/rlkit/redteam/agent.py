"""`CheatingAgent`: an agent of Harbor's that runs a script of the red team's in the trial's environment.

Invariant: it never works on the task. Its own record, where tests look for one, is that of an agent which said nothing
that could be read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast, override

from harbor.agents.base import BaseAgent
from harbor.agents.options import AgentOptions
from pydantic import Field

from rlkit._util.files import write_text

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.agent.context import AgentContext

RECORD = "trajectory.json"
REPORT = "cheat.json"
"""The file of a trial's agent folder that says what became of the script."""

SCRIPT_S = 60
"""Seconds that a script may take."""

_SAID = 2000
"""Characters of a script's output that are kept."""


class _Options(AgentOptions):
    script: str = Field(description="Commands for bash.")
    variables: dict[str, str] = Field(default_factory=dict, description="Variables of the environment for it.")


class CheatingAgent(BaseAgent):
    """Run the script of a cheat, once in each step of a task."""

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
        """Nothing has to be installed."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run it, and write down how it ended."""
        options = cast("_Options", self.options)
        done = await environment.exec(
            options.script, env={**options.variables, "INSTRUCTION": instruction}, timeout_sec=SCRIPT_S
        )
        said = f"{done.stdout or ''}\n{done.stderr or ''}".strip()[-_SAID:]
        steps = [{"step_id": 1, "source": "agent", "message": ""}]
        record = {"schema_version": "ATIF-v1.4", "steps": steps}
        # Written as new files: in a folder that is mounted, the script may have left links in their places.
        write_text(self.logs_dir / RECORD, json.dumps(record))
        write_text(self.logs_dir / REPORT, json.dumps({"exit_code": done.return_code, "said": said}))
