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
from rlkit.rollout.player import EnvSettings, GroupProgress, Player
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
    """What some libraries raise so that nobody catches it."""


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

    player = Player(chat, {"e": settings}, seed=0, slots=Slots(max_concurrent), record=record)
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler))
    return group, finished, player, sampler


def statuses(group: Group) -> list[str]:
    return [episode.status for episode in group.episodes]


def test_a_group_is_one_task_played_many_times() -> None:
    group, _, player, _ = play(Scripted(1.0, 0.0, Outcome(0.5, {"right": 1.0}, truncated=True, masked=True), True))
    assert group.rewards.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert statuses(group) == ["completed", "completed", "truncated", "completed"]
    assert [episode.member for episode in group.episodes] == [0, 1, 2, 3]
    assert group.episodes[2].metrics == {"right": 1.0}
    assert [episode.masked for episode in group.episodes] == [False, False, True, False]
    assert (player.counts.queued, player.counts.running, player.counts.finished) == (0, 0, 4)


def test_what_an_environment_says_on_purpose_of_its_failure_is_its_error() -> None:
    group, *_ = play(Scripted(EnvironmentFault("timeout: the agent's time was over")), retries=0)
    assert {episode.error for episode in group.episodes} == {"timeout: the agent's time was over"}


def test_every_turn_of_the_group_has_a_seed_of_its_own() -> None:
    *_, sampler = play(Scripted(1.0))
    assert len({asked.seed for asked in sampler.requests}) == 4


def test_a_failure_is_played_again_and_never_becomes_a_reward() -> None:
    group, finished, player, _ = play(Scripted(1.0, ValueError("sandbox died"), 1.0, 1.0, 0.0))
    assert statuses(group) == ["completed"] * 4
    assert sorted(episode.attempt for episode in group.episodes) == [0, 0, 0, 1]
    failed = [episode for episode in finished if episode.status == "failed"]
    assert len(failed) == player.counts.failed == 1
    assert failed[0].reward is None
    assert "ValueError: sandbox died at " in (failed[0].error or "")
    assert "test_player.py:" in (failed[0].error or "")


def test_past_the_budget_the_group_goes_on_with_those_that_are_valid() -> None:
    group, finished, *_ = play(Scripted(1.0, *[ValueError("x")] * 10), retries=2)
    assert statuses(group).count("failed") == 3
    assert len(finished) == 4 + 2
    assert group.valid_mask.sum() == 1


@pytest.mark.parametrize(
    ("result", "said"),
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
def test_what_is_not_a_finite_number_is_a_failure(result: object, said: str) -> None:
    group, *_ = play(Scripted(result), retries=0)
    assert set(statuses(group)) == {"failed"}
    assert said in (group.episodes[0].error or "")


def test_an_environment_that_hangs_is_timed_out() -> None:
    group, *_ = play(Scripted(1.0, None), retries=0, timeout_s=0.05)
    assert statuses(group)[1] == "failed"
    assert "longer than 0.05 s" in (group.episodes[1].error or "")


def test_an_environment_that_blocks_past_its_time_is_no_success() -> None:
    class Blocking(Env):
        async def rollout(self, policy: Policy) -> float:
            time.sleep(0.1)
            return 1.0

    group, *_ = play(Blocking(), group_size=1, retries=0, timeout_s=0.05)
    assert "longer than 0.05 s" in (group.episodes[0].error or "")


def test_an_ordinary_function_is_told_to_be_async() -> None:
    class Plain(Env):
        def rollout(self, policy: Policy) -> float:  # type: ignore[override]  the mistake that is tested
            return 1.0

    group, *_ = play(Plain(), group_size=1, retries=0)
    assert group.episodes[0].error == "Plain.rollout is an ordinary function; write `async def rollout`"


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"max_tokens": 0}])
def test_a_request_that_makes_no_sense_fails_its_own_episode_only(setting: dict[str, float]) -> None:
    class Odd(Env):
        async def rollout(self, policy: Policy) -> float:
            await policy.sample("hello", **setting)  # type: ignore[arg-type]  either of the two
            return 1.0

    group, *_ = play(Odd(), group_size=1, retries=0)
    assert "it must be" in (group.episodes[0].error or "")


def test_no_more_rollouts_are_live_than_allowed() -> None:
    env = Scripted(1.0)
    play(env, group_size=20, max_concurrent=3)
    assert env.most_live == 3


