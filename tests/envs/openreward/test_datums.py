"""Datums of episodes with tools: only tokens sampled by the model are trained on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit._util.priority_semaphore import Slots
from rlkit.algorithms.datums import episode_data
from rlkit.env import Task
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.task import OpenRewardTask
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Group, Sampling
from tests.envs.openreward.worlds import Served, call

MEMBERS = 3


@cache
def tasks(url: str) -> Sequence[OpenRewardTask]:
    return openreward(target=f"{url}#marks", max_turns=5, on_message="nudge")


def author(prompt: str, *, seed: int) -> str:
    """A turn of words, thoughts, calls of all kinds and broken ones."""
    chance = random.Random(seed)
    pieces = [
        "words é 日本 ",
        "<think>hm</think>",
        call("mark", mark="a", reward=chance.randrange(5)),
        call("mark", mark="b", reward=None),
        call("indented", chars=chance.randrange(400)),
        call("unknown"),
        "<tool_call>{</tool_call>",
        call("mark", mark="c", reward=chance.randrange(5), finished=True),
    ]
    return "".join(chance.choices(pieces, weights=[3, 1, 4, 2, 2, 1, 1, 2], k=chance.randrange(4)))


async def played(url: str, seed: int, keeps_thinking: bool) -> Group:
    chat = ByteChat(keeps_thinking=keeps_thinking)
    limits = EnvSettings(MEMBERS, Sampling(300), 60.0, 0, Limits())
    player = Player(LocalRunner(chat), {"marks": limits}, seed=seed, slots=Slots(MEMBERS))
    sampler = ScriptedSampler(author, chat=chat)
    return await player.play(Task(0, "marks", tasks(url)[0]), lambda: sampler)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), keeps_thinking=st.booleans())
def test_only_sampled_tokens_have_advantages(worlds: Served, seed: int, keeps_thinking: bool) -> None:
    group = asyncio.run(played(worlds.url, seed, keeps_thinking))
    for episode in group.episodes:
        assert episode.error is None
        turn_advantages = np.arange(1.0, len(episode.turns) + 1)  # an advantage that says which turn it is of
        data = [datum for _, datum in episode_data(episode, turn_advantages)]
        trained = {number: list[int]() for number in range(1, len(episode.turns) + 1)}
        for datum in data:
            assert np.array_equal(datum.prompt.tokens[1:], datum.targets[:-1]), "a target is the token that comes next"
            assert np.array_equal(datum.advantages != 0, datum.mask), "tokens of the environment get none"
            assert np.array_equal(datum.logprobs, np.where(datum.mask, -1.0, 0.0))
            for token, advantage in zip(datum.targets, datum.advantages, strict=True):
                if advantage:
                    trained[round(float(advantage))].append(int(token))
        assert list(trained.values()) == [turn.completion.tolist() for turn in episode.turns]


@pytest.mark.parametrize("chars", [4094, 9002, 9004, 9006])
def test_the_spaces_of_a_long_answer_reach_the_model(worlds: Served, chars: int) -> None:
    policy = ScriptedPolicy([call("indented", chars=chars)] + ["done"] * 4)
    asyncio.run(tasks(worlds.url)[0].rollout(policy))
    assert "x " * (chars // 2) in policy.prompts[1]
