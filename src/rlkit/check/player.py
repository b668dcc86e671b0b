"""Playing an environment under watch.

Invariant: a play ends. What the environment raises, returns or does to the conversation is data; only a rollout that
outlives its time, or its cancellation, is raised, as `Hang`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal, override

from rlkit.chat.format import ChatFormat
from rlkit.env import Env
from rlkit.errors import LimitReached, RewardError
from rlkit.policy import ChatRequest, Limits, Policy, Reply, SampleRequest
from rlkit.rollout.validation import as_outcome
from rlkit.testing.policies import MAX_TOKENS, ScriptedPolicy
from rlkit.types import Message, Outcome, Tool, Turn

GRACE_S = 1.0
"""How long a cancelled rollout may take to clean up."""

MAX_TURNS = 8
"""How many times an environment that goes on is given the same reply."""


class Hang(Exception):
    """A rollout did not end in time (`swallowed`: nor when it was cancelled)."""

    def __init__(self, message: str, *, swallowed: bool) -> None:
        super().__init__(message)
        self.swallowed = swallowed


type _EndKind = Literal["done", "limit", "raised", "no reward", "cancelled"]


@dataclass(frozen=True, slots=True)
class WatchedRollout:
    """One rollout that ended.

    Args:
        end: "done" with a reward; "limit" when it let `LimitReached` through; "raised"; "no reward" when what it
            returned is not an outcome; "cancelled".
        detail: one line that says what was raised or returned; "" with a reward.
        rewritten: what an environment made of a reply that it should have kept, if it did.
    """

    end: _EndKind
    reward: float | None
    detail: str
    turns: tuple[Turn, ...]
    prompts: tuple[str, ...]
    tools: tuple[Tool, ...]
    rewritten: str | None
    seconds: float

    def same_reward(self, other: WatchedRollout) -> bool:
        """Compare the ends, and rewards as computed numbers are compared."""
        if self.reward is None or other.reward is None:
            return self.end == other.end
        return math.isclose(self.reward, other.reward, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def result(self) -> str:
        """The end in a few words."""
        return self.detail if self.reward is None else f"reward {self.reward:g}"


@dataclass(frozen=True, slots=True)
class Player:
    """Plays environments with one reply at a time.

    Args:
        timeout_s: for one rollout.
        say: told what is about to be played; whoever listens knows by it that the checker is alive.
    """

    chat: ChatFormat
    timeout_s: float
    say: Callable[[str], None]
    plays: list[WatchedRollout] = field(default_factory=list[WatchedRollout])

    async def play(
        self,
        env: Env,
        reply: str,
        *,
        max_turns: int = MAX_TURNS,
        max_tokens: int = MAX_TOKENS,
        delay_s: float = 0.0,
        under: str = "",
    ) -> WatchedRollout:
        """WatchedRollout once; every completion is `reply`.

        Raises:
            Hang: it did not end within `timeout_s`.
        """
        limits, what = Limits(max_turns=max_turns), f"{name_of(env)}, reply {abbreviate(reply)}{under and f', {under}'}"
        policy = WatchedPolicy(reply, chat=self.chat, max_tokens=max_tokens, limits=limits, delay_s=delay_s)
        play = await self._play(env, policy, what)
        self.plays.append(play)
        return play

    async def cancel(self, env: Env, reply: str, *, turn: int) -> WatchedRollout | None:
        """Cancel a rollout while it waits for completion number `turn`; None if it never asks for that one.

        Raises:
            Hang: it did not end within `GRACE_S`, or did not ask within `timeout_s`.
        """
        policy = WatchedPolicy(reply, chat=self.chat, limits=Limits(max_turns=MAX_TURNS), stuck_at=turn)
        play = await self._play(env, policy, f"{name_of(env)}, cancelled while it waits for reply {turn + 1}")
        return play if policy.stuck.done() else None

    async def _play(self, env: Env, policy: WatchedPolicy, what: str) -> WatchedRollout:
        self.say(what)
        clock = asyncio.get_running_loop().time
        started_s = clock()
        task = asyncio.create_task(_end(env, policy))
        await asyncio.wait({task, policy.stuck}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            swallowed = not task.done()
            if swallowed or not policy.stuck.done():
                late = "" if policy.stuck.done() else f": not done after {self.timeout_s:g} s"
                raise Hang(what + late + ", and cancellation does not end it" * swallowed, swallowed=swallowed)
        watched = policy.turns, policy.prompts, tuple(policy.tools), policy.rewritten
        return WatchedRollout(*task.result(), *watched, clock() - started_s)


class WatchedPolicy(ScriptedPolicy):
    """Gives one reply for ever, and sees what the environment does with it.

    Args:
        delay_s: how long each completion takes.
        stuck_at: the number of a completion that never comes; `stuck` is done when it is asked for.
    """

    def __init__(
        self,
        reply: str,
        *,
        chat: ChatFormat,
        limits: Limits,
        max_tokens: int = MAX_TOKENS,
        delay_s: float = 0.0,
        stuck_at: int | None = None,
    ) -> None:
        super().__init__(lambda prompt: reply, chat=chat, max_tokens=max_tokens, limits=limits)
        self.stuck = asyncio.get_running_loop().create_future()
        self.tools: list[Tool] = []
        self.rewritten: str | None = None
        self._delay_s = delay_s
        self._stuck_at = stuck_at
        self._begun = 0
        self._said: list[tuple[list[Message], Message]] = []

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        await self._wait()
        if isinstance(request, SampleRequest):
            return await super()._respond(request)
        messages = deepcopy(list(request.messages))
        self.tools += [tool for tool in request.tools if tool not in self.tools]
        self.rewritten = self.rewritten or self._rewriting(messages)
        reply = await super()._respond(request)
        self._said.append((messages, deepcopy(reply.message)))
        return reply

    async def _wait(self) -> None:
        number = self._begun
        self._begun += 1
        if number == self._stuck_at:
            self.stuck.set_result(None)
            await asyncio.Event().wait()
        await asyncio.sleep(self._delay_s)

    def _rewriting(self, messages: Sequence[Message]) -> str | None:
        """What stands in the place of an earlier reply; the same question may have had several replies."""
        places = [
            (messages[len(before)], said)
            for before, said in self._said
            if len(messages) > len(before) and messages[: len(before)] == before
        ]
        changed = [(now, said) for now, said in places if now["role"] == "assistant" and now != said]
        if not changed or any(now == said for now, said in places if now in [n for n, _ in changed]):
            return None
        now, said = changed[0]
        return f"the reply {abbreviate(json.dumps(said))} became {abbreviate(json.dumps(now, default=str))}"


async def _end(env: Env, policy: Policy) -> tuple[_EndKind, float | None, str]:
    """WatchedRollout an environment; return the end, the reward and the detail of the play."""
    try:
        result: object = await env.rollout(policy)
        outcome = as_outcome(result, env="it")
    except asyncio.CancelledError:
        return "cancelled", None, "raised CancelledError"
    except LimitReached as error:
        return "limit", None, f"let LimitReached through: {error}"
    except RewardError as error:
        return "no reward", None, str(error).removeprefix("it ")
    except BaseException as error:  # an environment may even call sys.exit()
        return "raised", None, f"raised {type(error).__name__}: {abbreviate(str(error))}"
    try:
        json.dumps(dict(result.info) if isinstance(result, Outcome) else None)  # a run would record a `repr`
    except (TypeError, ValueError, RecursionError) as error:
        return "no reward", None, f"returned an outcome whose info cannot be written as JSON: {error}"
    return "done", outcome.reward, ""


def name_of(env: object) -> str:
    """Return the name of a task in a finding."""
    return str(getattr(env, "task_id", type(env).__name__))


def abbreviate(text: str) -> str:
    """Return a text on one line, shortened."""
    return repr(text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)")
