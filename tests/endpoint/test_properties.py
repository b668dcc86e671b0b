"""Any conversations at the endpoint: no sampled token is trained twice, none is lost, and none that was not sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.endpoint import Endpoint
from rlkit.endpoint.http_responses import OPENING_S
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.tools.audit import audit_group
from rlkit.types import Completion, Group, Sampling
from tests.builders import episode

REPLIES = (
    "one",
    " two ",
    "<think>a</think>b",
    "<think>c",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>x',
    "",
)
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Move:
    """A request of a generated client.

    Args:
        conversation: number of the conversation to continue.
        goes_back: number of messages to drop before it continues, which forks or rewrites the conversation.
        edit: text to put in place of the last message; None leaves it as it is.
        drops_thinking: the client sends the thinking of no reply back.
        times: number of equal requests at the same time, as retries and parallel calls are.
        leaves: when the client closes its connection: never, before the response, or within its stream.
    """

    conversation: int
    goes_back: int
    edit: str | None
    drops_thinking: bool
    times: int
    choices: int
    stream: bool
    leaves: Literal["never", "before", "within"]
    tools: bool


moves = st.builds(
    Move,
    conversation=st.integers(0, 1),
    goes_back=st.sampled_from([0, 0, 0, 1, 2, 3]),
    edit=st.sampled_from([None, None, None, "edited"]),
    drops_thinking=st.booleans(),
    times=st.sampled_from([1, 1, 2]),
    choices=st.sampled_from([1, 1, 2]),
    stream=st.booleans(),
    leaves=st.sampled_from(["never", "never", "never", "before", "within"]),
    tools=st.booleans(),
)


class CountingSampler(ScriptedSampler):
    """A sampler that keeps every completion that it returned, and lets other requests go first."""

    def __init__(self, seeds: int) -> None:
        super().__init__(lambda prompt, *, seed: REPLIES[(seed + seeds) % len(REPLIES)], chat=ByteChat())
        self.returned: list[Completion] = []

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.002 if len(self.requests) % 2 else 2 * OPENING_S)  # before and after a stream opens
        completions = await super().sample(*arguments, **options)
        self.returned += completions
        return completions


async def send(client: httpx.AsyncClient, endpoint: Endpoint, move: Move, messages: list[Any]) -> Any:
    """Send a request, and return the message of its first choice; None if the client left."""
    body = {"messages": messages, "stream": False, "n": move.choices, **({"tools": [CALL]} if move.tools else {})}
    url, headers = f"{endpoint.url}/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
    if move.leaves == "within":
        async with client.stream("POST", url, json={**body, "stream": True}, headers=headers) as stream:
            await anext(stream.aiter_bytes())
            return None
    if move.leaves == "before":
        try:
            async with client.stream("POST", url, json={**body, "stream": move.stream}, headers=headers, timeout=0.001):
                return None
        except httpx.TimeoutException:
            return None
    response = await client.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


@settings(max_examples=40, deadline=None)
@given(st.lists(moves, max_size=8), st.integers(0, 5))
def test_each_recorded_token_is_trained_exactly_once(script: list[Move], seeds: int) -> None:
    sampler = CountingSampler(seeds)
    policy = RecordingPolicy(
        sampler=lambda: sampler, chat=ByteChat(), sampling=Sampling(max_tokens=60), seed=lambda turn: turn
    )

    async def play() -> None:
        histories: dict[int, list[Any]] = {}
        async with policy.endpoint() as endpoint, httpx.AsyncClient() as client:
            for move in script:
                history = histories.get(move.conversation, [])
                messages = [dict(message) for message in history[: max(len(history) - move.goes_back, 0)]]
                if move.edit is not None and messages:
                    messages[-1]["content"] = move.edit
                if move.drops_thinking:
                    for message in messages:
                        message.pop("reasoning_content", None)
                messages.append({"role": "user", "content": f"go on {len(messages)}"})
                answers = await asyncio.gather(*[send(client, endpoint, move, messages) for _ in range(move.times)])
                if answers[0] is not None:
                    messages.append(answers[0])
                histories[move.conversation] = messages

    asyncio.run(play())
    group = Group("env", "task", 0, (replace(episode(1.0), turns=policy.turns),))
    report = asyncio.run(audit_group(group))
    assert report.mismatch is None
    recorded = sorted(turn.completion.tolist() for turn in policy.turns)
    assert recorded == sorted(completion.tokens.tolist() for completion in sampler.returned), "none is lost"
    assert report.tokens == sum(map(len, recorded)), "none is trained twice"
