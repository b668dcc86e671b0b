"""Groups that a server compares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rlkit._util.priority_semaphore import Slots
from rlkit.env import Task
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.blocks import make_candidate
from rlkit.policy import Limits
from rlkit.rollout.player import GroupProgress, Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Group, Sampling
from tests.envs.openreward.worlds import CALLS, Served, call
from tests.faulty_proxy import FaultyProxy

NOTHING = GroupProgress()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.envs.openreward.admission._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("rlkit.envs.openreward.admission._LONGEST_PAUSE_S", 0.05)


def play(
    url: str, replies: Sequence[str], *, progress: GroupProgress = NOTHING, **args: Any
) -> tuple[Group, list[Episode]]:
    """A group, and the episodes whose rewards were changed."""
    CALLS.clear()
    chat, replies_left, recorded = ByteChat(), iter(replies), list[Episode]()

    def author(prompt: str, *, seed: int) -> str:
        return next(replies_left)

    limits = EnvSettings(2, Sampling(300), 60.0, 0, Limits())
    player = Player(
        LocalRunner(chat),
        {"it": limits},
        seed=0,
        slots=Slots(1),
        record=lambda task, episode: recorded.append(episode),
    )
    task = openreward(target=url, **args)[0]
    group = asyncio.run(player.play(Task(0, "it", task), lambda: ScriptedSampler(author, chat=chat), progress=progress))
    return group, recorded[2 - len(progress.episodes) :]  # after those that ended


@pytest.mark.parametrize(
    ("args", "rewards"),
    [
        ({}, [0.25, 1.0]),
        ({"group_score": "replace"}, [0.0, 1.0]),
        ({"max_reward": 0.5}, [0.25, 0.5]),
    ],
)
def test_a_group_is_scored_when_it_is_complete(worlds: Served, args: dict[str, Any], rewards: list[float]) -> None:
    group, scored = play(f"{worlds.url}#compared", ["a bonus", call("look"), "a much longer answer"], **args)
    assert group.rewards.tolist() == rewards
    assert [episode.reward for episode in scored] == rewards
    assert CALLS["scored"] == 1
    assert worlds.sessions == 0


def test_a_group_without_group_scoring_has_the_rewards_of_its_calls(worlds: Served) -> None:
    group, scored = play(f"{worlds.url}#compared", ["a bonus", "a longer bonus"], group_score="off")
    assert (group.rewards.tolist(), scored) == ([0.25, 0.25], [])
    group, scored = play(f"{worlds.url}#answers", ["yes", "no"])
    assert (group.rewards.tolist(), scored, CALLS["scored"]) == ([1.0, 0.0], [], 0)


def test_a_failed_group_score_gives_no_reward(worlds: Served) -> None:
    group, scored = play(f"{worlds.url}#compared", ["a bonus", "unjudgeable"])
    assert [episode.status for episode in group.episodes] == ["failed", "failed"]
    assert all("the judge gave up" in (episode.error or "") for episode in scored)


def test_a_group_scored_before_an_interruption_is_not_scored_again(worlds: Served) -> None:
    group, _ = play(f"{worlds.url}#compared", ["a bonus", "a much longer answer"])
    progress = GroupProgress({episode.member: episode for episode in group.episodes}, {0: 1, 1: 1})
    again, scored = play(f"{worlds.url}#compared", [], progress=progress)
    assert (again.rewards.tolist(), scored, CALLS["scored"]) == (group.rewards.tolist(), [], 0)


def test_a_group_score_is_retried_if_the_server_is_busy(worlds: Served) -> None:
    with FaultyProxy(worlds.url, share=0.7, kinds=("429",), path_suffix="/score_group", seed=1) as proxy:
        group, _ = play(f"{proxy.url}#compared", ["a bonus", "a much longer answer"])
        assert proxy.outcomes["429"] > 0
    assert group.rewards.tolist() == [0.25, 1.0]
    assert worlds.sessions == 0


def test_a_candidate_is_the_whole_conversation(worlds: Served) -> None:
    group, _ = play(f"{worlds.url}#compared", ["a bonus", "<think>hm</think>So." + call("look"), "It is."])
    candidate = make_candidate(group.episodes[1])
    assert [[block.type for block in message.blocks] for message in candidate] == [
        ["text"], ["reasoning", "text", "tool_call"], ["tool_result"], ["text"],
    ]  # fmt: skip
