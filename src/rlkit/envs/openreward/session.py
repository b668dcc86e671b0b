"""Session of an environment, from opening to deletion.

Invariant: each request has a time limit. A session that may exist on the server is deleted there, even if opening it
failed or was cancelled. A tool is executed once per call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

from rlkit.envs.openreward.admission import Gate
from rlkit.envs.openreward.blocks import Content, convert_content, convert_messages, convert_tool, make_candidate
from rlkit.envs.openreward.connection.faults import SessionLost, classify_error, configuration_error, describe_error
from rlkit.errors import EnvironmentFault
from rlkit.types import Episode, Json, Message, Tool

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncSession
    from openreward.api.environments.types import ToolOutput

_DELETIONS = 6  # attempts to delete a session
_DELETION_WAIT_S = 15.0  # time that a rollout waits for the deletion of its session
_deletions = set[asyncio.Task[None]]()  # references to running deletions, which the event loop would otherwise drop
_BUSY_CALLS = 8  # attempts of a call if the server is busy


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of requests."""

    start_s: float = 600.0  # limit for opening a session, including its prompt
    call_s: float = 600.0  # limit for a call of a tool
    request_s: float = 60.0  # limit for any other request


@dataclass(frozen=True)
class Answer:
    """Result of a call."""

    content: Content  # reply to the model
    reward: float | None = None
    finished: bool = False
    wrong: bool = False  # True if the model's call was invalid


@dataclass(frozen=True, slots=True)
class Session:
    """Session of a task, which `open` opens."""

    raw: AsyncSession  # session of the SDK
    gate: Gate  # gate of the environment, told about busy responses
    limits: TimeLimits
    name: str
    clean: Callable[[str], str]  # function that removes secrets from a text

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Open the session, and delete it at the end; raises as `opening`."""
        try:
            await self._request("opening a session", self.raw.__aenter__, self.limits.start_s, opening=True)
            yield
        finally:
            await _delete_session(self.raw, self.limits.request_s)

    async def opening(self) -> tuple[list[Message], list[Tool]]:
        """Return the initial messages of the task, and its tools. Call it once, before any other method.

        Raises, as every request:
            SessionLost: the server cannot be reached, or has lost the session.
            EnvironmentFault: the environment failed.
            UsageError: the environment cannot be played as configured.
        """
        messages = await self._request("requesting the prompt", self.raw.get_messages, self.limits.start_s)
        tools = await self._request("requesting the tools", lambda: self.raw.list_tools(None), self.limits.request_s)
        return convert_messages(messages, self.clean), [convert_tool(tool, self.clean) for tool in tools]

    async def version(self) -> Mapping[str, str | None]:
        """Return the server's `version` of the SDK and `build_sha` of the environment."""
        return await self._request("requesting the version", self.raw.version, self.limits.request_s)

    async def takes_answers(self) -> bool:
        """Return whether the environment accepts a message without a call as the model's answer."""
        tool = await self._request("requesting the tools", self.raw.terminal_tool, self.limits.request_s)
        return tool is not None

    async def scores_groups(self) -> bool:
        """Return whether the environment compares the episodes of a group; call it after `opening`."""
        return await self._request("requesting the tools", self.raw.supports_score_group, self.limits.request_s)

    async def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """Request a comparison of a group's episodes; return a reward for each, in their order."""
        candidates = [make_candidate(episode) for episode in episodes]
        scores = await self._request("scoring the group", lambda: self.raw.score_group(candidates), self.limits.call_s)
        rewards = [cast("object", getattr(score, "reward", None)) for score in scores]
        finite = [float(reward) for reward in rewards if _is_finite(reward)]
        if len(finite) != len(episodes) or len(scores) != len(episodes):
            raise EnvironmentFault(f"{self.name}: the group of {len(episodes)} was scored as {rewards}")
        return finite

    async def answer(self, text: str) -> Answer:
        """Send the model's answer, which ends the episode."""
        return await self._output("the answer", lambda: self.raw.call_terminal_tool(text))

    async def call(self, name: str, arguments: Mapping[str, Json]) -> Answer:
        """Call a tool. After SessionLost it is unknown whether the tool ran, and the session cannot be used."""
        return await self._output(name, lambda: self.raw.call_tool(name, arguments))

    async def _output(self, tool: str, call: Callable[[], Awaitable[ToolOutput]]) -> Answer:
        for attempt in range(1, _BUSY_CALLS + 1):
            try:
                output = await _within(self.limits.call_s, call)
                break
            except Exception as error:
                match classify_error(error, opening=False):
                    case "model":
                        return Answer(f"error: {self.clean(str(getattr(error, 'detail', error)))}", wrong=True)
                    case "busy" if attempt < _BUSY_CALLS:
                        self.gate.refused()
                    case _:
                        raise self._make_failure(f"calling {tool}", error) from error
            await self.gate.pause()
        else:
            raise AssertionError("the last attempt returns or raises")
        reward, finished = cast("tuple[object, object]", (output.reward, output.finished))
        if reward is not None and not _is_finite(reward):
            raise EnvironmentFault(f"{self.name}: {tool} gave the reward {reward!r}; rewards must be finite numbers")
        if not isinstance(finished, bool):
            raise EnvironmentFault(f"{self.name}: {tool} returned {finished!r} for finished, which must be a bool")
        return Answer(convert_content(output.blocks, self.clean), None if reward is None else float(reward), finished)

    async def _request[T](
        self, what: str, request: Callable[[], Awaitable[T]], limit_s: float, *, opening: bool = False
    ) -> T:
        try:
            return await _within(limit_s, request)
        except Exception as error:
            raise self._make_failure(what, error, opening=opening) from error

    def _make_failure(self, what: str, error: Exception, *, opening: bool = False) -> Exception:
        kind = classify_error(error, opening=opening)
        if kind == "configuration":
            return configuration_error(self.name, error, self.clean)
        message = f"{self.name}: {what}: {describe_error(error, self.clean)}"
        if kind in ("busy", "infrastructure"):
            return SessionLost(message, busy=kind == "busy")
        return EnvironmentFault(message)


def _is_finite(reward: object) -> TypeGuard[float]:
    """Return whether a reward is a finite number; a server may send a number of any size, or a text."""
    try:
        return isinstance(reward, float | int) and math.isfinite(reward)
    except OverflowError:
        return False


async def _delete_session(raw: AsyncSession, limit_s: float) -> None:
    """Delete a session, even if this task is cancelled; a slow deletion continues in the background."""
    deletion = asyncio.create_task(_request_deletion(raw, limit_s))
    _deletions.add(deletion)
    deletion.add_done_callback(_deletions.discard)
    try:
        await asyncio.wait([deletion], timeout=_DELETION_WAIT_S)
    except asyncio.CancelledError:
        await asyncio.wait([deletion], timeout=_DELETION_WAIT_S)
        raise


async def _request_deletion(raw: AsyncSession, limit_s: float) -> None:
    # The SDK sends one deletion request and ignores the response, so send requests here first.
    delete = cast("Callable[[], Awaitable[None]] | None", getattr(raw, "_pre_delete", None))
    for attempt in range(_DELETIONS):
        if delete is None or raw.sid is None:
            break
        try:
            await _within(limit_s, delete)
            break
        except Exception:  # any error: a session must not stay open
            await asyncio.sleep(0.1 * 2**attempt)
    with suppress(Exception):  # the session is over, and its outcome is known
        await _within(limit_s, lambda: raw.__aexit__(None, None, None))


async def _within[T](limit_s: float, request: Callable[[], Awaitable[T]]) -> T:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await request()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from error