def test_a_limit_that_nobody_catches_says_what_to_do() -> None:
    class Talkative(Env):
        async def rollout(self, policy: Policy) -> float:
            while True:
                await policy.chat([{"role": "user", "content": "more"}])

    group, *_ = play(Talkative(), retries=0, max_turns=3)
    assert "max_turns" in (group.episodes[0].error or "")
    assert "rlkit.LimitReached" in (group.episodes[0].error or "")
    assert len(group.episodes[0].turns) == 3


@pytest.mark.parametrize("error", [ServiceError("gone", request_id="r1"), UsageError("no chat template")])
def test_what_is_not_the_environments_fault_ends_the_run(error: Exception) -> None:
    env = Scripted(error)
    with pytest.raises(type(error), match=str(error).split(" ", maxsplit=1)[0]):
        play(env)
    assert env.live == 0


def test_what_is_recorded_of_an_episode_is_plain_json() -> None:
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


def test_a_rollout_that_ignores_its_cancellation_is_given_up() -> None:
    async def run() -> tuple[Group, float]:
        settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
        player = Player(ByteChat(), {"e": settings}, seed=0, slots=Slots(2))
        sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
        group = await player.play(Task(7, "e", Swallowing(10**9)), lambda: sampler)
        return group, asyncio.get_running_loop().time()

    group, taken_s = run_virtual(run())
    assert {episode.error for episode in group.episodes} == {
        "the rollout took longer than 20 s (timeout_s) and ignored its cancellation"
    }
    assert taken_s == 20 + GRACE_S


def test_a_rollout_that_is_slow_to_heed_its_cancellation_is_just_late() -> None:
    group, *_ = play(Swallowing(1), group_size=1, retries=0, timeout_s=0.05)
    assert group.episodes[0].error == "the rollout took longer than 0.05 s (timeout_s)"


def test_a_group_that_is_cancelled_ends_though_a_rollout_ignores_it() -> None:
    async def run() -> float:
        settings = EnvSettings(2, Sampling(max_tokens=16), 1e6, 0, Limits())
        player = Player(ByteChat(), {"e": settings}, seed=0, slots=Slots(2))
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


def test_a_list_is_no_reward() -> None:
    with pytest.raises(RewardError, match="list"):
        as_outcome([1.0])


class Ranked(Scripted):
    """Rewards the episodes of a group by how they compare."""

    def __init__(self, *results: object, scores: object) -> None:
        super().__init__(*results)
        self.scores = scores
        self.asked = list[list[float | None]]()

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[float] | None:
        self.asked.append([episode.reward for episode in episodes])
        if isinstance(self.scores, BaseException):
            raise self.scores
        if self.scores == "never":
            await asyncio.Event().wait()
        return self.scores  # type: ignore[return-value]  whatever the test says


def test_the_episodes_of_a_group_that_did_not_fail_are_compared_once_all_are_over() -> None:
    env = Ranked(0.0, ValueError("no"), 0.0, scores=[3, 1.5])
    group, finished, *_ = play(env, group_size=3, retries=0)
    rewards = [episode.reward for episode in group.episodes]
    assert sorted(reward for reward in rewards if reward is not None) == [1.5, 3.0]
    assert statuses(group).count("failed") == 1
    assert env.asked == [[0.0, 0.0]]
    assert [episode.reward for episode in finished if episode.reward is not None] == [0.0, 0.0]


@pytest.mark.parametrize("reported", [0.0, 1.0])
def test_an_environment_may_report_a_metric_of_any_name_and_is_compared(reported: float) -> None:
    metrics = {"group_scored": reported}
    group, *_ = play(Ranked(Outcome(0.0, metrics), Outcome(0.0, metrics), scores=[3.0, 1.5]), group_size=2)
    assert sorted(group.rewards.tolist()) == [1.5, 3.0]
    assert [episode.group_scored for episode in group.episodes] == [True, True]
    assert [episode.metrics for episode in group.episodes] == [metrics, metrics]


def test_a_comparison_that_was_made_is_not_made_again() -> None:
    env = Ranked(scores=[7.0, 7.0])
    before = [replace(builders.episode(reward, member=m), group_scored=True) for m, reward in enumerate([3.0, 1.5])]
    settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
    player = Player(ByteChat(), {"e": settings}, seed=0, slots=Slots(2))
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    earlier = GroupProgress(episodes=dict(enumerate(before)))
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler, progress=earlier))
    assert (group.rewards.tolist(), env.asked) == ([3.0, 1.5], [])


def test_a_group_that_is_left_as_it_is_keeps_its_rewards() -> None:
    group, *_ = play(Ranked(0.25, scores=None), group_size=2)
    assert group.rewards.tolist() == [0.25, 0.25]
    env = Ranked(ValueError("no"), scores=[])
    play(env, group_size=2, retries=0)
    assert env.asked == []


