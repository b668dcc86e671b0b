"""The requests of one rollout at its endpoint.

Invariant: each request runs in the context of its rollout, so that the time of the rollout and its tasks are its own.
A failure of the service ends the rollout, whatever the client makes of the response.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import Protocol

from rlkit.errors import MissingError, ServiceError, UsageError
from rlkit.types import Message, Prompt, Tool, ToolCall, Turn


class ChatReply(Protocol):
    """A reply of a policy, see `rlkit.Reply`."""

    @property
    def text(self) -> str: ...  # noqa: D102  see the class
    @property
    def thinking(self) -> str: ...  # noqa: D102  see the class
    @property
    def tool_calls(self) -> Sequence[ToolCall]: ...  # noqa: D102  see the class
    @property
    def truncated(self) -> bool: ...  # noqa: D102  see the class
    @property
    def message(self) -> Message: ...  # noqa: D102  see the class
    @property
    def turn(self) -> Turn: ...  # noqa: D102  see the class
    @property
    def tokens(self) -> Prompt: ...  # noqa: D102  see the class


class ChatPolicy(Protocol):
    """A policy that holds conversations, see `rlkit.Policy`."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> ChatReply:
        """Return the assistant's next message."""
        ...


class Session:
    """A rollout at its endpoint."""

    def __init__(self, policy: ChatPolicy) -> None:
        self._policy = policy
        self._context = contextvars.copy_context()
        self._tasks = set[asyncio.Task[ChatReply]]()
        self.fault: Exception | None = None
        """The first failure that is not the fault of the client or the environment."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, max_tokens: int | None, temperature: float | None
    ) -> ChatReply:
        """Reply to a conversation; errors as of `Policy.chat`."""
        reply = self._policy.chat(messages, tools=tools, max_tokens=max_tokens, temperature=temperature)
        task = asyncio.create_task(reply, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except (ServiceError, UsageError, MissingError) as error:
            self.fault = self.fault or error
            raise
        finally:
            task.cancel()  # if the client is gone

    async def close(self) -> None:
        """Cancel the running requests."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
