from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from rlkit._util.priority_semaphore import Slots
from rlkit.env import Env, Task
from rlkit.errors import EnvironmentFault, RewardError, ServiceError, UsageError
from rlkit.policy import Limits, Policy, Sampler
from rlkit.rollout.player import GroupProgress, Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.rollout.task_guard import GRACE_S
from rlkit.rollout.validation import as_outcome
from rlkit.testing import ByteChat, ScriptedSampler, run_virtual
from rlkit.types import Completion, Episode, Group, Outcome, Prompt, Sampling
from tests import builders
from tests.limits import HANG_S


class Scripted(Env):
    """Plays a list of results, one a rollout; an exception is raised, None hangs."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.played = 0
        self.live = self.most_live = 0

    async def rollout(self, policy: Policy) -> Outcome | float:
        result = self.results[min(self.played, len(self.results) - 1)]
        self.played += 1
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        try:
            await policy.chat([{"role": "user", "content": "hello"}])
            if result is None:
                await asyncio.Event().wait()
            if isinstance(result, BaseException):
                raise result
            return result  # type: ignore[return-value]  whatever the test says
        finally:
            self.live -= 1


class Aborted(BaseException):
    """Exception that is no `Exception`, as some libraries raise."""


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __str__(self) -> str:
        return "mute"


def play(
    env: Env, *, group_size: int = 4, retries: int = 2, timeout_s: float = 60, max_concurrent: int = 100, **limits
):
    settings = EnvSettings(group_size, Sampling(max_tokens=16), timeout_s, retries, Limits(**limits))
    chat = ByteChat()
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=chat)
    finished = list[Episode]()

    def record(task: Task, episode: Episode) -> None:
        finished.append(episode)

    player = Player(LocalRunner(chat), {"e": settings}, seed=0, slots=Slots(max_concurrent), record=record)
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler))
    return group, finished, player, sampler


def list_statuses(group: Group) -> list[str]:
    return [episode.status for episode in group.episodes]


def test_a_group_is_one_task_played_many_times() -> None:
    group, _, player, _ = play(Scripted(1.0, 0.0, Outcome(0.5, {"right": 1.0}, truncated=True, masked=True), True))
    assert group.rewards.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert list_statuses(group) == ["completed", "completed", "truncated", "completed"]
    assert [episode.member for episode in group.episodes] == [0, 1, 2, 3]
    assert group.episodes[2].metrics == {"right": 1.0}
    assert [episode.masked for episode in group.episodes] == [False, False, True, False]
    assert (player.counts.queued, player.counts.running, player.counts.finished) == (0, 0, 4)


def test_deliberate_failure_message_is_the_error() -> None:
    group, *_ = play(Scripted(EnvironmentFault("timeout: the agent's time was over")), retries=0)
    assert {episode.error for episode in group.episodes} == {"timeout: the agent's time was over"}


def test_each_turn_of_a_group_has_its_own_seed() -> None:
    *_, sampler = play(Scripted(1.0))
    assert len({request.seed for request in sampler.requests}) == 4


def test_failed_rollout_is_retried_and_gets_no_reward() -> None:
    group, finished, player, _ = play(Scripted(1.0, ValueError("sandbox died"), 1.0, 1.0, 0.0))
    assert list_statuses(group) == ["completed"] * 4
    assert sorted(episode.attempt for episode in group.episodes) == [0, 0, 0, 1]
    failed = [episode for episode in finished if episode.status == "failed"]
    assert len(failed) == player.counts.failed == 1
    assert failed[0].reward is None
    assert "ValueError: sandbox died at " in (failed[0].error or "")
    assert "test_player.py:" in (failed[0].error or "")


def test_group_without_retries_left_keeps_its_valid_episodes() -> None:
    group, finished, *_ = play(Scripted(1.0, *[ValueError("x")] * 10), retries=2)
    assert list_statuses(group).count("failed") == 3
    assert len(finished) == 4 + 2
    assert group.valid_mask.sum() == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (math.nan, "reward nan; rewards must be finite"),
        (math.inf, "must be finite"),
        ("one", "str 'one'"),
        (Outcome("1"), "str '1'"),  # type: ignore[arg-type]
        (np.zeros(2), "ndarray"),
        (asyncio.CancelledError(), "cancelled its own rollout"),
        (TimeoutError("mine"), "TimeoutError: mine"),
        (SystemExit(0), "SystemExit: 0"),
        (Outcome(1.0, metrics={"a": math.nan}), "the metric a = float nan"),
        (Outcome(1.0, metrics={"a": "x"}), "the metric a = str 'x'"),  # type: ignore[dict-item]  the mistake
        (Outcome(1.0, metrics=None), "the metrics NoneType None"),  # type: ignore[arg-type]  the mistake
        (Outcome(1.0, info="text"), "Scripted returned the info str 'text'"),  # type: ignore[arg-type]  the mistake
        (Outcome(1.0, info={"a": {("b", 1): 2}}), "Scripted returned the info a, which cannot be recorded: it has the"),  # type: ignore[dict-item]  the mistake
        (Outcome(1.0, truncated=np.zeros(2)), "ValueError: The truth value"),  # type: ignore[arg-type]  the mistake
        (Mute(), "Scripted returned Mute whose repr raises RuntimeError"),
        (Aborted("now"), "Aborted: now at "),
        (RuntimeError("cannot read b\udcff"), "RuntimeError: cannot read b\\udcff at "),
    ],
    ids=str,
)
def test_invalid_outcome_fails_the_rollout(result: object, message: str) -> None:
    group, *_ = play(Scripted(result), retries=0)
    assert set(list_statuses(group)) == {"failed"}
    assert message in (group.episodes[0].error or "")


def test_an_environment_that_hangs_is_timed_out() -> None:
    group, *_ = play(Scripted(1.0, None), retries=0, timeout_s=0.05)
    assert list_statuses(group)[1] == "failed"
    assert "longer than 0.05 s" in (group.episodes[1].error or "")


def test_environment_that_blocks_past_its_limit_fails() -> None:
    class Blocking(Env):
        async def rollout(self, policy: Policy) -> float:
            time.sleep(0.1)
            return 1.0

    group, *_ = play(Blocking(), group_size=1, retries=0, timeout_s=0.05)
    assert "longer than 0.05 s" in (group.episodes[0].error or "")


def test_synchronous_rollout_function_is_an_error() -> None:
    class Plain(Env):
        def rollout(self, policy: Policy) -> float:  # type: ignore[override]  the mistake that is tested
            return 1.0

    group, *_ = play(Plain(), group_size=1, retries=0)
    assert group.episodes[0].error == "Plain.rollout is an ordinary function; write `async def rollout`"


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"max_tokens": 0}])
def test_invalid_request_fails_only_its_episode(setting: dict[str, float]) -> None:
    class Odd(Env):
        async def rollout(self, policy: Policy) -> float:
            await policy.sample("hello", **setting)  # type: ignore[arg-type]  either of the two
            return 1.0

    group, *_ = play(Odd(), group_size=1, retries=0)
    assert "it must be" in (group.episodes[0].error or "")


def test_concurrent_rollouts_stay_below_the_limit() -> None:
    env = Scripted(1.0)
    play(env, group_size=20, max_concurrent=3)
    assert env.most_live == 3


def test_uncaught_limit_error_recommends_a_fix() -> None:
    class Talkative(Env):
        async def rollout(self, policy: Policy) -> float:
            while True:
                await policy.chat([{"role": "user", "content": "more"}])

    group, *_ = play(Talkative(), retries=0, max_turns=3)
    assert "max_turns" in (group.episodes[0].error or "")
    assert "rlkit.LimitReached" in (group.episodes[0].error or "")
    assert len(group.episodes[0].turns) == 3


@pytest.mark.parametrize("error", [ServiceError("gone", request_id="r1"), UsageError("no chat template")])
def test_error_outside_the_environment_ends_the_run(error: Exception) -> None:
    env = Scripted(error)
    with pytest.raises(type(error), match=str(error).split(" ", maxsplit=1)[0]):
        play(env)
    assert env.live == 0


def test_recorded_info_of_an_episode_is_plain_json() -> None:
    info = {"text": "b\udcff", "score": np.float32(1.5), 3: [np.int64(1)]}
    group, *_ = play(Scripted(Outcome(1.0, {"m\udcff": 1.0}, info)), group_size=1)  # type: ignore[dict-item]  what is tested
    assert group.episodes[0].info == {"text": "b\\udcff", "score": 1.5, "3": [1]}
    assert group.episodes[0].metrics == {"m\\udcff": 1.0}


class Swallowing(Env):
    """Ignores its cancellation, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    async def rollout(self, policy: Policy) -> float:
        for _ in range(self.times):
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                continue
        return 1.0


