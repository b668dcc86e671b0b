from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.algorithms.advantages import as_estimator
from rlkit.algorithms.datums import Preparation
from rlkit.testing import ByteChat, ScriptedPolicy
from rlkit.tools.audit import Audit, audit_group, check
from rlkit.types import Datum, Group, Message, Turn
from tests.builders import episode, turn


def make_data(group: Group) -> Sequence[Datum]:
    """The group's sequences with the numbers of its turns, as the audit makes them."""
    numbers, next_number = list[NDArray[np.float64]](), 1.0
    for played_episode in group.episodes:
        numbers.append(np.arange(next_number, next_number + len(played_episode.turns), dtype=np.float64))
        next_number += len(played_episode.turns)
    preparation = Preparation({group.env: as_estimator(lambda group: numbers)}, every_sequence=True)
    return asyncio.run(preparation.prepare(group)).data


def make_group(*episodes: Sequence[Turn], rewards: Sequence[float | None] = ()) -> Group:
    all_rewards = rewards or [1.0] * len(episodes)
    members = enumerate(zip(all_rewards, episodes, strict=True))
    return Group("env", "task", 0, tuple(episode(reward, member=n, turns=turns) for n, (reward, turns) in members))


CHAIN = (turn([1, 2], [3, 4], forced=1), turn([5], [6, 7], parent=0), turn([5, 5], [8], parent=0), turn([9], [3, 4]))


def test_unchanged_group_has_no_mismatch() -> None:
    group = make_group(CHAIN, CHAIN[:1], CHAIN[:2], rewards=[1.0, 0.0, None])
    assert asyncio.run(audit_group(group)) == Audit(groups=1, episodes=2, turns=5, sequences=4, tokens=7)


def change_field(datum: Datum, field: str, at: int, value: float) -> Datum:
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
def test_changed_token_is_reported(field: str, at: int, value: float, message: str) -> None:
    group = make_group(CHAIN)
    first, *others = make_data(group)
    report = check(group, [change_field(first, field, at, value), *others])
    assert report.mismatch is not None
    assert message in report.mismatch


def test_a_masked_episode_is_in_no_sequence() -> None:
    group = make_group(CHAIN, CHAIN[:1])
    masked = replace(group, episodes=(group.episodes[0], replace(group.episodes[1], masked=True)))
    assert asyncio.run(audit_group(masked)) == Audit(groups=1, episodes=1, turns=4, sequences=3, tokens=6)
    report = check(masked, make_data(group))
    assert "was not sampled there" in (report.mismatch or "")


def test_changed_prompt_is_a_mismatch() -> None:
    group = make_group(CHAIN[:2])
    (datum,) = make_data(group)
    tokens = datum.prompt.tokens.copy()
    tokens[0] = 7
    wrong = replace(datum, prompt=replace(datum.prompt, tokens=tokens))
    assert "sequence 0: token 4 at position 3" in (check(group, [wrong]).mismatch or "")


def test_token_trained_on_twice_or_never_is_a_mismatch() -> None:
    group = make_group(CHAIN[:2])
    (datum,) = make_data(group)
    assert "sequence 1: token 4" in (check(group, [datum, datum]).mismatch or "")
    assert check(group, []).mismatch == "member 0, turn 0: sampled token 1 is in no training sequence"
    assert check(group, [], whole=False).cut_tokens == 3


def test_tokens_past_the_longest_sequence_are_counted() -> None:
    report = asyncio.run(audit_group(make_group(CHAIN), max_tokens=5))
    assert (report.mismatch, report.tokens, report.cut_tokens) == (None, 3, 3)


pieces = st.sampled_from(["", "a", " b ", "<think>c</think>d", "<think>e", "é", "<tool_call>{}</tool_call>"])
moves = st.tuples(st.integers(0, 4), st.sampled_from(["x", "y"]), pieces, st.sampled_from(["", "a"]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(moves, min_size=1, max_size=6), min_size=1, max_size=3), st.booleans(), st.integers(1, 20))
def test_trained_tokens_of_any_history_were_sampled_at_their_positions(
    members: list[list[tuple[int, str, str, str]]], keeps_thinking: bool, max_tokens: int
) -> None:
    async def play(script: list[tuple[int, str, str, str]]) -> tuple[Turn, ...]:
        chat = ByteChat(keeps_thinking=keeps_thinking)
        policy = ScriptedPolicy([reply for _, _, reply, _ in script], chat=chat, max_tokens=max_tokens)
        history: list[Message] = []
        for kept_turns, prompt, _, forced in script:
            history = [*history[: 2 * kept_turns], {"role": "user", "content": prompt}]
            reply = await policy.chat(history, forced=forced)
            history.append(reply.message)
        return policy.turns

    async def main() -> None:
        group = make_group(*[await play(script) for script in members])
        sampled = sum(episode.sampled_tokens for episode in group.episodes)
        report = await audit_group(group)
        assert (report.mismatch, report.tokens, report.cut_tokens) == (None, sampled, 0)

    asyncio.run(main())
