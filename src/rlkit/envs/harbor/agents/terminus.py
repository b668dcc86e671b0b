"""Terminus2 as an agent for training.

Invariant: `run` returns when the agent's loop ends, so that Harbor's verifier grades the work; `AgentEnd` has the
reason. `run` raises only environment failures, because no verifier can run then, and errors that a retry cannot fix (a
wrong configuration, a missing package). No reply is sampled twice or invented.

Differences from Harbor's Terminus2:

- A truncated turn is counted and stays in the history. It is executed if it contains a complete XML response.
- Only the policy retries requests.
- A failed summary ends the loop with the reason `overflow`; Harbor would continue with an invented reply.
- The trajectory is written once, at the end, without token ids, because the policy records them.
- The terminal is recorded only on request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol, cast, override

from harbor.agents.terminus_2.terminus_2 import Command, Terminus2, Terminus2Options
from harbor.agents.terminus_2.terminus_json_plain_parser import ParseResult
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.llms.chat import Chat
from harbor.models.agent.context import AgentContext, ModelUsage
from harbor.models.trajectories import SubagentTrajectoryRef
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import Field

from rlkit._util.json_values import safe_str
from rlkit.envs.harbor.agents.agent import AgentEnd, EnvironmentDown, PolicyAgent, Reason, count_tokens
from rlkit.envs.harbor.agents.llm import PolicyLLM
from rlkit.envs.harbor.verification.agent_records import write_record
from rlkit.errors import LimitReached, MissingError, ServiceError, UsageError

_RECORDING_POLLS = 100
_POLL_S = 0.2
"""Number and interval of polls for the recording: asciinema starts slowly on a busy machine."""
_FREE_FOR_SUMMARY_TOKENS = 4000
"""Tokens freed before a summary in a large context, in addition to the tokens of its reply (Harbor's value)."""

_FREE_TOKENS = 8000  # free tokens below which a large context is summarised (Harbor's value)

# fmt: off
_SERVICE_OPTIONS = frozenset([
    "api_base", "collect_rollout_details", "llm_backend", "llm_call_kwargs", "llm_kwargs", "max_thinking_tokens",
    "model_info", "reasoning_effort", "session_id", "session_id_headers", "suppress_max_turns_warning",
    "use_responses_api",
])
# fmt: on
"""Options of Terminus2 that have no effect with a policy."""


class PolicyOptions(Terminus2Options):
    """Options of Terminus2, and of its policy."""

    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of a reply, if lower than the run's."
    )
    reserve_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of the context reserved for a reply; null: max_tokens, at most a quarter of the context.",
    )