def test_rollout_that_ignores_cancellation_is_abandoned() -> None:
    async def run() -> tuple[Group, float]:
        settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
        player = Player(LocalRunner(ByteChat()), {"e": settings}, seed=0, slots=Slots(2))
        sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
        group = await player.play(Task(7, "e", Swallowing(10**9)), lambda: sampler)
        return group, asyncio.get_running_loop().time()

    group, taken_s = run_virtual(run())
    assert {episode.error for episode in group.episodes} == {
        "the rollout took longer than 20 s (timeout_s) and ignored its cancellation"
    }
    assert taken_s == 20 + GRACE_S


def test_rollout_may_finish_cancellation_late() -> None:
    group, *_ = play(Swallowing(1), group_size=1, retries=0, timeout_s=0.05)
    assert group.episodes[0].error == "the rollout took longer than 0.05 s (timeout_s)"


def test_cancelled_group_ends_even_if_a_rollout_ignores_it() -> None:
    async def run() -> float:
        settings = EnvSettings(2, Sampling(max_tokens=16), 1e6, 0, Limits())
        player = Player(LocalRunner(ByteChat()), {"e": settings}, seed=0, slots=Slots(2))
        sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
        playing = asyncio.create_task(player.play(Task(7, "e", Swallowing(10**9)), lambda: sampler))
        await asyncio.sleep(5)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 5 + GRACE_S


