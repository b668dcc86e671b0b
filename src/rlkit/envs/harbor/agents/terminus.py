"""Terminus2 as an agent that is trained.

Invariant: whatever ends the agent's loop ends it cleanly: `run` returns, so that Harbor's verifier grades what is
there, and `AgentEnd` says why. Raised are a failure of the environment, under which no verifier can run, and what no
repetition mends: a configuration that is wrong, or a part that is not installed. Nothing is sampled twice, and no
reply is made up.

What differs from Harbor's own: a turn that is cut off is a turn, counted and in the history, and one with a whole XML
response in it is carried out; there are no retries over the policy's own; a summary that fails ends the loop as an
overflow, where Harbor would go on with a reply that nobody gave; the trajectory is written once, at the end, without
token ids, since the policy keeps the record; the terminal is not recorded unless that is asked for.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, override

from harbor.agents.terminus_2.terminus_2 import Command, Terminus2, Terminus2Options
from harbor.agents.terminus_2.terminus_json_plain_parser import ParseResult
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.agent.context import AgentContext, ModelUsage
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import Field

from rlkit._util.json_values import safe_str
from rlkit.envs.harbor.agents.agent_end import EnvironmentDown, Reason, Tally
from rlkit.envs.harbor.agents.llm import PolicyLLM
from rlkit.envs.harbor.verification.agent_records import write_record
from rlkit.errors import LimitReached, MissingError, ServiceError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from harbor.agents.terminus_2.tmux_session import TmuxSession
    from harbor.llms.chat import Chat
    from harbor.models.trajectories import SubagentTrajectoryRef

_RECORDING_LOOKS = 100
_LOOK_S = 0.2
"""So often, and so far apart, the recording is looked for: asciinema starts slowly on a busy machine."""

_FREE_FOR_SUMMARY_TOKENS = 4000
"""What is freed before a summary, besides the room for its reply, where the context is large; Harbor's number."""

_FREE_TOKENS = 8000
"""Fewer free tokens than this bring about a summary, where the context is large; Harbor's number."""

# fmt: off
_OF_HARBOR = frozenset([
    "environment_logs_dir", "extra_env", "load_trajectory", "logger", "mcp_servers", "override_setup_timeout_sec",
    "skills_dir",
])
"""What Harbor itself gives to an agent."""

_OF_SERVICES = frozenset([
    "api_base", "collect_rollout_details", "llm_backend", "llm_call_kwargs", "llm_kwargs", "max_thinking_tokens",
    "model_info", "reasoning_effort", "session_id", "session_id_headers", "suppress_max_turns_warning",
    "use_responses_api",
])
# fmt: on
"""Options of Terminus2 that a policy has no use for."""


class PolicyOptions(Terminus2Options):
    """Terminus2's options, and those of a policy in it."""

    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a reply; less than the run's, if given.")
    reserve_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Room that the context must have for a reply; null for max_tokens, or a quarter.",
    )


