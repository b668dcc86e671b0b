"""What a run takes is between the bounds that were given before it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

import rlkit
from rlkit.config import load_config
from rlkit.config.schema import Config
from rlkit.cost.estimate import (
    Band,
    Estimate,
    Rollout,
    Speed,
    estimate,
    evaluations,
    load_estimate,
    save_estimate,
    shares,
)
from rlkit.cost.usage import Price
from rlkit.dry_run.rehearse import rehearse
from rlkit.testing import ByteChat, Latency, World, run_virtual
from rlkit.types import Group
from tests.builders import episode, turn
from tests.simulation import Simulation, Talk, Word


class Slow(rlkit.Env):
    """Takes its time after the reply."""

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"

    async def rollout(self, policy: rlkit.Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": self.task_id}])
        await asyncio.sleep(20)
        return float(reply.text.count("e"))


HELD_OUT = [Slow(number) for number in range(100, 103)]
HELD_OUT_TASKS = [Word(number) for number in range(100, 103)]
SETTINGS: dict[str, object] = {
    "model": "simulated",
    "envs": {"words": {}},
    "steps": 5,
    "batch": {"groups": 3, "group_size": 4},
    "sampling": {"max_tokens": 60},
    "service": {"base_url": "http://127.0.0.1:9"},
}
PRICES = {"prefill": 1.0, "cached_prefill": 0.1, "sample": 3.0, "train": 5.0}


def config(**more: object) -> Config:
    return load_config([], settings=SETTINGS | more).config


def one(*, turns: int = 1, first: int = 10, sampled: int = 20, own_s: float = 0.0) -> Rollout:
    later = sum((first + sampled) * number for number in range(1, turns))
    return Rollout(turns, first, later, later, sampled * turns, (first + sampled) * turns, own_s)


def test_a_rollout_is_counted_by_what_its_turns_ask_for() -> None:
    first, second = turn([1, 2, 3], [4, 5]), turn([6], [7, 8, 9], forced=1, parent=0)
    apart = turn([1, 1], [2])
    found = Rollout.of([Group("env", "task", 0, (episode(1.0, turns=[first, second, apart]), episode(None)))])
    assert found is not None
    # The second prompt is the first turn's five tokens and one more; the third stands alone.
    assert (found.turns, found.first, found.later, found.repeated) == (3, 3, 6 + 2, 5)
    assert (found.sampled, found.trained) == (2 + 2 + 1, 8 + 2)  # the last token of a sequence is only a target
    assert found.own_s == pytest.approx(1.0)


def test_of_rollouts_that_failed_nothing_is_known() -> None:
    assert Rollout.of([Group("env", "task", 0, (episode(None),))]) is None
    assert Rollout.of([]) is None


def test_longer_replies_leave_the_question_as_long_as_it_is() -> None:
    longer = one(turns=2).scaled(2.0)
    assert (longer.turns, longer.first, longer.sampled) == (2, 10, 80)
    assert longer.trained == 10 + 2 * 50


def test_what_is_evaluated_is_counted() -> None:
    spec = {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 3}}
    assert evaluations(config(), 5) == 0
    for steps, every, times in ((5, 0, 2), (5, 2, 4), (4, 2, 3), (5, 10, 2), (1, 1, 2)):
        assert evaluations(config(eval={"envs": spec, "every": every}), steps) == times


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"schedule": {"mode": "async", "max_staleness": 2}},
        {"rollouts": {"coalesce": "never"}},
        {"batch": {"groups": 3, "group_size": 4, "replace_uninformative": True}},
        {"kl_penalty": {"coefficient": 0.1}},
        {"eval": {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "attempts": 2}}, "every": 2}},
        {"loss": {"name": "dro"}},
    ],
    ids=["sync", "async", "single requests", "replacing", "kl", "eval", "two passes"],
)
@pytest.mark.parametrize("env", [Word, Talk])
def test_a_run_takes_what_its_dry_run_said(env: type[rlkit.Env], more: dict[str, object], tmp_path: Path) -> None:
    settings = SETTINGS | {"prices": PRICES} | more
    tasks = [env(number) for number in range(40)]  # type: ignore[call-arg]  both take a number
    resolved = load_config([], settings=settings)
    made = run_virtual(rehearse(resolved, envs={"words": tasks}, chat=ByteChat()))
    assert made.ok, made.parts
    assert made.estimate is not None
    run = Simulation(tmp_path / "run", World(), settings=settings, tasks=tasks, latency=Latency(mean_tokens=25))
    result = run.train()
    assert result.spending is not None
    assert result.spending.usd is not None
    assert made.estimate.usd is not None
    assert made.estimate.tokens.low < result.spending.tokens < made.estimate.tokens.high
    assert made.estimate.usd.low < result.spending.usd < made.estimate.usd.high
    # A band that holds anything would say nothing.
    assert made.estimate.tokens.high < 40 * made.estimate.tokens.low


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("live", [256, 5])
def test_the_time_is_that_of_a_service_of_the_speed(mode: str, live: int, tmp_path: Path) -> None:
    settings = SETTINGS | {"schedule": {"mode": mode}, "rollouts": {"max_concurrent": live}, "steps": 10}
    latency = Latency(first_s=0.0, token_s=0.05, mean_tokens=30, sigma=0.01, trained_tokens_per_s=1000)
    run = Simulation(tmp_path, World(), settings=settings, latency=latency, repeatable=False)
    run.train()
    step_s = latency.gradient_s + latency.step_s + latency.save_s
    speed = Speed(Band(18, 22), None, Band(900, 1100), Band(0.6 * step_s, 1.4 * step_s), "as it is")
    like = one(first=40, sampled=30)
    found = estimate(config(**settings), {"words": (like, like)}, {}, price=None, speed=speed)
    assert found.seconds is not None
    assert found.seconds.low < run.virtual_s < found.seconds.high


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("live", [256, 5])
@pytest.mark.parametrize("every", [0, 1])
def test_evaluations_are_played_beside_the_steps(mode: str, live: int, every: int, tmp_path: Path) -> None:
    held_out = {"env": f"{__file__}:HELD_OUT", "tasks": 3}
    settings = SETTINGS | {"schedule": {"mode": mode}, "rollouts": {"max_concurrent": live}, "steps": 10}
    settings |= {"eval": {"every": every, "envs": {"held_out": held_out}}}
    latency = Latency(first_s=0.0, token_s=0.05, mean_tokens=30, sigma=0.01, trained_tokens_per_s=1000)
    run = Simulation(
        tmp_path, World(), settings=settings, latency=latency, tasks=[Slow(number) for number in range(40)]
    )
    run.train()
    step_s = latency.gradient_s + latency.step_s + latency.save_s
    speed = Speed(Band(18, 22), None, Band(900, 1100), Band(0.6 * step_s, 1.4 * step_s), "as it is")
    like = one(first=40, sampled=30, own_s=20.0)
    tests = {"held_out": ((like, like), 3)}
    found = estimate(config(**settings), {"words": (like, like)}, tests, price=None, speed=speed).seconds
    assert found is not None
    assert found.low < run.virtual_s < found.high


def test_no_more_is_sampled_than_the_service_can() -> None:
    speed = Speed(Band(50, 50), Band(10, 20), Band(1e9, 1e9), Band(0, 0), "a small machine")
    found = estimate(config(), {"words": (one(), one())}, {}, price=None, speed=speed)
    assert found.seconds is not None
    tokens = 5 * 3 * 4 * 20
    assert found.seconds.low == pytest.approx(tokens / 20, rel=1e-3)
    assert found.seconds.high == pytest.approx(tokens / 10, rel=1e-3)


def test_groups_that_are_replaced_take_their_time() -> None:
    speed = Speed(Band(20, 20), None, Band(1e9, 1e9), Band(0, 0), "as it is")
    replacing = config(batch={"groups": 3, "group_size": 4, "replace_uninformative": True, "max_replaced_groups": 6})
    found = estimate(replacing, {"words": (one(), one())}, {}, price=None, speed=speed).seconds
    assert found == Band(pytest.approx(5), pytest.approx(5 * (1 + 6 / 3)))  # type: ignore[arg-type]  equal to a float


def test_the_reference_of_a_penalty_takes_its_time() -> None:
    fast = Band(1e9, 1e9)
    speed = Speed(fast, None, fast, Band(1, 1), "as it is", reference=Band(10, 20))
    penalized, like = config(kl_penalty={"coefficient": 0.1}), {"words": (one(), one())}
    scored = 3 * 4 * 30
    found = estimate(penalized, like, {}, price=None, speed=speed).seconds
    assert found == Band(pytest.approx(5 * (1 + scored / 20)), pytest.approx(5 * (1 + scored / 10)))  # type: ignore[arg-type]  equal to a float
    without = estimate(config(), like, {}, price=None, speed=speed).seconds
    assert without == Band(pytest.approx(5), pytest.approx(5))  # type: ignore[arg-type]  likewise
    unmeasured = dataclasses.replace(speed, reference=None)
    assumed = estimate(penalized, like, {}, price=None, speed=unmeasured).seconds
    assert assumed == Band(pytest.approx(5), pytest.approx(5))  # type: ignore[arg-type]  likewise


@pytest.mark.parametrize("weight", [1e308, 1e-320, 7.0])
def test_shares_add_up_whatever_the_weights(weight: float) -> None:
    envs = {"words": {"weight": weight}, "others": {"weight": weight}}
    assert shares(config(envs=envs)) == {"words": 0.5, "others": 0.5}


def test_what_is_not_known_is_not_estimated() -> None:
    found = estimate(config(), {"words": (one(), one())}, {}, price=None, speed=None)
    assert (found.usd, found.seconds) == (None, None)


def test_each_kind_of_token_has_its_price() -> None:
    like = one(turns=2)
    found = estimate(config(), {"words": (like, like)}, {}, price=Price(1, 0.1, 3, 5), speed=None)
    # 15 groups of 4. The first prompt of 10 is computed once, if the cache is used, and the second turn's 30 never.
    low = 1 * 10 + 0.1 * (30 + 4 * 30) + 3 * 160
    high = 1 * (40 + 4 * 30) + 3 * 160 + 5 * 4 * 60
    assert found.usd == Band(pytest.approx(15 * low / 1e6), pytest.approx(15 * high / 1e6))  # type: ignore[arg-type]  equal to a float


def test_an_estimate_is_kept_for_the_run_that_it_is_of() -> None:
    made = Estimate(Band(1, 2), None, Band(3.0, 4.0), "as it is")
    save_estimate(config(), made)
    assert load_estimate(config()) == made
    assert load_estimate(config(name="mine", budget_tokens=1000, max_hours=1.0)) == made
    assert load_estimate(config(steps=6)) is None
    dollars = dataclasses.replace(made, usd=Band(0.1, 0.2), seconds=None)
    save_estimate(config(), dollars)
    assert load_estimate(config()) == dollars


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokens": 3, "usd": null, "seconds": null, "speed": ""}'])
def test_an_estimate_that_cannot_be_read_is_none(content: str) -> None:
    path = save_estimate(config(), Estimate(Band(1, 2), None, None))
    assert load_estimate(config()) is not None
    path.write_text(content)
    assert load_estimate(config()) is None
