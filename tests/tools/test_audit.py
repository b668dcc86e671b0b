from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.algorithms.datums import Preparation
from rlkit.testing import ByteChat, ScriptedPolicy
from rlkit.tools.audit import Audit, audit_group, check
from rlkit.types import Datum, Group, Message, Turn
from tests.builders import episode, turn


def made(group: Group) -> Sequence[Datum]:
    """The group's sequences with the numbers of its turns, as the audit makes them."""
    numbers, after = list[NDArray[np.float64]](), 1.0
    for one in group.episodes:
        numbers.append(np.arange(after, after + len(one.turns), dtype=np.float64))
        after += len(one.turns)
    preparation = Preparation({group.env: lambda group: numbers}, every_sequence=True)
    return asyncio.run(preparation.prepare(group)).data


def of(*episodes: Sequence[Turn], rewards: Sequence[float | None] = ()) -> Group:
    given = rewards or [1.0] * len(episodes)
    played = enumerate(zip(given, episodes, strict=True))
    return Group("env", "task", 0, tuple(episode(reward, member=n, turns=turns) for n, (reward, turns) in played))


CHAIN = (turn([1, 2], [3, 4], forced=1), turn([5], [6, 7], parent=0), turn([5, 5], [8], parent=0), turn([9], [3, 4]))


def test_a_group_is_found_as_it_was_sampled() -> None:
    group = of(CHAIN, CHAIN[:1], CHAIN[:2], rewards=[1.0, 0.0, None])
    assert asyncio.run(audit_group(group)) == Audit(groups=1, episodes=2, turns=5, sequences=4, tokens=7)


def changed(datum: Datum, field: str, at: int, value: float) -> Datum:
    array = getattr(datum, field).copy()
    array[at] = value
    return replace(datum, **{field: array})


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("targets", 2, 9, "position 2 is not the next token"),
        ("advantages", 1, 5, "token 3 at position 2 has an advantage but was not sampled"),
        ("mask", 1, True, "token 3 at position 2 is trained on but was not sampled there"),
        ("logprobs", 2, -9, "token 4 at position 3 is trained on but was not sampled there"),
        ("advantages", 2, 2, "token 4 at position 3 is trained on but was not sampled there"),
        ("mask", 2, False, "has an advantage but was not sampled"),
    ],
)
def test_a_token_that_is_not_as_it_was_sampled_is_named(field: str, at: int, value: float, message: str) -> None:
    group = of(CHAIN)
    first, *others = made(group)
    found = check(group, [changed(first, field, at, value), *others])
    assert found.mismatch is not None
    assert message in found.mismatch


def test_a_masked_episode_is_in_no_sequence() -> None:
    group = of(CHAIN, CHAIN[:1])
    masked = replace(group, episodes=(group.episodes[0], replace(group.episodes[1], masked=True)))
    assert asyncio.run(audit_group(masked)) == Audit(groups=1, episodes=1, turns=4, sequences=3, tokens=6)
    found = check(masked, made(group))
    assert "was not sampled there" in (found.mismatch or "")


def test_a_prompt_that_is_not_the_one_that_was_given_is_a_mismatch() -> None:
    group = of(CHAIN[:2])
    (datum,) = made(group)
    tokens = datum.prompt.tokens.copy()
    tokens[0] = 7
    wrong = replace(datum, prompt=replace(datum.prompt, tokens=tokens))
    assert "sequence 0: token 4 at position 3" in (check(group, [wrong]).mismatch or "")


def test_a_token_that_is_trained_on_twice_or_never_is_a_mismatch() -> None:
    group = of(CHAIN[:2])
    (datum,) = made(group)
    assert "sequence 1: token 4" in (check(group, [datum, datum]).mismatch or "")
    assert check(group, []).mismatch == "member 0, turn 0: sampled token 1 is in no training sequence"
    assert check(group, [], whole=False).cut_tokens == 3


def test_tokens_past_the_longest_sequence_are_counted() -> None:
    found = asyncio.run(audit_group(of(CHAIN), max_tokens=5))
    assert (found.mismatch, found.tokens, found.cut_tokens) == (None, 3, 3)


pieces = st.sampled_from(["", "a", " b ", "<think>c</think>d", "<think>e", "é", "<tool_call>{}</tool_call>"])
moves = st.tuples(st.integers(0, 4), st.sampled_from(["x", "y"]), pieces, st.sampled_from(["", "a"]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(moves, min_size=1, max_size=6), min_size=1, max_size=3), st.booleans(), st.integers(1, 20))
def test_every_trained_token_of_any_history_was_sampled_where_it_stands(
    members: list[list[tuple[int, str, str, str]]], keeps_thinking: bool, max_tokens: int
) -> None:
    async def play(script: list[tuple[int, str, str, str]]) -> tuple[Turn, ...]:
        chat = ByteChat(keeps_thinking=keeps_thinking)
        policy = ScriptedPolicy([reply for _, _, reply, _ in script], chat=chat, max_tokens=max_tokens)
        history: list[Message] = []
        for kept, prompt, _, forced in script:
            history = [*history[: 2 * kept], {"role": "user", "content": prompt}]
            reply = await policy.chat(history, forced=forced)
            history.append(reply.message)
        return policy.turns

    async def main() -> None:
        group = of(*[await play(script) for script in members])
        sampled = sum(one.sampled_tokens for one in group.episodes)
        found = await audit_group(group)
        assert (found.mismatch, found.tokens, found.cut_tokens) == (None, sampled, 0)

    asyncio.run(main())
