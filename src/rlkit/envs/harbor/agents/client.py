"""The policy of an agent that has its own client, and the end of the agent's work.

Invariant: the agent is refused further replies after its last turn, and ended if it does not end by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence

from harbor.agents.installed.base import NonZeroAgentExitCodeError

from rlkit.envs.harbor.agents.agent_end import AgentEnd, EnvironmentDown, Tally, sum_tallies
from rlkit.errors import LimitReached
from rlkit.policy import Policy, Reply
from rlkit.types import Message, Tool

_GRACE_S = 10.0
"""Time for an agent to end after a limit: some repeat the refused request for minutes."""


class AgentClient:
    """A policy for `open_endpoint` that counts the agent's turns.

    Args:
        max_turns: number of replies in the whole trial; None for no limit.
    """

    def __init__(self, policy: Policy, *, max_turns: int | None) -> None:
        self._policy = policy
        self._max_turns = max_turns
        self._requests = 0
        self._tallies = list[Tally]()
        self._limit: LimitReached | None = None
        self._is_limited = asyncio.Event()

    @property
    def end(self) -> AgentEnd:
        """End of the agent's work so far."""
        return sum_tallies(self._tallies)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Return the assistant's next message, see `Policy.chat`."""
        tally, start_s = self._tallies[-1], time.monotonic()
        try:
            if self._max_turns is not None and self._requests >= self._max_turns:
                raise LimitReached(f"the agent used all {self._max_turns} turns (max_turns)")
            self._requests += 1
            reply = await self._policy.chat(
                messages, tools=tools, max_tokens=max_tokens, temperature=temperature, stop=stop
            )
        except LimitReached as error:
            self._limit = self._limit or error
            self._is_limited.set()
            raise
        finally:
            tally.llm_s += time.monotonic() - start_s
        tally.turns += 1
        tally.truncated_turns += reply.truncated
        return reply

    async def run(self, running: Coroutine[object, object, None]) -> None:
        """Run the agent on one step of its task; an exit code after a limit is no error.

        Raises:
            NonZeroAgentExitCodeError: the agent failed.
            EnvironmentDown: the agent ended without a reply of its model.
        """
        self._tallies.append(tally := Tally())
        agent, limit = asyncio.ensure_future(running), asyncio.ensure_future(self._is_limited.wait())
        failure: NonZeroAgentExitCodeError | None = None
        try:
            await asyncio.wait({agent, limit}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({agent}, timeout=_GRACE_S)
            if agent.done():
                agent.result()
        except NonZeroAgentExitCodeError as error:
            failure = error
        finally:
            agent.cancel()
            limit.cancel()
            await asyncio.wait({agent, limit})
        if self._limit is not None:
            tally.record_error(self._limit)
        elif not tally.turns:
            raise EnvironmentDown(f"the agent ended without a reply of its model: {failure or 'see its logs'}")
        elif failure is not None:
            raise failure
        else:
            tally.record_end("completed", "the agent's program ended")
