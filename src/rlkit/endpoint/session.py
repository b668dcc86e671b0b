"""The requests at an endpoint.

Invariant: each request runs in the context of its rollout, so that the time of the rollout and its tasks are its own.
A failure of the service ends the rollout, whatever the client makes of the response: it has no further turn.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, override

from rlkit.endpoint.protocol import Call, Exchange
from rlkit.endpoint.rejection import Rejection, explain
from rlkit.errors import EnvironmentFault, LimitReached, MissingError, RlkitError, ServiceError
from rlkit.types import Message, Reply, Tool

ARRIVING_BYTES = 64 << 20  # limit of the bodies of a session that arrive at the same time; it fits any one of them
RESPONSES_MAX = 1000  # number of responses that later requests can name as the previous one


class ChatPolicy(Protocol):
    """A policy that holds conversations, see `rlkit.Policy`."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Return the assistant's next message."""
        ...

    async def count_tokens(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of the prompt of `chat`."""
        ...


class Session(ABC):
    """Requests that share a context and their conversations."""

    def __init__(self, *, max_turns: int | None = None) -> None:
        self._context = contextvars.copy_context()
        self._max_turns = max_turns
        self._turn_count = 0
        self._tasks = set[asyncio.Task[Reply | int]]()
        self._is_closed = False
        self._conversations = OrderedDict[str, Sequence[Message]]()
        self._arriving_bytes = 0
        self._arrivals = asyncio.Condition()
        self.fault: RlkitError | None = None
        """The first failure that is not the fault of the client or the environment."""
        self.limit: LimitReached | None = None
        """The first limit of the rollout that a request met."""

    @abstractmethod
    async def find_policy(self, model: str) -> ChatPolicy:
        """Return the policy that answers for a model; raise a `Rejection` if there is none."""

    @asynccontextmanager
    async def reserve_arrival(self, size: int) -> AsyncGenerator[None]:
        """Wait until a body of a size fits among those that arrive, which it belongs to until the end of the block."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self._arriving_bytes + size <= ARRIVING_BYTES)
            self._arriving_bytes += size
        try:
            yield
        finally:
            self._arriving_bytes -= size
            async with self._arrivals:
                self._arrivals.notify_all()

    async def respond(self, exchange: Exchange) -> Sequence[Reply]:
        """Reply to a request; raise Rejection if it is malformed or has no reply."""
        call, policy = exchange.make_call(self._conversations), await self.find_policy(exchange.model)
        if not call.messages:
            raise Rejection(400, "the conversation needs at least one message")
        results = await asyncio.gather(*(self._chat(policy, call) for _ in range(call.choices)), return_exceptions=True)
        replies = [result for result in results if isinstance(result, Reply)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not replies or not isinstance(error, LimitReached):  # the client gets every turn before a limit
                raise explain(error) if isinstance(error, RlkitError) else error
        if call.response_id is not None:
            self._conversations[call.response_id] = [*call.messages, replies[0].message]
            if len(self._conversations) > RESPONSES_MAX:
                self._conversations.popitem(last=False)
        return replies

    async def count_tokens(self, exchange: Exchange) -> int:
        """Return the tokens of a request's prompt, which is no turn; raise Rejection if there is no prompt."""
        call, policy = exchange.make_call(self._conversations), await self.find_policy(exchange.model)
        try:
            return await self._run(lambda: policy.count_tokens(_complete_messages(call.messages), tools=call.tools))
        except RlkitError as error:
            raise explain(error) from error

    async def _run[T: Reply | int](self, start: Callable[[], Coroutine[object, object, T]]) -> T:
        """Do the work of a request in the context of the rollout; raise Rejection if the rollout ends before it."""
        if self._is_closed:
            raise _make_end()
        task = asyncio.create_task(start(), context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise _make_end() from None
            raise
        except (LimitReached, ServiceError, MissingError, EnvironmentFault):
            raise
        except Exception as error:  # chat formats may raise any for an order of roles that they do not know
            raise EnvironmentFault(f"the agent's messages have no reply: {error}") from error
        finally:
            task.cancel()  # if the client is gone

    async def _chat(self, policy: ChatPolicy, call: Call) -> Reply:
        self._turn_count += 1
        if self._max_turns is not None and self._turn_count > self._max_turns:
            self.limit = self.limit or LimitReached(f"the agent used all {self._max_turns} turns (max_turns)")
            raise self.limit
        try:
            return await self._run(
                lambda: policy.chat(
                    _complete_messages([*call.instructions, *call.messages]),
                    tools=call.tools,
                    max_tokens=call.max_tokens,
                    temperature=call.temperature,
                    stop=call.stop,
                )
            )
        except LimitReached as error:
            self.limit = self.limit or error
            raise
        except (ServiceError, MissingError, EnvironmentFault) as error:
            self.fault = self.fault or error
            raise

    async def close(self) -> None:
        """Cancel the running requests."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class RolloutSession(Session):
    """The requests of a rollout; they may name any model."""

    def __init__(self, policy: ChatPolicy, *, max_turns: int | None) -> None:
        super().__init__(max_turns=max_turns)
        self._policy = policy

    @override
    async def find_policy(self, model: str) -> ChatPolicy:
        if self.fault is not None:  # the rollout has failed, and clients such as Codex repeat a failed request
            raise explain(self.fault)
        return self._policy


def _make_end() -> Rejection:
    """Return the rejection of a request after its rollout; a shared one would keep the frames that raised it."""
    return Rejection(400, "the rollout has ended")


def _complete_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages as more chat formats accept them: one system message at the start, and results with their tool.

    Clients send several system messages, and leave out the names of tools.
    """
    count = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system = [message["content"] for message in messages[:count]]
    texts = [text for text in system if isinstance(text, str)]
    is_joined = count > 1 and len(texts) == count
    completed: list[Message] = [{"role": "system", "content": "\n\n".join(texts)}] if is_joined else []
    names = dict[str, str]()
    for message in messages[count if is_joined else 0 :]:
        names |= {call["id"]: call["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        completed.append({"name": name, **message} if name is not None else message)
    return completed
