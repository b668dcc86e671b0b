"""The usage of a run lies within its estimate."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

import rlkit
from rlkit.config.loading.load import load_config
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
from tests.marks import split_slow
from tests.simulation import Simulation, Talk, Word


class Slow(rlkit.Env):
    """Wait after the reply."""

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


def make_config(**more: object) -> Config:
    return load_config([], settings=SETTINGS | more).config


def make_rollout(*, turns: int = 1, first: int = 10, sampled: int = 20, own_s: float = 0.0) -> Rollout:
    later = sum((first + sampled) * number for number in range(1, turns))
    return Rollout(turns, first, later, later, sampled * turns, (first + sampled) * turns, own_s)


def test_rollout_counts_the_tokens_of_its_turns() -> None:
    first, second = turn([1, 2, 3], [4, 5]), turn([6], [7, 8, 9], forced=1, parent=0)
    new_conversation = turn([1, 1], [2])
    rollout = Rollout.of(
        [Group("env", "task", 0, (episode(1.0, turns=[first, second, new_conversation]), episode(None)))]
    )
    assert rollout is not None
    # The second prompt is the first turn's five tokens and one more; the third stands alone.
    assert (rollout.turns, rollout.first, rollout.later, rollout.repeated) == (3, 3, 6 + 2, 5)
    assert (rollout.sampled, rollout.trained) == (2 + 2 + 1, 8 + 2)  # the last token of a sequence is only a target
    assert rollout.own_s == pytest.approx(1.0)


def test_failed_rollouts_give_no_measurement() -> None:
    assert Rollout.of([Group("env", "task", 0, (episode(None),))]) is None
    assert Rollout.of([]) is None


def test_longer_replies_do_not_change_the_first_prompt() -> None:
    longer = make_rollout(turns=2).scaled(2.0)
    assert (longer.turns, longer.first, longer.sampled) == (2, 10, 80)
    assert longer.trained == 10 + 2 * 50


@pytest.mark.parametrize(("measured", "turns"), [(1, 3), (2, 5), (4, 4), (4, 2)])
def test_rollout_is_extended_to_more_turns(measured: int, turns: int) -> None:
    def conversation(count: int) -> Rollout:
        later = sum(10 + 20 * number for number in range(1, count))
        return Rollout(count, 10, later, later, 20 * count, 10 + 20 * count - 1, 0.5 * count)

    extended = conversation(measured).extended(turns)
    assert replace(extended, repeated=extended.later) == conversation(max(measured, turns))


def test_estimate_counts_evaluations() -> None:
    spec = {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 3}}
    assert evaluations(make_config(), 5) == 0
    for steps, every, times in ((5, 0, 2), (5, 2, 4), (4, 2, 3), (5, 10, 2), (1, 1, 2)):
        assert evaluations(make_config(eval={"envs": spec, "every": every}), steps) == times


@pytest.mark.parametrize(
    "extra_settings",
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
@pytest.mark.parametrize("env", split_slow([Word, Talk], lambda env: env is Talk))
def test_usage_of_a_run_is_within_the_estimate_of_its_dry_run(
    env: type[rlkit.Env], extra_settings: dict[str, object], tmp_path: Path
) -> None:
    settings = SETTINGS | {"prices": PRICES} | extra_settings
    tasks = [env(number) for number in range(40)]  # type: ignore[call-arg]  both take a number
    resolved = load_config([], settings=settings)
    rehearsal = run_virtual(rehearse(resolved, envs={"words": tasks}, chat=ByteChat()))
    assert rehearsal.ok, rehearsal.parts
    assert rehearsal.estimate is not None
    run = Simulation(tmp_path / "run", World(), settings=settings, tasks=tasks, latency=Latency(mean_tokens=25))
    result = run.train()
    assert result.spending is not None
    assert result.spending.usd is not None
    assert rehearsal.estimate.usd is not None
    assert rehearsal.estimate.tokens.low < result.spending.tokens < rehearsal.estimate.tokens.high
    assert rehearsal.estimate.usd.low < result.spending.usd < rehearsal.estimate.usd.high
    # A band that holds anything would say nothing.
    assert rehearsal.estimate.tokens.high < 40 * rehearsal.estimate.tokens.low


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("live", [256, 5])
def test_duration_of_a_run_is_within_the_estimate(mode: str, live: int, tmp_path: Path) -> None:
    settings = SETTINGS | {"schedule": {"mode": mode}, "rollouts": {"max_concurrent": live}, "steps": 10}
    latency = Latency(first_s=0.0, token_s=0.05, mean_tokens=30, sigma=0.01, trained_tokens_per_s=1000)
    run = Simulation(tmp_path, World(), settings=settings, latency=latency, repeatable=False)
    run.train()
    step_s = latency.gradient_s + latency.step_s + latency.save_s
    speed = Speed(Band(18, 22), None, Band(900, 1100), Band(0.6 * step_s, 1.4 * step_s), "as it is")
    rollout = make_rollout(first=40, sampled=30)
    predicted = estimate(make_config(**settings), {"words": (rollout, rollout)}, {}, price=None, speed=speed)
    assert predicted.seconds is not None
    assert predicted.seconds.low < run.virtual_s < predicted.seconds.high


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("live", split_slow([256, 5], lambda live: live == 5))
@pytest.mark.parametrize("every", [0, 1])
def test_duration_with_evaluations_is_within_the_estimate(mode: str, live: int, every: int, tmp_path: Path) -> None:
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
    rollout = make_rollout(first=40, sampled=30, own_s=20.0)
    tests = {"held_out": ((rollout, rollout), 3)}
    time_band = estimate(make_config(**settings), {"words": (rollout, rollout)}, tests, price=None, speed=speed).seconds
    assert time_band is not None
    assert time_band.low < run.virtual_s < time_band.high


def test_total_sampling_speed_bounds_the_estimate() -> None:
    speed = Speed(Band(50, 50), Band(10, 20), Band(1e9, 1e9), Band(0, 0), "a small machine")
    predicted = estimate(make_config(), {"words": (make_rollout(), make_rollout())}, {}, price=None, speed=speed)
    assert predicted.seconds is not None
    tokens = 5 * 3 * 4 * 20
    assert predicted.seconds.low == pytest.approx(tokens / 20, rel=1e-3)
    assert predicted.seconds.high == pytest.approx(tokens / 10, rel=1e-3)


def test_estimate_counts_replaced_groups() -> None:
    speed = Speed(Band(20, 20), None, Band(1e9, 1e9), Band(0, 0), "as it is")
    replacing = make_config(
        batch={"groups": 3, "group_size": 4, "replace_uninformative": True, "max_replaced_groups": 6}
    )
    time_band = estimate(replacing, {"words": (make_rollout(), make_rollout())}, {}, price=None, speed=speed).seconds
    assert time_band == Band(pytest.approx(5), pytest.approx(5 * (1 + 6 / 3)))  # type: ignore[arg-type]  equal to a float


def test_estimate_counts_the_reference_of_a_penalty() -> None:
    fast = Band(1e9, 1e9)
    speed = Speed(fast, None, fast, Band(1, 1), "as it is", reference=Band(10, 20))
    penalized, rollouts = make_config(kl_penalty={"coefficient": 0.1}), {"words": (make_rollout(), make_rollout())}
    scored = 3 * 4 * 30
    time_band = estimate(penalized, rollouts, {}, price=None, speed=speed).seconds
    trial = 1  # of the service, at most as long as a step without data
    assert time_band == Band(pytest.approx(5 * (1 + scored / 20)), pytest.approx(trial + 5 * (1 + scored / 10)))  # type: ignore[arg-type]  equal to a float
    without = estimate(make_config(), rollouts, {}, price=None, speed=speed).seconds
    assert without == Band(pytest.approx(5), pytest.approx(trial + 5))  # type: ignore[arg-type]  likewise
    unmeasured = dataclasses.replace(speed, reference=None)
    assumed = estimate(penalized, rollouts, {}, price=None, speed=unmeasured).seconds
    assert assumed == Band(pytest.approx(5), pytest.approx(trial + 5))  # type: ignore[arg-type]  likewise


@pytest.mark.parametrize(
    ("window", "taught"),
    [({}, 4), ({"first_step": 3}, 4), ({"last_step": 3}, 1), ({"first_step": 4, "last_step": 5}, 2)],
)
def test_estimate_counts_the_steps_of_a_teacher_after_a_warm_start(window: dict[str, int], taught: int) -> None:
    rollouts = {"words": (make_rollout(), make_rollout()), "warm_start": (make_rollout(), make_rollout())}
    settings: dict[str, object] = {"steps": 4, "warm_start": {"files": "talks.jsonl", "steps": 2}}
    tokens = [
        estimate(make_config(**settings, **teacher), rollouts, {}, price=None, speed=None).tokens.high
        for teacher in ({"teacher": {"model": "big", **window}}, {})
    ]
    assert tokens[0] - tokens[1] == taught * 3 * 4 * 30


def test_estimate_counts_the_prompt_of_a_teacher() -> None:
    rollouts = {"words": (make_rollout(), make_rollout())}
    evaluated = {"words": (rollouts["words"], 6)}
    contexts = {("envs.words", "teacher"): 100.0, ("eval.envs.words", "teacher"): 7.0}
    settings = {"eval": {"every": 0, "envs": {"words": {"tasks": 6, "temperature": 1.0}}}}
    config = make_config(teacher={"model": "big"}, **settings)
    longer, same = (estimate(config, rollouts, evaluated, c, price=None, speed=None).tokens for c in (contexts, {}))
    assert longer.high - same.high == 5 * 3 * 4 * 100 + 2 * 6 * 7


@pytest.mark.parametrize(("last_step", "share"), [(None, 1.0), (2, 0.4)])
def test_estimate_counts_a_teacher_at_its_own_price(last_step: int | None, share: float) -> None:
    rollouts = {"words": (make_rollout(), make_rollout())}
    taught = make_config(teacher={"model": "big", "last_step": last_step})
    price = Price(1, 1, 2, 3, teachers={"big": Price(10, 10, 20, 30)})
    with_teacher = estimate(taught, rollouts, {}, price=price, speed=None)
    without = estimate(make_config(), rollouts, {}, price=price, speed=None)
    scored = 5 * 3 * 4 * 30 * share
    assert with_teacher.tokens.high - without.tokens.high == pytest.approx(scored)
    assert with_teacher.usd is not None
    assert without.usd is not None
    assert with_teacher.usd.high - without.usd.high == pytest.approx(10 * scored / 1e6)


@pytest.mark.parametrize(("temperature", "scored"), [(0.0, 0), (1.0, 2 * 6 * 2 * 30)])
def test_estimate_counts_the_divergence_of_an_evaluation(temperature: float, scored: int) -> None:
    pair = make_rollout(), make_rollout()
    settings = {"eval": {"every": 0, "envs": {"words": {"tasks": 6, "attempts": 2, "temperature": temperature}}}}
    taught = make_config(teacher={"model": "big"}, **settings)
    usages = [
        estimate(config, {"words": pair}, {"words": (pair, 6)}, price=None, speed=None).tokens.high
        for config in (taught, make_config(**settings))
    ]
    assert usages[0] - usages[1] == 5 * 3 * 4 * 30 + scored  # before the first step, and after the last


def test_estimate_counts_conversations_as_trained_only() -> None:
    pair = make_rollout(), make_rollout()
    talks = {"files": "talks.jsonl", "steps": 7}
    rollouts = {"words": pair, "warm_start": pair}
    with_talks = estimate(make_config(warm_start=talks), rollouts, {}, price=None, speed=None)
    without = estimate(make_config(), rollouts, {}, price=None, speed=None)
    trained = 7 * 3 * make_rollout().trained
    assert with_talks.tokens == Band(without.tokens.low + trained, without.tokens.high + trained)


@pytest.mark.parametrize("weight", [1e308, 1e-320, 7.0])
def test_shares_sum_to_one_for_any_weights(weight: float) -> None:
    envs = {"words": {"weight": weight}, "others": {"weight": weight}}
    assert shares(make_config(envs=envs)) == {"words": 0.5, "others": 0.5}


def test_unknown_price_and_speed_give_no_estimate() -> None:
    predicted = estimate(make_config(), {"words": (make_rollout(), make_rollout())}, {}, price=None, speed=None)
    assert (predicted.usd, predicted.seconds) == (None, None)


def test_each_kind_of_token_has_its_price() -> None:
    rollout = make_rollout(turns=2)
    predicted = estimate(make_config(), {"words": (rollout, rollout)}, {}, price=Price(1, 0.1, 3, 5), speed=None)
    # 15 groups of 4. The first prompt of 10 is computed once, if the cache is used, and the second turn's 30 never.
    low = 1 * 10 + 0.1 * (30 + 4 * 30) + 3 * 160
    high = 1 * (40 + 4 * 30) + 3 * 160 + 5 * 4 * 60
    assert predicted.usd == Band(pytest.approx(15 * low / 1e6), pytest.approx(15 * high / 1e6))  # type: ignore[arg-type]  equal to a float


def test_saved_estimate_is_loaded_for_the_same_work() -> None:
    predicted = Estimate(Band(1, 2), None, Band(3.0, 4.0), "as it is")
    save_estimate(make_config(), predicted)
    assert load_estimate(make_config()) == predicted
    assert load_estimate(make_config(name="mine", budget_tokens=1000, max_hours=1.0)) == predicted
    assert load_estimate(make_config(steps=6)) is None
    dollars = dataclasses.replace(predicted, usd=Band(0.1, 0.2), seconds=None)
    save_estimate(make_config(), dollars)
    assert load_estimate(make_config()) == dollars


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokens": 3, "usd": null, "seconds": null, "speed": ""}'])
def test_unreadable_estimate_is_none(content: str) -> None:
    path = save_estimate(make_config(), Estimate(Band(1, 2), None, None))
    assert load_estimate(make_config()) is not None
    path.write_text(content)
    assert load_estimate(make_config()) is None