class PolicyTerminus2(Terminus2):
    """Terminus2 over a policy, which a subclass provides as `_init_llm`.

    Options are Terminus2's, without those of services, and `max_tokens` and `reserve_tokens`. Unlike there, summaries
    and the recording of the terminal are off unless asked for, and `proactive_summarization_threshold` is at most a
    quarter of the context unless given.
    """

    options_model: ClassVar[type[PolicyOptions]] = PolicyOptions  # pyright: ignore[reportIncompatibleVariableOverride]
    raised: ClassVar[frozenset[Reason]] = frozenset()
    """Ends that are raised after all, so that no verifier runs."""

    _policy_llm: PolicyLLM

    def __init__(self, logs_dir: Path, model_name: str | None = None, **kwargs: object) -> None:
        known = set(self.options_model.model_fields) - _OF_SERVICES
        for name in sorted(kwargs.keys() - known - _OF_HARBOR):
            why = "has no effect with a policy" if name in _OF_SERVICES else "is unknown"
            raise UsageError(f"agent option {name!r} {why}.{did_you_mean(name, known)}")
        ours = {"record_terminal_session": False, "enable_summarize": False, "suppress_max_turns_warning": True}
        self._free_tokens = kwargs.get("proactive_summarization_threshold")
        self.tallies: list[Tally] = []
        self._tally = Tally()
        self._cut = False
        self._confirmed = False
        super().__init__(logs_dir, model_name or "policy", **cast("Any", {**ours, **kwargs}))

    @classmethod
    @override
    def parse_options(cls, kwargs: dict[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Any:
        try:
            return super().parse_options(kwargs, env)
        except ValueError as error:
            lines = [line.strip() for line in str(error).splitlines()]
            raise UsageError("agent options: " + "; ".join(lines[1:-1])) from None

    @override
    def _get_parser(self) -> _Reader:  # pyright: ignore[reportIncompatibleMethodOverride]  it does what is asked of one
        if self.options.parser_name not in ("json", "xml"):
            raise UsageError(f"agent options: parser_name is {self.options.parser_name!r}; give json or xml")
        return _Reader(cast("_Parser", super()._get_parser()))

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        await super().setup(environment)
        if self._session is not None:
            self._session.environment = cast("BaseEnvironment", _Machine(environment))
            if self.options.record_terminal_session:
                await self._recording(self._session)

    async def _recording(self, session: TmuxSession) -> None:
        """Wait until the terminal is recorded: asciinema drops what is typed before."""
        path = EnvironmentPaths.agent_dir / "recording.cast"
        for _ in range(_RECORDING_LOOKS):
            # a line that says what it is, and one for what the terminal showed first
            late = await session.environment.exec(f"command -v asciinema && [ $(cat {path} | wc -l) -lt 2 ]")
            if late.return_code:
                break
            await asyncio.sleep(_LOOK_S)
        await session.send_keys(["clear", "Enter"], min_timeout_sec=_LOOK_S)

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._tally = tally = Tally()
        self.tallies.append(tally)
        self._cut = self._confirmed = False
        llm = self._policy_llm
        before = (llm.seconds, llm.prompt_tokens, llm.completion_tokens)
        try:
            await super().run(instruction, environment, context)
        except Exception as error:
            tally.ended("agent_error", f"{type(error).__name__}: {safe_str(error)}", error)
            raise
        finally:
            tally.llm_s = llm.seconds - before[0]
            self._told(context, llm.prompt_tokens - before[1], llm.completion_tokens - before[2])
            super()._dump_trajectory()
        if tally.reason in self.raised and tally.error is not None:
            raise tally.error

    def _told(self, context: AgentContext, prompt_tokens: int, completion_tokens: int) -> None:
        tally = self._tally
        context.rollout_details = None
        context.n_input_tokens, context.n_output_tokens, context.n_cache_tokens = prompt_tokens, completion_tokens, 0
        # said here, or Harbor would read the whole trajectory again for it
        context.model_usage = {
            self._model_name: ModelUsage(n_input_tokens=prompt_tokens, n_output_tokens=completion_tokens)
        }
        context.metadata = {
            **(context.metadata or {}),
            "end": tally.reason,
            "end_detail": tally.detail,
            "parse_errors": tally.parse_errors,
            "truncated_turns": tally.truncated_turns,
        }

    @override
    async def _run_agent_loop(self, initial_prompt: str, chat: Chat, original_instruction: str = "") -> None:
        tally = self._tally
        try:
            await super()._run_agent_loop(initial_prompt, chat, original_instruction)
        except (EnvironmentDown, UsageError, MissingError) as error:
            tally.ended_by(error)
            raise
        except ContextLengthExceededError as error:
            tally.ended("overflow", str(error), error)
        except (LimitReached, ServiceError) as error:
            tally.ended_by(error)
        except Exception as error:
            if self._session is not None and not await self._session.is_session_alive():
                tally.ended("completed", "the terminal's session ended in the middle of a turn")
            else:
                self.logger.exception("the agent's own code failed")
                tally.ended_by(error)
        else:
            if self._confirmed:
                tally.ended("completed", "the model said twice that the task is done")
            elif self._n_episodes >= self._max_episodes:
                tally.ended("max_turns", f"the agent has had its {self._max_episodes} turns (max_turns)")
            else:
                tally.ended("completed", "the terminal's session ended")

    @override
    async def _handle_llm_interaction(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        self._cut = False
        result = await super()._handle_llm_interaction(chat, prompt, original_instruction, session)
        commands, complete, feedback, analysis, plan, response = result
        self._tally.turns += 1
        if self._cut:
            limit = self._policy_llm.get_model_output_limit()
            feedback = (
                "ERROR: NONE of the actions you just requested were performed because you exceeded "
                f"{limit} tokens. Your outputs must be less than {limit} tokens. Re-issue this request, breaking it "
                f"into chunks each of which is less than {limit} tokens."
            )
            return [], False, feedback, "", "", response
        self._tally.parse_errors += "ERROR:" in feedback
        self._confirmed = complete and self._pending_completion and "ERROR:" not in feedback
        return commands, complete, feedback, analysis, plan, response

    @override
    async def _query_llm(  # pyright: ignore[reportIncompatibleMethodOverride]  there it is wrapped in retries
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> LLMResponse:
        try:
            return await self._asked(chat, prompt)
        except ContextLengthExceededError:
            if not self.options.enable_summarize or session is None:
                raise
        self._unwind_messages_to_free_tokens(chat)
        handoff, self._pending_subagent_refs = await self._summarize(chat, original_instruction, session)
        self._pending_handoff_prompt = handoff
        return await self._asked(chat, handoff)

    async def _asked(self, chat: Chat, prompt: str) -> LLMResponse:
        started = time.time()
        try:
            return await chat.chat(prompt)
        except OutputLengthExceededError as error:
            said = error.truncated_response or ""
        finally:
            self._track_api_request_time(started)
        self._tally.truncated_turns += 1
        chat.messages.append({"role": "user", "content": prompt})
        chat.messages.append({"role": "assistant", "content": said})
        whole = cast("_Reader", self._parser).salvaged(said)
        self._cut = whole is None
        return LLMResponse(content=said if whole is None else whole, model_name=self._model_name)

    @override
    async def _check_proactive_summarization(
        self, chat: Chat, original_instruction: str, session: TmuxSession
    ) -> tuple[str, list[SubagentTrajectoryRef] | None] | None:
        context = self._policy_llm.get_model_context_limit()
        least = self._free_tokens
        threshold = least if isinstance(least, int) else min(_FREE_TOKENS, context // 4)
        if not chat.messages or context - self._count_total_tokens(chat) >= threshold:
            return None
        try:
            return await self._summarize(chat, original_instruction, session)
        except ContextLengthExceededError:  # a turn may fit where a summary does not
            return None

    @override
    async def _summarize(
        self, chat: Chat, original_instruction: str, session: TmuxSession
    ) -> tuple[str, list[SubagentTrajectoryRef] | None]:
        if not chat.messages:
            raise ContextLengthExceededError("the first prompt alone fills the context")
        with self._policy_llm.cut_replies_taken():
            made = await super()._summarize(chat, original_instruction, session)
        self._tally.summaries += 1
        return made

    @override
    def _unwind_messages_to_free_tokens(self, chat: Chat, target_free_tokens: int = _FREE_FOR_SUMMARY_TOKENS) -> None:
        context = self._policy_llm.get_model_context_limit()
        target = min(target_free_tokens + self._policy_llm.reserve_tokens, context // 2)
        while len(chat.messages) > 2 and context - self._count_total_tokens(chat) < target:
            del chat.messages[-2:]

    @override
    def _count_total_tokens(self, chat: Chat) -> int:
        return self._policy_llm.tokens(chat.messages)

    @override
    async def _execute_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        # what no terminal can be sent, but a reply in JSON can hold
        texts = [command.keystrokes.replace("\0", "").encode(errors="replace").decode() for command in commands]
        sent = [Command(text, command.duration_sec) for text, command in zip(texts, commands, strict=True)]
        return await super()._execute_commands(sent, session)

    @override
    def _dump_trajectory(self) -> None:
        pass  # after each turn, and at the end once more; `run` writes it

    @override
    def _dump_trajectory_with_continuation_index(self, continuation_index: int) -> None:
        try:
            with self._records():
                super()._dump_trajectory_with_continuation_index(continuation_index)
        except OSError as error:
            self.logger.warning("no trajectory was written: %s", error)

    @override
    def _save_subagent_trajectory(self, *args: Any, **kwargs: Any) -> SubagentTrajectoryRef:
        with self._records():
            return super()._save_subagent_trajectory(*args, **kwargs)

    @contextmanager
    def _records(self) -> Generator[None]:
        """Have Harbor write its records to a private folder, since it follows links that the agent has made."""
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


class _Reader:
    """One of Harbor's parsers, for which no reply is too odd."""

    def __init__(self, parser: _Parser) -> None:
        self._parser = parser

    def parse_response(self, response: str) -> ParseResult:
        """The commands in a reply, or what is wrong with it."""
        try:
            return self._parser.parse_response(response)
        except Exception as error:  # brackets nested too deep, numbers that are none
            return ParseResult([], False, f"The response cannot be read ({type(error).__name__})", "")

    def salvaged(self, response: str) -> str | None:
        """The whole response at the head of a reply that was cut off, where the parser's notation can tell."""
        salvage = getattr(self._parser, "salvage_truncated_response", None)
        return None if salvage is None else cast("tuple[str | None, bool]", salvage(response))[0]


class _Machine:
    """An environment whose failures are told from the agent's."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self._environment = environment

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        try:
            return await self._environment.exec(*args, **kwargs)
        except (asyncio.CancelledError, EnvironmentDown):
            raise
        except Exception as error:
            raise EnvironmentDown(f"the environment failed: {type(error).__name__}: {safe_str(error)}") from error

    def __getattr__(self, name: str) -> object:
        return getattr(self._environment, name)
