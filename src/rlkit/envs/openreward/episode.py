"""Play an episode in an open session: replies of the model, and their tool calls.

Invariant: no tool is called after the environment has ended the episode. Every episode ends for exactly one reason.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rlkit.envs.openreward.blocks import make_readable
from rlkit.envs.openreward.session import Answer, Session
from rlkit.envs.openreward.settings import Settings
from rlkit.errors import LimitReached
from rlkit.policy import Policy
from rlkit.types import Json, Message, Outcome, Reply, Tool, ToolCall

type Reason = Literal["finished", "answered", "no_call", "cut_off", "max_turns", "tokens"]
"""Reason for the end of an episode: the environment ended it; the model gave its answer as a message; its reply had no
call; its reply was truncated without a call; no turns are left; no tokens are left."""

_CUT_SHORT = ("cut_off", "max_turns", "tokens")
_METRICS = ("tool_calls", "wrong_tool_calls", "malformed_tool_calls", "nudges", "seconds/tools")


@dataclass(slots=True)
class Episode:
    """Conversation so far, the model's tools, and metrics of its calls."""

    messages: list[Message]
    tools: Sequence[Tool]
    rewards: list[float | None] = field(default_factory=list[float | None])
    metrics: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_METRICS, 0.0))
    finished: bool = False


async def play(session: Session, policy: Policy, settings: Settings) -> Outcome:
    """Play an episode to its end in a newly opened session; raise as the session does."""
    messages, tools = await session.opening()
    if settings.system_prompt is not None:
        messages = _with_system(messages, settings.system_prompt)
    episode = Episode(messages, tools)
    reason = await _loop(session, policy, settings, episode)
    is_group_scored = settings.group_score != "off" and await session.scores_groups()
    reward = settings.reward.compute(episode.rewards, finished=episode.finished, is_group_scored=is_group_scored)
    info: dict[str, Json] = {
        "ended": reason,
        "rewards": list(episode.rewards),
        "messages": make_readable(episode.messages),
        "compared": is_group_scored,
    }
    endings = {f"ended/{name}": float(name == reason) for name in get_args(Reason.__value__)}
    return Outcome(reward, episode.metrics | endings, info, truncated=reason in _CUT_SHORT)


async def _loop(session: Session, policy: Policy, settings: Settings, episode: Episode) -> Reason:
    tokens_left = settings.max_tokens
    for _ in range(settings.max_turns):
        if tokens_left is not None and tokens_left < 1:
            return "tokens"
        try:
            reply = await policy.chat(
                episode.messages, tools=episode.tools, max_tokens=tokens_left, context_tokens=settings.max_tokens
            )
        except LimitReached:
            return "tokens"
        episode.messages.append(reply.message)
        if settings.max_tokens is not None:
            tokens_left = settings.max_tokens - len(reply.tokens)
        if reason := await _answer_reply(session, policy, settings, episode, reply):
            return reason
    return "max_turns"


async def _answer_reply(
    session: Session, policy: Policy, settings: Settings, episode: Episode, reply: Reply
) -> Reason | None:
    """Respond to a reply of the model; return the reason if the episode is over."""
    if not reply.tool_calls and not reply.malformed_tool_calls:
        if reply.truncated:
            return "cut_off"
        if await session.takes_answers():
            _record_answer(episode, policy, await _time_call(episode, session.answer(reply.text)))
            episode.finished = True
            return "answered"
        if settings.on_message == "end":
            return "no_call"
        episode.metrics["nudges"] += 1
        names = ", ".join(tool["name"] for tool in episode.tools)
        nudge = f"There was no tool call in your reply. Call one of the tools: {names}."
        episode.messages.append({"role": "user", "content": nudge})
        return None
    for call in reply.tool_calls:
        episode.metrics["tool_calls"] += 1
        answer = await _call_tool(session, episode, call)
        _record_answer(episode, policy, answer)
        episode.messages.append(
            {"role": "tool", "content": answer.content, "tool_call_id": call["id"], "name": call["name"]}
        )
        if episode.finished:
            return "finished"
    if reply.malformed_tool_calls:
        episode.metrics["malformed_tool_calls"] += len(reply.malformed_tool_calls)
        # Not as a tool message: without a call to answer, some chat formats cannot render it and others reject it.
        errors = "\n".join(f"error: not a valid tool call: {text}" for text in reply.malformed_tool_calls)
        episode.messages.append({"role": "user", "content": errors})
    return None


async def _call_tool(session: Session, episode: Episode, call: ToolCall) -> Answer:
    names = [tool["name"] for tool in episode.tools]
    if call["name"] not in names:
        available = f"the tools are {', '.join(names)}" if names else "there are none"
        return Answer(f"error: there is no tool {call['name']!r}; {available}", wrong=True)
    return await _time_call(episode, session.call(call["name"], call["arguments"]))


def _record_answer(episode: Episode, policy: Policy, answer: Answer) -> None:
    episode.metrics["wrong_tool_calls"] += answer.wrong
    if not answer.wrong:
        episode.rewards.append(answer.reward)
    if answer.reward is not None:
        policy.reward(answer.reward)
    episode.finished = episode.finished or answer.finished


async def _time_call(episode: Episode, call: Awaitable[Answer]) -> Answer:
    started_s = time.perf_counter()
    try:
        return await call
    finally:
        episode.metrics["seconds/tools"] += time.perf_counter() - started_s


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    head = messages[0] if messages else None
    if head is None or head["role"] != "system" or not isinstance(head["content"], str):
        return [{"role": "system", "content": text}, *messages]
    return [{"role": "system", "content": f"{text}\n\n{head['content']}"}, *messages[1:]]