@pytest.mark.parametrize(
    ("scores", "said"),
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
def test_a_comparison_that_fails_leaves_no_rewards(scores: object, said: str) -> None:
    group, *_ = play(Ranked(0.0, scores=scores), group_size=2, timeout_s=1.0 if scores == "never" else HANG_S)
    assert statuses(group) == ["failed", "failed"]
    assert re.search(said, str(group.episodes[0].error))


def test_the_services_fault_in_a_comparison_ends_the_run() -> None:
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
        chat, {"e": settings}, seed=0, slots=Slots(9), record=lambda task, episode: finished.append(episode)
    )
    group = asyncio.run(player.play(Task(7, "e", env), lambda: sampler, progress=earlier))
    counts = player.counts
    assert (counts.queued, counts.running, counts.finished) == (0, 0, group_size)
    return group, finished, player


def test_what_was_played_before_an_interruption_is_not_played_again() -> None:
    done = replace(builders.episode(0.25), attempt=1)
    group, finished, _ = resume(Scripted(1.0), GroupProgress({0: done}, attempts={0: 2}))
    assert group.episodes[0] is done
    assert group.rewards.tolist() == [0.25, 1.0, 1.0]
    assert [(one.member, one.attempt) for one in finished] == [(1, 0), (2, 0)]


@pytest.mark.parametrize(("failed", "played"), [(0, True), (1, True), (2, False)])
def test_one_that_failed_before_an_interruption_is_played_again_within_the_same_budget(
    failed: int, played: bool
) -> None:
    lost = builders.episode(None, member=1)
    group, finished, player = resume(Scripted(1.0), GroupProgress({1: lost}, attempts={1: 1}, failed=failed))
    assert statuses(group) == ["completed", "completed" if played else "failed", "completed"]
    assert [(one.member, one.attempt) for one in finished] == [(0, 0), *([(1, 1)] if played else []), (2, 0)]
    assert player.counts.failed == 0  # it was counted when it failed


def test_an_attempt_after_an_interruption_has_a_number_and_seeds_of_its_own() -> None:
    group, finished, _ = resume(Scripted(1.0), GroupProgress(attempts={1: 3}))
    assert [one.attempt for one in finished] == [one.attempt for one in group.episodes] == [0, 3, 0]


def test_tokens_and_failures_are_counted_for_people_to_watch() -> None:
    group, finished, player, _ = play(Scripted(1.0, ValueError("x"), 1.0), retries=1)
    assert player.counts.tokens == sum(one.sampled_tokens for one in finished) > 0
    assert player.counts.failed == 1
    assert all(one.seconds >= 0 and one.info == {} for one in group.episodes)


class Silent(Sampler):
    """Never answers, and counts who waits."""

    version = 0
    asked = waiting = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        self.asked += 1
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        return []


@pytest.mark.parametrize("coalesce", ["always", "never"])
def test_a_group_that_is_cancelled_takes_back_what_it_asked_for(coalesce: Literal["always", "never"]) -> None:
    async def main() -> None:
        sampler = Silent()
        settings = EnvSettings(3, Sampling(max_tokens=16), 60, 0, Limits(), coalesce=coalesce)
        player = Player(ByteChat(), {"e": settings}, seed=0, slots=Slots(9))
        playing = asyncio.create_task(player.play(Task(7, "e", Scripted(1.0)), lambda: sampler))
        await asyncio.sleep(1)
        assert sampler.asked == sampler.waiting == (1 if coalesce == "always" else 3)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(1)
        assert sampler.waiting == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("scores", "rewards"), [([3.0, 1.5], [3.0, 1.5]), (ValueError("ill"), [None, None]), (None, [])]
)
def test_what_comparing_a_group_changed_is_recorded_in_the_place_of_what_was_there(
    scores: object, rewards: list[float | None]
) -> None:
    changed = list[Episode]()
    settings = EnvSettings(2, Sampling(max_tokens=16), 20, 0, Limits())
    sampler = ScriptedSampler(lambda prompt, *, seed: "hi", chat=ByteChat())
    player = Player(
        ByteChat(), {"e": settings}, seed=0, slots=Slots(1), record_score=lambda task, episode: changed.append(episode)
    )
    group = asyncio.run(player.play(Task(7, "e", Ranked(0.0, 0.0, scores=scores)), lambda: sampler))
    assert [(one.member, one.attempt, one.reward) for one in changed] == [
        (member, 0, reward) for member, reward in enumerate(rewards)
    ]
    assert not changed or changed == list(group.episodes)
