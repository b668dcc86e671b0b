"""Sessions on a bad day: every rollout ends in a known state, nothing is done twice, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.env import Task
from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.admission import gate
from rlkit.envs.openreward.connection.target import Target
from rlkit.envs.openreward.session import TimeLimits
from rlkit.envs.openreward.task import OpenRewardTask
from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Sampling
from tests.envs.openreward.worlds import CALLS, PROMPTS, Marks, Served, call, served
from tests.faulty_proxy import FaultyProxy
from tests.marks import split_slow

QUICK = TimeLimits(start_s=3.0, call_s=3.0, request_s=1.5)
"""Short, as requests that hang wait for them, and long enough for a busy machine to answer the others."""


def through(task: OpenRewardTask, url: str, **changes: object) -> OpenRewardTask:
    """The task, played by way of another address."""
    settings = task.settings
    access = replace(settings.access, target=replace(settings.access.target, base_url=url))
    return replace(task, settings=replace(settings, access=access, time=QUICK, **changes))  # pyright: ignore


@pytest.fixture
def worlds() -> Iterator[Served]:
    """A server of the test's own: a session that one test left behind would fail all that follow."""
    with served() as running:
        yield running
        assert running.sessions == 0, "a session was left on the server"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short: how long they are has a test of its own."""
    import openreward.api._session.http as http
    from tenacity import wait_none

    monkeypatch.setattr("rlkit.envs.openreward.admission._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("rlkit.envs.openreward.admission._LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(http, "_env_server_exp_wait", wait_none())
    monkeypatch.setattr(http._request_retryable_env_server.retry, "wait", wait_none())  # pyright: ignore


@pytest.mark.slow
def test_every_rollout_ends_in_a_known_state_with_a_fifth_of_requests_failing(worlds: Served) -> None:
    CALLS.clear()
    (first, *_) = openreward(target=f"{worlds.url}#marks")
    chat = ByteChat()
    request_numbers = iter(range(10**6))

    def author(prompt: str, *, seed: int) -> str:
        return call("mark", mark=f"call {next(request_numbers)}", reward=1.0, finished=prompt.count("marked") >= 1)

    async def days() -> tuple[Sequence[rlkit.Group], Sequence[rlkit.Group]]:
        settings = EnvSettings(8, Sampling(10_000), 60.0, 8, Limits())
        player = Player(LocalRunner(chat), {"marks": settings}, seed=0, slots=Slots(24))
        sampler = ScriptedSampler(author, chat=chat)
        with FaultyProxy(worlds.url, share=0.2, kinds=("429", "500", "reply", "cut", "hang"), seed=3) as proxy:
            task = through(first, proxy.url)
            bad = await asyncio.gather(*(player.play(Task(draw, "marks", task), lambda: sampler) for draw in range(3)))
            assert proxy.outcomes.total() > proxy.outcomes["through"]
            sessions = gate(task.settings.access, task.settings.max_sessions)
            # Whether a session was refused, and how many, depends on the order of the requests.
            narrowed = sessions.limit = min(sessions.limit, 8.0)
            proxy.share = 0.0
            good = await asyncio.gather(*(player.play(Task(draw, "marks", task), lambda: sampler) for draw in (3, 4)))
            assert sessions.limit > narrowed, "throughput recovers"
        return bad, good

    bad, good = asyncio.run(days())
    assert all(episode.status == "completed" for group in good for episode in group.episodes)
    episodes = [episode for group in bad for episode in group.episodes]
    assert max(CALLS.values()) == 1, "no call is carried out twice"
    assert worlds.sessions == 0
    for episode in episodes:
        assert (episode.reward is None) == (episode.status == "failed") == (episode.error is not None)
        assert episode.reward in (None, 2.0)
    assert sum(episode.status == "completed" for episode in episodes) >= 8, [episode.error for episode in episodes]


def play(task: OpenRewardTask, *replies: str) -> rlkit.Outcome:
    return asyncio.run(task.rollout(ScriptedPolicy(replies)))


@pytest.mark.parametrize("kind", ["reply", "cut"])
def test_a_call_whose_reply_is_lost_is_not_repeated_and_has_no_reward(worlds: Served, kind: str) -> None:
    CALLS.clear()
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    with (
        FaultyProxy(worlds.url, share=1.0, kinds=(kind,), path_suffix="/call") as proxy,
        pytest.raises(EnvironmentFault),
    ):  # pyright: ignore
        play(through(task, proxy.url), call("mark", mark="once", reward=1, finished=True))
    assert CALLS["once"] == 1
    assert worlds.sessions == 0


@pytest.mark.parametrize("kind", ["reply", "cut", "503"])
def test_a_session_whose_prompt_is_lost_gets_no_more_requests(worlds: Served, kind: str) -> None:
    PROMPTS.clear()
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    with FaultyProxy(worlds.url, share=0.6, kinds=(kind,), path_suffix="/messages", seed=1) as proxy:  # pyright: ignore
        outcome = play(through(task, proxy.url, openings=20), call("mark", mark="a", reward=1, finished=True))
        assert proxy.outcomes[kind] > 0
    assert outcome.reward == 1
    assert set(PROMPTS.values()) == {1}
    assert worlds.sessions == 0


def test_a_prompt_is_requested_again_if_the_server_is_busy(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    with FaultyProxy(worlds.url, share=0.5, kinds=("429",), path_suffix="/messages", seed=4) as proxy:
        outcome = play(through(task, proxy.url), call("mark", mark="a", reward=1, finished=True))
        assert proxy.outcomes["429"] > 0
    assert outcome.reward == 1


def test_a_call_that_the_server_has_no_time_for_is_made_again(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    with FaultyProxy(worlds.url, share=0.5, kinds=("429",), path_suffix="/call", seed=2) as proxy:
        outcome = play(through(task, proxy.url), *[call("mark", mark="a", reward=1)] * 4, "done")
        assert proxy.outcomes["429"] > 0
    assert outcome.reward == 4


@pytest.mark.parametrize(
    "kind", split_slow(["reply", "cut", "hang", "429", "503"], lambda kind: kind in ("cut", "503"))
)
def test_a_session_that_fails_to_open_is_replaced_and_deleted(worlds: Served, kind: str) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    task = through(task, "")
    task = replace(task, settings=replace(task.settings, time=TimeLimits(1.0, 1.0, 0.5), openings=12))
    with FaultyProxy(worlds.url, share=0.5, kinds=(kind,), path_suffix="/create", seed=1) as proxy:  # pyright: ignore
        target = replace(task.settings.access.target, base_url=proxy.url)
        access = replace(task.settings.access, target=target)
        outcome = play(
            replace(task, settings=replace(task.settings, access=access)),
            call("mark", mark="a", reward=1, finished=True),
        )
        assert proxy.outcomes[kind] > 0
    assert outcome.reward == 1
    assert worlds.sessions == 0


def test_a_session_lost_by_the_server_fails_the_episode(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")

    def forgetting(prompt: str) -> str:
        worlds.server._ready.clear()
        return call("mark", mark="a", reward=1, finished=True)

    with pytest.raises(EnvironmentFault, match="the session was lost: marks: calling mark: HTTP 404"):
        asyncio.run(task.rollout(ScriptedPolicy(forgetting)))


def test_play_continues_after_a_server_restart(worlds: Served) -> None:
    with served([Marks]) as first:
        (task, *_) = openreward(target=first.url)
        port = int(first.url.rpartition(":")[2])
    with served([Marks], port=port):
        assert play(task, call("mark", mark="a", reward=1, finished=True)).reward == 1


def test_permanent_errors_are_one_line_before_the_first_rollout(
    worlds: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.setattr("asyncio.sleep", _no_sleep(asyncio.sleep))
    for arguments, message in [
        ({"target": f"{worlds.url}#mark"}, r"target: 127.* has no 'mark'. Did you mean 'marks'\?"),
        ({"target": worlds.url, "splits": "trian"}, r"splits: .* has no split 'trian'. Did you mean 'train'\?"),
        ({"target": "http://127.0.0.1:9"}, "target: 127.0.0.1:9 does not answer"),
        ({"target": "nonsense"}, "target: 'nonsense' is not an environment"),
        ({}, "target or server: give one of them"),
        ({"target": worlds.url, "secrets": {"KEY": "NOT_SET_ANYWHERE"}}, "secrets.KEY: NOT_SET_ANYWHERE is not set"),
    ]:
        with pytest.raises(UsageError, match=message):
            openreward(**arguments)  # pyright: ignore
    with pytest.raises(MissingError, match="OPENREWARD_API_KEY is not set, but Owner/Name needs it"):
        openreward(target="Owner/Name")
    with pytest.raises(MissingError, match=r"OPENREWARD_API_KEY is not set, but 127\.0\.0\.1:.* needs it"):
        openreward(target=worlds.url, send_api_key=True)


def _no_sleep(sleep: object) -> object:
    async def hurried(delay: float, result: object = None) -> object:
        return await sleep(min(delay, 0.01), result)  # pyright: ignore

    return hurried


@pytest.mark.parametrize(("status", "message"), [("401", "set OPENREWARD_API_KEY"), ("402", "no credit left")])
def test_a_rejected_key_stops_the_run(worlds: Served, status: str, message: str) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    with (
        FaultyProxy(worlds.url, share=1.0, kinds=(status,), path_suffix="/create") as proxy,  # pyright: ignore
        pytest.raises(UsageError, match=message),
    ):
        play(through(task, proxy.url))


def test_the_platform_key_is_sent_to_no_other_server(worlds: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENREWARD_API_KEY", "or-key-of-the-platform")
    (task, *_) = openreward(target=f"{worlds.url}#marks")
    assert "or-key-of-the-platform" not in str(play(task, call("reveal")).info)
    assert task.settings.access.key is None
    sent = openreward(target=f"{worlds.url}#marks", send_api_key=True)
    assert sent[0].settings.access.key == "or-key-of-the-platform"
    assert isinstance(sent[0].settings.access.target, Target)