@pytest.mark.parametrize("number", [1, 0.5, True, np.float32(0.5), np.int64(3), np.True_])
def test_any_real_number_is_a_reward(number) -> None:
    assert as_outcome(number).reward == float(number)


def test_list_is_not_a_reward() -> None:
    with pytest.raises(RewardError, match="list"):
        as_outcome([1.0])


class Ranked(Scripted):
    """Rewards the episodes of a group by how they compare."""

    def __init__(self, *results: object, scores: object) -> None:
        super().__init__(*results)
        self.scores = scores
        self.scored_rewards = list[list[float | None]]()

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[float] | None:
        self.scored_rewards.append([episode.reward for episode in episodes])
        if isinstance(self.scores, BaseException):
            raise self.scores
        if self.scores == "never":
            await asyncio.Event().wait()
        return self.scores  # type: ignore[return-value]  whatever the test says


def test_valid_episodes_are_scored_once_after_all_rollouts() -> None:
    env = Ranked(0.0, ValueError("no"), 0.0, scores=[3, 1.5])
    group, finished, *_ = play(env, group_size=3, retries=0)
    rewards = [episode.reward for episode in group.episodes]
    assert sorted(reward for reward in rewards if reward is not None) == [1.5, 3.0]
    assert list_statuses(group).count("failed") == 1
    assert env.scored_rewards == [[0.0, 0.0]]
    assert [episode.reward for episode in finished if episode.reward is not None] == [0.0, 0.0, 3.0, 1.5]


@pytest.mark.parametrize("reported", [0.0, 1.0])
def test_group_is_scored_whatever_metrics_are_reported(reported: float) -> None:
    metrics = {"group_scored": reported}
    group, *_ = play(Ranked(Outcome(0.0, metrics), Outcome(0.0, metrics), scores=[3.0, 1.5]), group_size=2)
    assert sorted(group.rewards.tolist()) == [1.5, 3.0]
    assert [episode.group_scored for episode in group.episodes] == [True, True]
    assert [episode.metrics for episode in group.episodes] == [metrics, metrics]


def test_scored_group_is_not_scored_again() -> None:
    env = Ranked(scores=[7.0, 7.0])
    earlier_episodes = [
        replace(builders.episode(reward, member=m), group_scored=True) for m, reward in enumerate([3.0, 1.5])
    ]
    settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
    player = Player(LocalRunner(ByteChat()), {"e": settings}, seed=0, slots=Slots(2))
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    earlier = GroupProgress(episodes=dict(enumerate(earlier_episodes)))
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler, progress=earlier))
    assert (group.rewards.tolist(), env.scored_rewards) == ([3.0, 1.5], [])


def test_group_scored_with_none_keeps_its_rewards() -> None:
    group, *_ = play(Ranked(0.25, scores=None), group_size=2)
    assert group.rewards.tolist() == [0.25, 0.25]
    env = Ranked(ValueError("no"), scores=[])
    play(env, group_size=2, retries=0)
    assert env.scored_rewards == []


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], r"Ranked scored 2 episodes as list \[1.0\]; return a list with a finite number for each"),
        ([1.0, math.nan], "a finite number for each"),
        ("ab", "a finite number for each"),
        (5, "a finite number for each"),
        (ValueError("the judge is ill"), "ValueError: the judge is ill at .*test_player.py"),
        (Aborted(), "Aborted"),
        ("never", r"scoring the group took longer than 1 s \(timeout_s\)"),
    ],
)
def test_failed_group_scoring_leaves_no_rewards(scores: object, message: str) -> None:
    group, *_ = play(Ranked(0.0, scores=scores), group_size=2, timeout_s=1.0 if scores == "never" else HANG_S)
    assert list_statuses(group) == ["failed", "failed"]
    assert re.search(message, str(group.episodes[0].error))


