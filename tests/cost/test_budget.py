"""A run stays within its budget and resumes with a larger one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import rlkit
from rlkit._util.threads import in_thread
from rlkit.config.loading.load import load_config
from rlkit.config.schema import Config
from rlkit.cost.budget import Budget
from rlkit.cost.usage import FREE, Price, Usage, price_of
from rlkit.errors import ConfigError
from rlkit.store.history import load_resume_history
from rlkit.testing import Latency, SimulatedTinker, World, run_virtual
from rlkit.types import Prompt, Sampling
from tests.marks import split_slow
from tests.simulation import Simulation, Talk, Word

HELD_OUT = {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 3}}, "every": 1}
HELD_OUT_TASKS = [Word(number) for number in range(100, 103)]
SCHEDULES = {"sync": {}, "stream": {"mode": "stream"}, "async": {"mode": "async", "max_staleness": 2}}


def read_usage(run: Simulation) -> dict[str, float]:
    return json.loads((run.directory / "usage.json").read_text())


def count_tokens(run: Simulation) -> float:
    return sum(value for name, value in read_usage(run).items() if name.endswith("_tokens"))


def count_rollout_tokens(run: Simulation) -> int:
    """Count the tokens of the longest rollout: prompt, sampled and trained tokens."""
    return max(
        sum(2 * len(turn["prompt"]) + 2 * len(turn["completion"]) for turn in turns)
        + sum(
            (len(turns) - 1 - place) * (len(turn["prompt"]) + len(turn["completion"]))
            for place, turn in enumerate(turns)
        )
        for turns in pd.read_parquet(run.directory / "episodes").turns
    )


def measure_overshoot(run: Simulation, limit: int) -> float:
    """Measure the tokens used beyond the limit; the run must have used its whole budget."""
    assert count_tokens(run) > 0.8 * limit
    return count_tokens(run) - limit


def test_usage_of_a_step_does_not_depend_on_the_speed_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_step_usage(directory: Path) -> list[dict[str, float]]:
        run = Simulation(directory)
        run.train()
        return [{name: value for name, value in line.items() if name.startswith("usage/")} for line in run.lines()]

    async def slowly(function: Callable[..., object], *args: object) -> object:
        await asyncio.sleep(5)  # threads take no virtual time
        return await in_thread(function, *args)

    expected = read_step_usage(tmp_path / "fast")
    monkeypatch.setattr("rlkit.training.run.in_thread", slowly)
    assert read_step_usage(tmp_path / "slow") == expected


@pytest.mark.parametrize("staleness", [1, 8])
def test_usage_counts_training_of_groups_that_wait_for_the_service(staleness: int, tmp_path: Path) -> None:
    settings = {
        "steps": 40,
        "schedule": {"mode": "async", "max_staleness": staleness},
        "batch": {"groups": 8, "group_size": 4},
        "rollouts": {"max_concurrent": 4},
        "budget_tokens": 4000,
    }
    run = Simulation(tmp_path, World(), Latency(gradient_s=60.0), settings=settings)
    assert run.train().status == "budget"
    assert measure_overshoot(run, 4000) <= 4 * count_rollout_tokens(run)


@pytest.mark.parametrize("schedule", split_slow(SCHEDULES, lambda name: name == "async"))
@pytest.mark.parametrize(
    ("evaluated", "substeps"),
    [(False, 1), pytest.param(True, 1, marks=pytest.mark.slow), pytest.param(False, 2, marks=pytest.mark.slow)],
)
def test_run_ends_at_its_budget_and_resumes_with_a_larger_one(
    schedule: str, evaluated: bool, substeps: int, tmp_path: Path
) -> None:
    settings = {
        "steps": 8,
        "schedule": SCHEDULES[schedule],
        "batch": {"groups": 4, "group_size": 3, "substeps": substeps},
        "rollouts": {"max_concurrent": 5},
    } | ({"eval": HELD_OUT} if evaluated else {})
    tasks = [Talk(number) for number in range(60)]
    expected = Simulation(tmp_path / "whole", World(), settings=settings, tasks=tasks)
    expected.train()
    total_tokens = count_tokens(expected)
    for share in (0.2, 0.7):
        limit = int(total_tokens * share)
        run = Simulation(tmp_path / f"{share}", World(), settings=settings | {"budget_tokens": limit}, tasks=tasks)
        result = run.train()
        assert result.status == "budget"
        assert result.reason.startswith("budget_tokens: ")
        assert result.steps < 8
        assert result.checkpoint is None or result.checkpoint.step == result.steps
        assert measure_overshoot(run, limit) <= 5 * count_rollout_tokens(expected)
        run.settings = settings
        assert run.train(resume=True).status == "completed"
        # Elsewhere, which weights a rollout sees, or which substep gets a group, depends on when it is done.
        if schedule == "sync" or (schedule, substeps) == ("stream", 1):
            assert run.weights() == expected.weights()
        episodes = pd.read_parquet(run.directory / "episodes")
        assert not episodes.duplicated(["draw", "member", "attempt"]).any()


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_budget_counts_future_requests_to_the_reference(schedule: str, tmp_path: Path) -> None:
    settings = {
        "steps": 30,
        "schedule": SCHEDULES[schedule],
        "batch": {"groups": 1, "group_size": 16},
        "rollouts": {"max_concurrent": 1},
        "kl_penalty": {"coefficient": 0.1},
        "budget_tokens": 3300,
    }
    run = Simulation(tmp_path, World(), settings=settings)
    assert run.train().status == "budget"
    assert count_tokens(run) - 3300 <= 1.5 * count_rollout_tokens(run)  # the reference is asked for it, too


def test_resumed_run_counts_training_on_earlier_episodes(tmp_path: Path) -> None:
    settings = {
        "steps": 30,
        "schedule": {"mode": "stream"},
        "batch": {"groups": 2, "group_size": 16},
        "rollouts": {"max_concurrent": 1},
    }
    run = Simulation(tmp_path, World(), settings=settings | {"budget_tokens": 3000})
    run.train()
    for limit in (3020, 3050):
        run.settings = settings | {"budget_tokens": limit}
        assert run.train(resume=True).status == "budget"
        assert count_tokens(run) - limit <= count_rollout_tokens(run)


def test_episodes_finished_before_the_budget_ended_are_not_repeated(tmp_path: Path) -> None:
    settings = {"steps": 4, "rollouts": {"max_concurrent": 2}, "batch": {"groups": 2, "group_size": 4}}
    uninterrupted = Simulation(tmp_path / "whole", World(), settings=settings)
    uninterrupted.train()
    run = Simulation(
        tmp_path / "run", World(), settings=settings | {"budget_tokens": int(count_tokens(uninterrupted) / 2)}
    )
    run.train()
    run.settings = settings
    run.train(resume=True)
    assert run.world.calls["samples"] == uninterrupted.world.calls["samples"]
    assert count_tokens(run) == pytest.approx(
        count_tokens(uninterrupted), rel=0.1
    )  # both count; only steps can be taken again


def test_complete_step_is_trained_on_when_the_budget_ends(tmp_path: Path) -> None:
    settings = {"steps": 3, "batch": {"groups": 2, "group_size": 2}, "rollouts": {"max_concurrent": 3}}
    uninterrupted = Simulation(tmp_path / "whole", World(), settings=settings)
    uninterrupted.train()
    for limit in range(200, int(count_tokens(uninterrupted)), 97):
        run = Simulation(tmp_path / f"{limit}", World(), settings=settings | {"budget_tokens": limit})
        run.train()
        attempts = load_resume_history(run.directory).attempts
        played = [draw for draw, episodes in attempts.items() if len({episode.member for episode in episodes}) == 2]
        assert len(played) < 2, f"a step was dropped at a budget of {limit} tokens"


def test_exhausted_budget_stays_exhausted_on_resume(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"steps": 9, "budget_tokens": 1000})
    first = run.train()
    samples = run.world.calls["samples"]
    again = run.train(resume=True)
    assert (again.status, again.steps) == ("budget", first.steps)
    assert run.world.calls["samples"] == samples


def test_run_with_a_damaged_usage_file_restarts_its_count(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"steps": 1})
    run.train()
    (run.directory / "usage.json").write_bytes(b'{"requests": \xff')
    run.settings = {"steps": 2}
    assert run.train(resume=True).steps == 2
    assert any("usage.json is damaged" in note and "earlier usage is lost" in note for note in run.ears.notes)
    run.train(resume=True)
    assert sum("earlier usage is lost" in note for note in run.ears.notes) == 1


def test_max_hours_counts_over_all_processes(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"steps": 500, "max_hours": 0.02})
    result = run.train()
    assert result.reason.startswith("max_hours: the run has taken 0.02 of 0.02 hours")
    assert 72 <= run.virtual_s < 100
    run.settings = {"steps": 500, "max_hours": 0.03}
    run.train(resume=True)
    assert 0 < run.virtual_s < 60


def test_a_budget_that_ends_in_the_last_evaluation_leaves_a_completed_run(tmp_path: Path) -> None:
    settings = {"steps": 2, "eval": {**HELD_OUT, "every": 0}}
    uninterrupted = Simulation(tmp_path / "whole", World(), settings=settings)
    uninterrupted.train()
    trained = sum(
        value for name, value in uninterrupted.lines()[-1].items() if name.startswith("usage/") and "_tokens" in name
    )
    run = Simulation(tmp_path / "run", World(), settings=settings | {"budget_tokens": int(trained) + 1})
    run.settings = {**run.settings, "rollouts": {"max_concurrent": 1}}
    result = run.train()
    assert (result.status, result.steps) == ("completed", 2)
    assert any("budget_tokens" in note for note in run.ears.notes)


def test_dollars_are_tokens_times_prices(tmp_path: Path) -> None:
    prices = {"prefill": 1e4, "cached_prefill": 1e3, "sample": 3e4, "train": 2e4}
    run = Simulation(tmp_path / "run", World(), settings={"steps": 50, "prices": prices, "budget_usd": 100.0})
    result = run.train()
    assert result.status == "budget"
    usage = read_usage(run)
    usd = (
        sum(
            usage[f"{kind}_tokens"] * price
            for kind, price in zip(("prefill", "cached", "sampled", "trained"), prices.values(), strict=True)
        )
        / 1e6
    )
    assert usd >= 100
    assert result.metrics["usage/usd"] <= usd
    assert f"budget_usd: about ${usd:,.2f} of $100.00" in result.reason or "budget_usd" in result.reason


def test_request_counts_as_billed_by_the_service() -> None:
    async def run() -> Usage:
        async with SimulatedTinker(latency=Latency(mean_tokens=1e9)) as service:
            sampler = await service.sampler(model="m")
            prompt = Prompt(pd.Series([1, 2, 3, 4, 5]).to_numpy("int32"))
            await sampler.sample(prompt, Sampling(max_tokens=7), seed=0, num_samples=3)
            return service.usage

    assert run_virtual(run()) == Usage(requests=1, prefill_tokens=5, cached_tokens=10, sampled_tokens=21)


def test_usage_of_a_run_equals_the_tokens_of_its_episodes(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"rollouts": {"coalesce": "never"}})
    run.train()
    turns = [turn for turns in pd.read_parquet(run.directory / "episodes").turns for turn in turns]
    usage = read_usage(run)
    assert usage["sampled_tokens"] == sum(len(turn["completion"]) for turn in turns)
    assert usage["prefill_tokens"] == sum(len(turn["prompt"]) for turn in turns)  # of one turn each
    last = run.lines()[-1]
    assert last["usage/sampled_tokens"] == usage["sampled_tokens"]
    assert last["usage/trained_tokens"] == usage["trained_tokens"] > 0


def test_the_usage_of_processes_adds_up(tmp_path: Path) -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time

        def begin_process(config: Config, price: Price | None) -> Budget:
            usage = Usage(1, 2, 3, 4, 5)
            return Budget(config, tmp_path, price=price, used=lambda: usage, clock=clock, note=pytest.fail)

        first = begin_process(make_config(), FREE)
        await asyncio.sleep(10)
        first.write()
        second = begin_process(make_config(budget_tokens=28), None)
        await asyncio.sleep(5)
        assert second.usage == Usage(2, 4, 6, 8, 10)
        assert second.seconds == 15
        assert second.reached_limit == "budget_tokens: 28 of 28 tokens are used"
        assert "usage/usd" in first.metrics()
        assert "usage/usd" not in second.metrics()

    run_virtual(run())


def make_config(**settings: object) -> Config:
    return load_config([], settings={"envs": {"words": {}}, **settings}).config


def test_prices_are_those_of_the_service_that_is_used() -> None:
    hosted_price = price_of(make_config(model="Qwen/Qwen3-8B"), "hosted")
    assert hosted_price == Price(0.195, 0.039, 0.60, 0.44, "2026-10-07")
    assert price_of(make_config(model="Qwen/Qwen3-8B"), "url") is None
    assert price_of(make_config(), "engine") == FREE
    configured = make_config(prices={"prefill": 1, "sample": 2, "train": 3})
    assert price_of(configured, "url") == Price(1, 1, 2, 3)


PRICES, OTHER_PRICES = ({"prefill": price, "sample": 2, "train": 3} for price in (1, 2))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"budget_usd": 5}, "engine", "budget_usd has no effect: the embedded engine costs nothing"),
        ({"prices": {"prefill": 1, "sample": 2, "train": 3}}, "engine", "prices has no effect"),
        ({"budget_usd": 5, "model": "Qwen/Qwen3-8b"}, "hosted", "Did you mean 'Qwen/Qwen3-8B'"),
        ({"budget_usd": 5, "model": "Qwen/Qwen3-8B"}, "url", "the price of Qwen/Qwen3-8B is unknown"),
        (
            {"teacher": {"model": "big", "prices": PRICES}},
            "engine",
            "teacher.prices has no effect: the embedded engine",
        ),
        (
            {"teacher": {"prompt": "a:b", "prices": PRICES}},
            "url",
            "teacher.prices has no effect: the teacher is the run",
        ),
        (
            {"teachers": {"a": {"model": "big", "prices": PRICES}, "b": {"model": "big", "prices": OTHER_PRICES}}},
            "url",
            "teachers.b.prices: another teacher with the model big has other prices",
        ),
    ],
)
def test_budget_that_cannot_be_enforced_is_an_error(settings: dict[str, object], kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        price_of(make_config(**settings), kind)  # type: ignore[arg-type]  a kind


def test_rejected_budget_leaves_no_folder(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"budget_usd": 5})
    with pytest.raises(rlkit.ConfigError, match="the price of simulated is unknown"):
        run.train()
    assert not run.directory.exists()


def test_a_price_has_those_of_the_teachers() -> None:
    own = {"prices": {"prefill": 5, "sample": 6, "train": 7}}
    prices = {"prefill": 1, "sample": 2, "train": 3}
    price = price_of(make_config(prices=prices, teacher={"model": "big", **own}), "url")
    assert price is not None
    assert price.teachers == {"big": Price(5, 5, 6, 7)}
    usage = Usage(prefill_tokens=100, sampled_tokens=1, other_usd=price.scoring_difference("big", 100, 1))
    assert price.usd(usage) == pytest.approx((100 * 5 + 6) / 1e6)
    assert price.scoring_difference("another checkpoint of the run's model", 100, 1) == 0
    assert price_of(make_config(prices=prices, teacher={"model": "unknown"}), "url") is None
    with pytest.raises(ConfigError, match=r"budget_usd: the price of unknown is unknown\.Set|Set teacher\.prices"):
        price_of(make_config(prices=prices, teacher={"model": "unknown"}, budget_usd=1), "url")


def test_the_price_of_a_teacher_is_kept_over_processes(tmp_path: Path) -> None:
    usage = Usage(prefill_tokens=1_000_000, other_usd=2.5)
    clock = iter(range(100)).__next__

    def open_budget(used: Usage) -> Budget:
        config = make_config(budget_usd=6)
        return Budget(config, tmp_path, price=Price(1, 1, 1, 1), used=lambda: used, clock=clock, note=pytest.fail)

    open_budget(usage).write()
    again = open_budget(Usage())
    assert again.spending.usd == pytest.approx(3.5)
    assert again.metrics()["usage/usd"] == pytest.approx(3.5)
    assert again.reached_limit is None
    assert open_budget(Usage(other_usd=2.5)).reached_limit is not None
