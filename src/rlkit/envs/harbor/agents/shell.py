"""`ShellAgent`: one command per turn, for models that are too small for Terminus2's prompts and JSON.

Invariant: messages are only appended to the conversation, so each prompt extends the exact tokens of the previous turn.
`run` returns however the loop ends, so Harbor's verifier grades the work, and `AgentEnd` has the reason. It raises only
environment failures and errors that a retry cannot fix.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from typing import Annotated, ClassVar, Self, cast, override

from harbor.agents.base import BaseAgent
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field, model_validator

from rlkit._util.json_values import safe_str
from rlkit.envs.harbor.agents.agent import AgentEnd, EnvironmentDown, PolicyAgent, count_tokens, limit_reply
from rlkit.envs.harbor.agents.commands import (
    END_WORD,
    END_WORDS,
    NO_OUTPUT,
    make_command_script,
    make_observation,
    read_command,
    split_output,
)
from rlkit.envs.harbor.verification.agent_records import write_record
from rlkit.policy import Policy
from rlkit.sandbox import CommandTimeout
from rlkit.types import Message, Reply

SYSTEM_PROMPT = "You work in a Linux shell. Reply with one command and nothing else. Reply exit when the task is done."

ONE_TURN_PROMPT = "You work in a Linux shell. Reply with one command and nothing else."
"""The system prompt for a single turn: a task ends with its command, without an `exit`."""

TRANSCRIPT = "transcript.jsonl"  # file in the agent's logs, with a message on each line


type Example = Annotated[list[str], Field(min_length=2)]


class ShellOptions(AgentOptions):
    """The options of `ShellAgent`."""

    max_turns: int | None = Field(
        default=None, ge=1, description="Replies of the model in each step of a task; by default limited by time only."
    )
    system_prompt: str | None = Field(
        default=None, description="The first message; empty for none, null for the default."
    )
    examples: list[Example] = Field(
        default_factory=list["Example"],
        description="Worked examples: an instruction, followed by commands that carry it out and print nothing.",
    )
    output_chars: int = Field(default=2000, ge=1, description="Maximum characters of a command's output shown.")
    command_timeout_s: int = Field(default=30, ge=1, description="Seconds that a command may take.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of a reply, if lower than the run's."
    )
    temperature: float | None = Field(default=None, ge=0, description="Temperature, instead of the run's.")

    @model_validator(mode="after")
    def _check_examples(self) -> Self:
        for index, (_, *commands) in enumerate(self.examples):
            if self.max_turns is not None and len(commands) > self.max_turns:
                raise ValueError(f"examples.{index}: {len(commands)} commands, and max_turns is {self.max_turns}")
        return self


class ShellAgent(PolicyAgent, BaseAgent):
    """An agent that runs one command per turn and shows the model its output.

    The command is a reply's first fenced block, or its first line if there is none. `exit`, `done` and an empty reply
    end the episode. Each command runs in a new shell, in the final directory of the previous command.
    """

    options_model: ClassVar[type[AgentOptions] | None] = ShellOptions

    @staticmethod
    @override
    def name() -> str:
        return "shell"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        end, turn_count = AgentEnd(), len(self.policy.turns)
        self.ends.append(end)
        episode = _Episode(self.policy, environment, cast("ShellOptions", self.options), end)
        try:
            await episode.play(instruction)
        except Exception as error:
            end.record_error(error, self.logger)
        finally:
            end.count_turns(self.policy.turns[turn_count:])
            context.n_input_tokens, context.n_output_tokens = count_tokens(self.policy.turns, turn_count)
            context.n_cache_tokens = 0
            context.metadata = {"end": end.reason, "end_detail": end.detail}
            lines = "".join(f"{json.dumps(message)}\n" for message in episode.messages)
            write_record(self.logs_dir / TRANSCRIPT, lines.encode(), self.logger)


class _Episode:
    """Conversation with the policy, and its shell."""

    def __init__(self, policy: Policy, environment: BaseEnvironment, settings: ShellOptions, end: AgentEnd) -> None:
        self.messages: list[Message] = []
        self._policy, self._environment, self._settings, self._end = policy, environment, settings, end
        self._max_tokens, self._room = limit_reply(policy, settings.max_tokens)
        self._folder = ""
        self._mark = uuid.uuid4().hex

    async def play(self, instruction: str) -> None:
        """Play until the policy ends the episode or no turns are left."""
        self.messages = _make_opening(self._settings, instruction)
        limit = self._settings.max_turns
        for _ in range(limit) if limit else itertools.count():
            reply = await self._policy.chat(
                self.messages,
                max_tokens=self._max_tokens,
                temperature=self._settings.temperature,
                min_reply_tokens=self._room,
            )
            self.messages.append(reply.message)
            if (observation := await self._execute(reply)) is None:
                return
            self.messages.append({"role": "user", "content": observation})
        if limit == 1:  # not truncated: a single command is the whole episode
            self._end.record("completed", "the agent used its only turn")
        else:
            self._end.record("max_turns", f"the agent used all {limit} turns (max_turns)")

    async def _execute(self, reply: Reply) -> str | None:
        """Execute a reply, and return the observation; None if the reply ends the episode."""
        if reply.truncated:
            return f"(nothing was run: the reply was cut off after {len(reply.turn.completion)} tokens)"
        command = read_command(reply.text)
        if command is None:
            self._end.parse_errors += 1
            return "(nothing was run: the reply holds no command)"
        if command in END_WORDS:
            detail = f"the model said {command!r}" if command else "the model said nothing more"
            self._end.record("completed", detail)
            return None
        return await self._run(command)

    async def _run(self, command: str) -> str:
        limit_s = self._settings.command_timeout_s
        script = make_command_script(command, folder=self._folder, mark=self._mark)
        start_s = time.monotonic()
        try:
            execution = await self._environment.exec(script, timeout_sec=limit_s)
        except Exception as error:
            if _is_command_timeout(error, limit_s=limit_s, elapsed_s=time.monotonic() - start_s):
                return f"(the command was ended after {limit_s} s)"
            raise EnvironmentDown(f"the environment failed: {type(error).__name__}: {safe_str(error)}") from error
        output, folder = split_output((execution.stdout or "") + (execution.stderr or ""), mark=self._mark)
        self._folder = self._folder if folder is None else folder
        return make_observation(output, execution.return_code, max_chars=self._settings.output_chars)


def _is_command_timeout(error: Exception, *, limit_s: int, elapsed_s: float) -> bool:
    """Return whether an environment reports that the command exceeded its time limit.

    Environments have no common exception for it: Harbor's engines raise a `RuntimeError` that begins with these words.
    A `TimeoutError` before the limit comes from the environment's connection.
    """
    if isinstance(error, CommandTimeout):
        return True
    if isinstance(error, TimeoutError):
        return elapsed_s >= limit_s
    words = rf"(oc )?command timed out after {limit_s} seconds"
    return type(error) is RuntimeError and re.match(words, str(error), re.IGNORECASE) is not None


def _make_opening(settings: ShellOptions, instruction: str) -> list[Message]:
    messages: list[Message] = []
    one_turn = settings.max_turns == 1
    default = ONE_TURN_PROMPT if one_turn else SYSTEM_PROMPT
    if system := default if settings.system_prompt is None else settings.system_prompt:
        messages.append({"role": "system", "content": system})
    for task, *commands in settings.examples:
        messages.append({"role": "user", "content": task})
        for command in commands:
            messages.append({"role": "assistant", "content": command})
            if not one_turn:
                messages.append({"role": "user", "content": NO_OUTPUT})
        if not one_turn:
            messages.append({"role": "assistant", "content": END_WORD})
    messages.append({"role": "user", "content": instruction.strip()})
    return messages