class PolicyTerminus2(PolicyAgent, Terminus2):
    """Terminus2 with a policy.

    It has the options of Terminus2 without those of services, and `max_tokens` and `reserve_tokens`. By default it does
    not summarise or record the terminal, and `proactive_summarization_threshold` is at most a quarter of the context.
    """

    options_model: ClassVar[type[PolicyOptions]] = PolicyOptions  # pyright: ignore[reportIncompatibleVariableOverride]
    raised_reasons: ClassVar[frozenset[Reason]] = frozenset()
    """Reasons whose error `run` raises, so that no verifier runs."""

    _policy_llm: PolicyLLM

    def __init__(self, logs_dir: Path, model_name: str | None = None, **kwargs: object) -> None:
        for name in sorted(kwargs.keys() & _SERVICE_OPTIONS):
            raise UsageError(f"agent options.{name}: has no effect with a policy")
        defaults = {"record_terminal_session": False, "enable_summarize": False, "suppress_max_turns_warning": True}
        self._free_tokens = kwargs.get("proactive_summarization_threshold")
        self._end = AgentEnd()
        self._is_truncated = False
        self._is_confirmed = False
        super().__init__(logs_dir, model_name or "policy", **cast("Any", {**defaults, **kwargs}))

    @override
    def _get_parser(self) -> _SafeParser:  # pyright: ignore[reportIncompatibleMethodOverride]  same methods
        if self.options.parser_name not in ("json", "xml"):
            raise UsageError(f"agent options: parser_name is {self.options.parser_name!r}; set json or xml")
        return _SafeParser(cast("_Parser", super()._get_parser()))

    @override
    def _init_llm(self, *args: object, **kwargs: object) -> BaseLLM:
        return cast("BaseLLM", None)  # `setup` makes it, because the policy comes later

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        options = cast("PolicyOptions", self.options)
        self._llm = self._policy_llm = PolicyLLM(
            self.policy,
            model_name=self._model_name,
            max_tokens=options.max_tokens,
            reserve_tokens=options.reserve_tokens,
            temperature=options.temperature,
        )
        await super().setup(environment)
        if self._session is not None:
            self._session.environment = cast("BaseEnvironment", _GuardedEnvironment(environment))
            if self.options.record_terminal_session:
                await self._await_recording(self._session)

    async def _await_recording(self, session: TmuxSession) -> None:
        """Wait until the terminal is being recorded: asciinema drops earlier keystrokes."""
        path = EnvironmentPaths.agent_dir / "recording.cast"
        for _ in range(_RECORDING_POLLS):
            # The first line is the header; the second has the terminal's first output.
            missing = await session.environment.exec(f"command -v asciinema && [ $(cat {path} | wc -l) -lt 2 ]")
            if missing.return_code:
                break
            await asyncio.sleep(_POLL_S)
        await session.send_keys(["clear", "Enter"], min_timeout_sec=_POLL_S)

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._end = end = AgentEnd()
        self.ends.append(end)
        self._is_truncated = self._is_confirmed = False
        turn_count = len(self.policy.turns)
        try:
            await super().run(instruction, environment, context)
        except Exception as error:
            end.record("agent_error", f"{type(error).__name__}: {safe_str(error)}", error)
            raise
        finally:
            turns = self.policy.turns
            end.llm_s = sum(turn.seconds for turn in turns[turn_count:])
            self._fill_context(context, *count_tokens(turns, turn_count))
            super()._dump_trajectory()
        if end.reason in self.raised_reasons and end.error is not None:
            raise end.error

    def _fill_context(self, context: AgentContext, prompt_tokens: int, completion_tokens: int) -> None:
        end = self._end
        context.rollout_details = None
        context.n_input_tokens, context.n_output_tokens, context.n_cache_tokens = prompt_tokens, completion_tokens, 0
        # Without it, Harbor reads the whole trajectory again.
        context.model_usage = {
            self._model_name: ModelUsage(n_input_tokens=prompt_tokens, n_output_tokens=completion_tokens)
        }
        context.metadata = {
            **(context.metadata or {}),
            "end": end.reason,
            "end_detail": end.detail,
            "parse_errors": end.parse_errors,
            "truncated_turns": end.truncated_turns,
        }

    @override
    async def _run_agent_loop(self, initial_prompt: str, chat: Chat, original_instruction: str = "") -> None:
        end = self._end
        try:
            await super()._run_agent_loop(initial_prompt, chat, original_instruction)
        except ContextLengthExceededError as error:
            end.record("overflow", str(error), error)
        except (EnvironmentDown, LimitReached, MissingError, ServiceError, UsageError) as error:
            end.record_error(error, self.logger)
        except Exception as error:
            if self._session is not None and not await self._session.is_session_alive():
                end.record("completed", "the terminal's session ended during a turn")
            else:
                end.record_error(error, self.logger)
        else:
            if self._is_confirmed:
                end.record("completed", "the model confirmed that the task is complete")
            elif self._n_episodes >= self._max_episodes:
                end.record("max_turns", f"the agent used all {self._max_episodes} turns (max_turns)")
            else:
                end.record("completed", "the terminal's session ended")

    @override
    async def _handle_llm_interaction(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        self._is_truncated = False
        result = await super()._handle_llm_interaction(chat, prompt, original_instruction, session)
        commands, complete, feedback, analysis, plan, response = result
        self._end.turns += 1
        if self._is_truncated:
            limit = self._policy_llm.get_model_output_limit()
            feedback = (
                "ERROR: NONE of the actions you just requested were performed because you exceeded "
                f"{limit} tokens. Your outputs must be less than {limit} tokens. Re-issue this request, breaking it "
                f"into chunks each of which is less than {limit} tokens."
            )
            return [], False, feedback, "", "", response
        self._end.parse_errors += "ERROR:" in feedback
        self._is_confirmed = complete and self._pending_completion and "ERROR:" not in feedback
        return commands, complete, feedback, analysis, plan, response

    @override
    async def _query_llm(  # pyright: ignore[reportIncompatibleMethodOverride]  Harbor's is wrapped in retries
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> LLMResponse:
        try:
            return await self._query_policy(chat, prompt)
        except ContextLengthExceededError:
            if not self.options.enable_summarize or session is None:
                raise
        self._unwind_messages_to_free_tokens(chat)
        handoff, self._pending_subagent_refs = await self._summarize(chat, original_instruction, session)
        self._pending_handoff_prompt = handoff
        return await self._query_policy(chat, handoff)

    async def _query_policy(self, chat: Chat, prompt: str) -> LLMResponse:
        start_time = time.time()
        try:
            return await chat.chat(prompt)
        except OutputLengthExceededError as error:
            text = error.truncated_response or ""
        finally:
            self._track_api_request_time(start_time)
        self._end.truncated_turns += 1
        chat.messages.append({"role": "user", "content": prompt})
        chat.messages.append({"role": "assistant", "content": text})
        response = cast("_SafeParser", self._parser).salvage(text)
        self._is_truncated = response is None
        return LLMResponse(content=text if response is None else response, model_name=self._model_name)

    @override
    async def _check_proactive_summarization(
        self, chat: Chat, original_instruction: str, session: TmuxSession
    ) -> tuple[str, list[SubagentTrajectoryRef] | None] | None:
        context = self._policy_llm.get_model_context_limit()
        option = self._free_tokens
        threshold = option if isinstance(option, int) else min(_FREE_TOKENS, context // 4)
        if not chat.messages or context - self._count_total_tokens(chat) >= threshold:
            return None
        try:
            return await self._summarize(chat, original_instruction, session)
        except ContextLengthExceededError:  # a turn may fit although a summary does not
            return None

    @override
    async def _summarize(
        self, chat: Chat, original_instruction: str, session: TmuxSession
    ) -> tuple[str, list[SubagentTrajectoryRef] | None]:
        if not chat.messages:
            raise ContextLengthExceededError("the first prompt alone fills the context")
        with self._policy_llm.accept_truncated_replies():
            summary = await super()._summarize(chat, original_instruction, session)
        self._end.summaries += 1
        return summary

    @override
    def _unwind_messages_to_free_tokens(self, chat: Chat, target_free_tokens: int = _FREE_FOR_SUMMARY_TOKENS) -> None:
        context = self._policy_llm.get_model_context_limit()
        target = min(target_free_tokens + self._policy_llm.reserve_tokens, context // 2)
        while len(chat.messages) > 2 and context - self._count_total_tokens(chat) < target:
            del chat.messages[-2:]

    @override
    def _count_total_tokens(self, chat: Chat) -> int:
        return self._policy_llm.count_tokens(chat.messages)

    @override
    async def _execute_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        # JSON can contain characters that cannot be sent to a terminal.
        texts = [command.keystrokes.replace("\0", "").encode(errors="replace").decode() for command in commands]
        sendable = [Command(text, command.duration_sec) for text, command in zip(texts, commands, strict=True)]
        return await super()._execute_commands(sendable, session)

    @override
    def _dump_trajectory(self) -> None:
        pass  # Harbor calls this after each turn, but `run` writes the trajectory once

    @override
    def _dump_trajectory_with_continuation_index(self, continuation_index: int) -> None:
        try:
            with self._private_logs_dir():
                super()._dump_trajectory_with_continuation_index(continuation_index)
        except OSError as error:
            self.logger.warning("no trajectory was written: %s", error)

    @override
    def _save_subagent_trajectory(self, *args: Any, **kwargs: Any) -> SubagentTrajectoryRef:
        with self._private_logs_dir():
            return super()._save_subagent_trajectory(*args, **kwargs)

    @contextmanager
    def _private_logs_dir(self) -> Generator[None]:
        """Redirect Harbor's records to a private folder, because Harbor follows links that the agent created."""
        logs = self.logs_dir
        with TemporaryDirectory(prefix="rlkit-") as private:
            self.logs_dir = Path(private)
            try:
                yield
            finally:
                self.logs_dir = logs
            for record in Path(private).iterdir():
                write_record(logs / record.name, record.read_bytes(), self.logger)


class _Parser(Protocol):
    def parse_response(self, response: str) -> ParseResult: ...


class _SafeParser:
    """Parser of Harbor that returns an error for malformed replies instead of raising."""

    def __init__(self, parser: _Parser) -> None:
        self._parser = parser

    def parse_response(self, response: str) -> ParseResult:
        """Return the commands in a reply, or the error."""
        try:
            return self._parser.parse_response(response)
        except Exception as error:  # too deeply nested brackets, malformed numbers
            return ParseResult([], False, f"The response cannot be read ({type(error).__name__})", "")

    def salvage(self, response: str) -> str | None:
        """Return the complete response at the head of a truncated reply; None if there is none, or for JSON."""
        salvage = getattr(self._parser, "salvage_truncated_response", None)
        return None if salvage is None else cast("tuple[str | None, bool]", salvage(response))[0]


class _GuardedEnvironment:
    """Environment that raises its failures as `EnvironmentDown`, to distinguish them from the agent's."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self._environment = environment

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        try:
            return await self._environment.exec(*args, **kwargs)
        except Exception as error:
            raise EnvironmentDown(f"the environment failed: {type(error).__name__}: {safe_str(error)}") from error

    def __getattr__(self, name: str) -> object:
        return getattr(self._environment, name)