def test_service_error_in_group_scoring_ends_the_run() -> None:
    with pytest.raises(ServiceError):
        play(Ranked(0.0, scores=ServiceError("gone")))


def resume(
    env: Env, earlier: GroupProgress, *, group_size: int = 3, retries: int = 2
) -> tuple[Group, list[Episode], Player]:
    """A group of which some was played before the run was interrupted."""
    settings, finished = EnvSettings(group_size, Sampling(max_tokens=16), 60, retries, Limits()), list[Episode]()
    chat = ByteChat()
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=chat)
    player = Player(
        LocalRunner(chat),
        {"e": settings},
        seed=0,
        slots=Slots(9),
        record=lambda task, episode: finished.append(episode),
    )
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler, progress=earlier))
    counts = player.counts
    assert (counts.queued, counts.running, counts.finished) == (0, 0, group_size)
    return group, finished, player


def test_finished_episodes_are_not_played_again_after_an_interruption() -> None:
    done = replace(builders.episode(0.25), attempt=1)
    group, finished, _ = resume(Scripted(1.0), GroupProgress({0: done}, attempts={0: 2}))
    assert group.episodes[0] is done
    assert group.rewards.tolist() == [0.25, 1.0, 1.0]
    assert [(episode.member, episode.attempt) for episode in finished] == [(1, 0), (2, 0)]


@pytest.mark.parametrize(("failed", "played"), [(0, True), (1, True), (2, False)])
def test_failures_before_an_interruption_count_towards_the_retries(failed: int, played: bool) -> None:
    failed_episode = builders.episode(None, member=1)
    group, finished, player = resume(Scripted(1.0), GroupProgress({1: failed_episode}, attempts={1: 1}, failed=failed))
    assert list_statuses(group) == ["completed", "completed" if played else "failed", "completed"]
    assert [(episode.member, episode.attempt) for episode in finished] == [
        (0, 0),
        *([(1, 1)] if played else []),
        (2, 0),
    ]
    assert player.counts.failed == 0  # it was counted when it failed


def test_attempt_after_an_interruption_has_its_own_number_and_seeds() -> None:
    group, finished, _ = resume(Scripted(1.0), GroupProgress(attempts={1: 3}))
    assert [episode.attempt for episode in finished] == [episode.attempt for episode in group.episodes] == [0, 3, 0]


def test_progress_counts_tokens_and_failures() -> None:
    group, finished, player, _ = play(Scripted(1.0, ValueError("x"), 1.0), retries=1)
    assert player.counts.tokens == sum(episode.sampled_tokens for episode in finished) > 0
    assert player.counts.failed == 1
    assert all(episode.seconds >= 0 and episode.info == {} for episode in group.episodes)


class Silent(Sampler):
    """Never answers, and counts who waits."""

    version = 0
    request_count = waiting = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        self.request_count += 1
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        return []


@pytest.mark.parametrize("coalesce", ["always", "never"])
def test_cancelled_group_cancels_its_requests(coalesce: Literal["always", "never"]) -> None:
    async def main() -> None:
        sampler = Silent()
        settings = EnvSettings(3, Sampling(max_tokens=16), 60, 0, Limits(), coalesce=coalesce)
        player = Player(LocalRunner(ByteChat()), {"e": settings}, seed=0, slots=Slots(9))
        playing = asyncio.create_task(player.play(Task(7, "e", Scripted(1.0)), lambda: sampler))
        await asyncio.sleep(1)
        assert sampler.request_count == sampler.waiting == (1 if coalesce == "always" else 3)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(1)
        assert sampler.waiting == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("scores", "rewards"), [([3.0, 1.5], [3.0, 1.5]), (ValueError("ill"), [None, None]), (None, [])]
)
def test_scores_of_a_group_replace_the_recorded_rewards(scores: object, rewards: list[float | None]) -> None:
    recorded = list[Episode]()
    settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    player = Player(
        LocalRunner(ByteChat()),
        {"e": settings},
        seed=0,
        slots=Slots(1),
        record=lambda task, episode: recorded.append(episode),
    )
    group = asyncio.run(player.play(Task(7, "e", Ranked(0.0, 0.0, scores=scores)), lambda: sampler))
    changed = recorded[2:]  # after the two that ended
    assert [(episode.member, episode.attempt, episode.reward) for episode in changed] == [
        (member, 0, reward) for member, reward in enumerate(rewards)
    ]
    assert not changed or changed == list(group.episodes)
