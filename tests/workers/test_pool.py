"""Rollouts in workers have the results of rollouts in the run's own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import pytest

from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Completion, Prompt, Sampling
from tests.workers import equal_envs as envs
from tests.workers.helpers import describe, make_settings, play, reply

ENVS = {
    "talk": envs.Talk(),
    "in_threads": envs.InThreads(),
    "short": envs.Short(),
    "ranked": envs.Ranked(),
    "badly_ranked": envs.BadlyRanked(),
    "raises": envs.Raises(),
    "endless": envs.Endless(),
    "graded": envs.Graded(),
    "branches": envs.Branches(),
    "late": envs.Late(),
    "infinite": envs.Infinite(),
}
SETTINGS = {
    "late": make_settings(group_size=2, timeout_s=3.0, retries=0),  # a busy worker needs more than half a second
    "short": make_settings(group_size=8, coalesce="single_turn"),
    "talk": make_settings(group_size=8, coalesce="always"),
    "raises": make_settings(group_size=8, retries=40),
    "endless": make_settings(retries=0),
    "infinite": make_settings(retries=0),
    "graded": make_settings(newest_weights=False),
}
# The members of a group share its retries. If these are used up, the order in which members fail says who has none.


@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    here, there = (play(ENVS, count, settings=SETTINGS) for count in (0, workers))
    for name in ENVS:
        assert describe(there.groups[name]) == describe(here.groups[name]), name
    assert len(there.episodes) == len(here.episodes)
    assert there.metrics == {"live": workers, "restarts": 0, "busy": there.metrics["busy"], "queue": 0}


@dataclass(frozen=True)
class FailingSampler(Sampler):
    """Fails at the prompt of an environment, as a service does after retries."""

    sampler: Sampler
    error: Exception

    @property
    def version(self) -> int:
        return self.sampler.version

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        if "rank" in ByteChat().decode(prompt.tokens):
            raise self.error
        return await self.sampler.sample(prompt, sampling, seed=seed, num_samples=num_samples)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_failure_of_the_service_ends_the_run(workers: int) -> None:
    error = ServiceError("sampling: the service is gone", request_id="r-1")
    sampler = FailingSampler(ScriptedSampler(reply, chat=ByteChat()), error)
    with pytest.raises(ServiceError, match=r"the service is gone \(request r-1\)") as raised:
        play({"talk": envs.Talk(), "ranked": envs.Ranked()}, workers, make_sampler=lambda: sampler)
    assert raised.value.request_id == "r-1"


class Unpicklable(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, first: str, second: object) -> None:
        super().__init__(first)
        self.second = second


@pytest.mark.parametrize("second", [1, Lock()])
def test_an_error_that_cannot_be_sent_fails_its_rollout(second: object) -> None:
    sampler = FailingSampler(ScriptedSampler(reply, chat=ByteChat()), Unpicklable("odd", second))
    played = play({"talk": envs.Talk(), "ranked": envs.Ranked()}, 2, make_sampler=lambda: sampler)
    assert {episode.error and episode.error[:16] for episode in played.groups["ranked"].episodes} == {
        "Unpicklable: odd"
    }
    assert all(episode.status == "completed" for episode in played.groups["talk"].episodes)
    assert played.metrics["restarts"] == 0
