"""Play observed rollouts with a scripted reply.

Invariant: every rollout ends. Errors, invalid return values and changed conversations are recorded; only a rollout that
exceeds its time limit, or does not end when cancelled, raises `Abort`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, override

from rlkit._util.frames import error_place
from rlkit._util.json_values import safe_str
from rlkit._util.paths import shorten_path
from rlkit.chat.format import ChatFormat
from rlkit.env import Env
from rlkit.errors import LimitReached, RewardError
from rlkit.policy import ChatRequest, Limits, Policy, SampleRequest
from rlkit.rollout.validation import as_outcome
from rlkit.testing.policies import MAX_TOKENS, ScriptedPolicy
from rlkit.types import Message, Outcome, Reply, Tool, Turn

GRACE_S = 1.0
"""Seconds for the clean-up of a cancelled rollout."""

MAX_TURNS = 8  # maximum number of times that a rollout gets the same reply


type Script = str | tuple[str, ...]
"""A reply that is every completion of a rollout, or its replies in order; empty ones follow."""


@dataclass(eq=False)
class Abort(Exception):
    """The end of work that cannot continue."""

    reason: str
    fix: str
    is_stuck: bool = True  # the code still runs, or its process has ended; False if it only exceeded its time limit


type _EndKind = Literal["done", "limit", "raised", "no reward", "cancelled"]


@dataclass(frozen=True, slots=True)
class WatchedRollout:
    """Record of a rollout."""

    # "done" with a reward; "limit" if `LimitReached` passed through; "raised"; "no reward" if the return value is not
    # an outcome; "cancelled".
    end: _EndKind
    reward: float | None
    detail: str  # the error or the return value, on one line; "" with a reward
    turns: tuple[Turn, ...]
    prompts: tuple[str, ...]
    tools: tuple[Tool, ...]
    rewritten: str | None  # description of a change to an earlier reply in the conversation, or None
    seconds: float

    def has_same_reward(self, other: WatchedRollout) -> bool:
        """Return whether the rewards are equal up to rounding; if a reward is missing, whether the ends are equal."""
        if self.reward is None or other.reward is None:
            return self.end == other.end
        return math.isclose(self.reward, other.reward, rel_tol=1e-9, abs_tol=1e-12)

    @property
    def result(self) -> str:
        """Short description of the end."""
        return self.detail if self.reward is None else f"reward {self.reward:g}"


@dataclass(frozen=True, slots=True)
class Player:
    """Player of environments, with one reply per rollout; `announce` receives a line before each."""

    chat: ChatFormat
    timeout_s: float
    announce: Callable[[str], None]
    rollouts: list[WatchedRollout] = field(default_factory=list[WatchedRollout])

    async def play(
        self,
        env: Env,
        reply: Script,
        *,
        max_turns: int = MAX_TURNS,
        max_tokens: int = MAX_TOKENS,
        delay_s: float = 0.0,
        condition: str = "",
    ) -> WatchedRollout:
        """Play a script once; raise `Abort` if the rollout does not end within `timeout_s`."""
        limits = Limits(max_turns=max_turns)
        activity = f"{get_task_name(env)}, reply {abbreviate(reply)}{condition and f', {condition}'}"
        policy = WatchedPolicy(reply, chat=self.chat, max_tokens=max_tokens, limits=limits, delay_s=delay_s)
        rollout = await self._play(env, policy, activity)
        self.rollouts.append(rollout)
        return rollout

    async def cancel(self, env: Env, reply: Script, *, turn: int) -> WatchedRollout | None:
        """Cancel a rollout while it waits for completion number `turn`; return None if it never requests that one.

        Raises:
            Abort: the rollout did not end within `GRACE_S`, or made no request within `timeout_s`.
        """
        policy = WatchedPolicy(reply, chat=self.chat, limits=Limits(max_turns=MAX_TURNS), stuck_at=turn)
        activity = f"{get_task_name(env)}, cancelled while it waits for reply {turn + 1}"
        rollout = await self._play(env, policy, activity)
        return rollout if policy.stuck.done() else None

    async def _play(self, env: Env, policy: WatchedPolicy, activity: str) -> WatchedRollout:
        self.announce(activity)
        clock = asyncio.get_running_loop().time
        start_s = clock()
        task = asyncio.create_task(_run_rollout(env, policy))
        await asyncio.wait({task, policy.stuck}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
            late = "" if policy.stuck.done() else f": not done after {self.timeout_s:g} s"
            if not task.done():
                raise Abort(f"{activity}{late}, and cancellation does not end it", "do not catch CancelledError")
            if late:
                raise Abort(activity + late, "give every wait in the environment a time limit", is_stuck=False)
        observations = policy.turns, policy.prompts, tuple(policy.tools), policy.rewritten
        return WatchedRollout(*task.result(), *observations, clock() - start_s)


class WatchedPolicy(ScriptedPolicy):
    """Policy with a single reply, which records the offered tools and changes of the conversation.

    Args:
        delay_s: duration of each completion, in seconds.
        stuck_at: number of a completion that never arrives; `stuck` is set when it is requested.
    """

    def __init__(
        self,
        reply: Script,
        *,
        chat: ChatFormat,
        limits: Limits,
        max_tokens: int = MAX_TOKENS,
        delay_s: float = 0.0,
        stuck_at: int | None = None,
    ) -> None:
        replies = itertools.repeat(reply) if isinstance(reply, str) else itertools.chain(reply, itertools.repeat(""))
        super().__init__(lambda prompt: next(replies), chat=chat, max_tokens=max_tokens, limits=limits)
        self.stuck = asyncio.get_running_loop().create_future()
        self.tools: list[Tool] = []
        self.rewritten: str | None = None
        self._delay_s = delay_s
        self._stuck_at = stuck_at
        self._numbers = itertools.count()
        self._exchanges: list[tuple[list[Message], Message]] = []

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        if next(self._numbers) == self._stuck_at:
            self.stuck.set_result(None)
            await asyncio.Event().wait()
        await asyncio.sleep(self._delay_s)
        if isinstance(request, SampleRequest):
            return await super()._respond(request)
        messages = deepcopy(list(request.messages))
        self.tools += [tool for tool in request.tools if tool not in self.tools]
        self.rewritten = self.rewritten or self._find_rewritten(messages)
        reply = await super()._respond(request)
        self._exchanges.append((messages, deepcopy(reply.message)))
        return reply

    def _find_rewritten(self, messages: Sequence[Message]) -> str | None:
        """Describe a change to an earlier reply; a prompt may have several replies."""
        for index, message in enumerate(messages):
            replies = [reply for prompt, reply in self._exchanges if prompt == messages[:index]]
            if message["role"] == "assistant" and replies and message not in replies:
                reply, changed = json.dumps(replies[0]), json.dumps(message, default=str)
                return f"the reply {abbreviate(reply)} became {abbreviate(changed)}"
        return None


async def _run_rollout(env: Env, policy: Policy) -> tuple[_EndKind, float | None, str]:
    try:
        result: object = await env.rollout(policy)
        outcome = as_outcome(result, env="it", turns=policy.turns)
    except asyncio.CancelledError:
        return "cancelled", None, "raised CancelledError"
    except LimitReached as error:
        return "limit", None, f"did not catch LimitReached: {error}"
    except RewardError as error:
        return "no reward", None, str(error).removeprefix("it ")
    except BaseException as error:  # an environment may even call sys.exit()
        text, place = abbreviate(safe_str(error))[1:-1], error_place(error)
        at = f", at {shorten_path(Path(place.file))}:{place.line}" if place else ""
        return "raised", None, f"raised {type(error).__name__}{text and f': {text}'}{at}"
    try:
        json.dumps(dict(result.info) if isinstance(result, Outcome) else None)  # a run would store its `repr`
    except (TypeError, ValueError, RecursionError) as error:
        return "no reward", None, f"returned an outcome whose info cannot be written as JSON: {error}"
    return "done", outcome.reward, ""


def get_task_name(env: object) -> str:
    """Return the name of a task in findings."""
    return str(getattr(env, "task_id", type(env).__name__))


def abbreviate(text: Script) -> str:
    """Return a short text on one line."""
    if not isinstance(text, str):
        return " and then ".join(map(abbreviate, text))
    return repr(text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)")
