"""Any conversations at the endpoint: no sampled token is trained twice, none is lost, and none that was not sampled.

The conversations of a rollout may be in different protocols.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.endpoint import Endpoint
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.tools.audit import audit_group
from rlkit.types import Completion, Group, Sampling
from tests.builders import episode

from .wires import WIRES, Item, leave, make_user_message

REPLIES = (
    "one",
    " two ",
    "<think>a</think>b",
    "<think>c",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>x',
    "",
)


@dataclass(frozen=True)
class Move:
    """A request of a generated client.

    Args:
        wire: name of the protocol; each protocol has conversations of its own.
        conversation: number of the conversation to continue.
        goes_back: number of items to drop before it continues, which forks or rewrites the conversation.
        is_edited: the last item is replaced by another text.
        drops_thinking: the client sends the thinking of no reply back.
        answers_calls: the client sends results of the tools that the last reply calls, if there are any.
        times: number of equal requests at the same time, as retries and parallel calls are.
        choices: number of replies to a request, where the protocol has it.
        leaves: when the client closes its connection: never, before the response, or within its stream.
    """

    wire: str
    conversation: int
    goes_back: int
    is_edited: bool
    drops_thinking: bool
    answers_calls: bool
    times: int
    choices: int
    stream: bool
    leaves: Literal["never", "before", "within"]
    tools: bool

    @property
    def is_plain(self) -> bool:
        """True if one request continues the conversation as it was, and waits for its reply."""
        is_unchanged = not (self.goes_back or self.is_edited or self.drops_thinking)
        return is_unchanged and self.times == self.choices == 1 and self.leaves == "never"


place = {"wire": st.sampled_from(sorted(WIRES)), "conversation": st.integers(0, 1)}
kind = {"answers_calls": st.booleans(), "stream": st.booleans()}
plain_moves = st.builds(
    Move,
    **place,
    **kind,
    goes_back=st.just(0),
    is_edited=st.just(value=False),
    drops_thinking=st.just(value=False),
    times=st.just(1),
    choices=st.just(1),
    leaves=st.just("never"),
    tools=st.just(value=True),
)
other_moves = st.builds(
    Move,
    **place,
    **kind,
    goes_back=st.integers(0, 3),
    is_edited=st.booleans(),
    drops_thinking=st.booleans(),
    times=st.integers(1, 2),
    choices=st.integers(1, 2),
    leaves=st.sampled_from(["never", "never", "before", "within"]),
    tools=st.booleans(),
)


class CountingSampler(ScriptedSampler):
    """A sampler that keeps every completion that it returned, and lets other requests go first."""

    def __init__(self, seeds: int) -> None:
        super().__init__(lambda prompt, *, seed: REPLIES[(seed + seeds) % len(REPLIES)], chat=ByteChat())
        self.returned: list[Completion] = []

    async def sample(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0 if len(self.requests) % 2 else 0.02)  # before and after a stream opens
        completions = await super().sample(*arguments, **options)
        self.returned += completions
        return completions


@dataclass(frozen=True)
class History:
    """A conversation as its client knows it.

    Args:
        turn: index of the turn of the last reply, if a plain request got it.
        tools: whether that request had tools.
    """

    items: tuple[Item, ...] = ()
    turn: int | None = None
    tools: bool = False


async def play_move(endpoint: Endpoint, move: Move, history: History, policy: RecordingPolicy) -> History:
    wire = WIRES[move.wire]
    items = list(history.items[: max(len(history.items) - move.goes_back, 0)])
    if move.is_edited and items:
        items[-1] = make_user_message("edited")
    if move.drops_thinking:
        items = wire.drop_thinking(items)
    results = wire.make_results(items) if move.answers_calls else []
    items += results or [make_user_message(f"{move.wire} {move.conversation}: go on {len(items)}")]
    if move.leaves != "never":
        body = wire.make_body(items, tools=move.tools, stream=move.stream or move.leaves == "within")
        leaving = leave(wire, endpoint, body, within=move.leaves == "within")
        await asyncio.gather(leaving, *(leave(wire, endpoint, body, within=False) for _ in range(move.times - 1)))
        return History(tuple(items))
    asked = [
        wire.ask(endpoint, items, tools=move.tools, stream=move.stream, choices=move.choices) for _ in range(move.times)
    ]
    replies = await asyncio.gather(*asked)
    if not move.is_plain:
        return History((*items, *replies[0]))
    turn = len(policy.turns) - 1
    if history.turn is not None and history.tools == move.tools:
        assert policy.turns[turn].parent == history.turn, "a conversation that goes on is one segment"
    return History((*items, *replies[0]), turn, move.tools)


@settings(max_examples=30, deadline=None)
@given(st.lists(plain_moves | other_moves, max_size=8), st.integers(0, 5))
def test_each_recorded_token_is_trained_exactly_once(script: list[Move], seeds: int) -> None:
    sampler = CountingSampler(seeds)
    policy = RecordingPolicy(
        sampler=lambda: sampler, chat=ByteChat(), sampling=Sampling(max_tokens=60), seed=lambda turn: turn
    )

    async def play() -> None:
        histories: dict[tuple[str, int], History] = {}
        async with policy.endpoint() as endpoint:
            for move in script:
                place = move.wire, move.conversation
                histories[place] = await play_move(endpoint, move, histories.get(place, History()), policy)

    asyncio.run(play())
    group = Group("env", "task", 0, (replace(episode(1.0), turns=policy.turns),))
    report = asyncio.run(audit_group(group))
    assert report.mismatch is None
    recorded = sorted(turn.completion.tolist() for turn in policy.turns)
    assert recorded == sorted(completion.tokens.tolist() for completion in sampler.returned), "none is lost"
    assert report.tokens == sum(map(len, recorded)), "none is trained twice"
