"""A model is measured with the patience that a run has."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.priority_semaphore import Slots
from rlkit.algorithms.references import Reference, Scores
from rlkit.config.schema import Config
from rlkit.errors import ServiceError
from rlkit.evaluation.evaluate import Evaluation, compute_eval_metrics, evaluate
from rlkit.evaluation.report import EvaluationReport
from rlkit.evaluation.scores import compute_score_metrics
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, Fault, SimulatedTinker, World, run_virtual
from rlkit.types import Episode, Group, Prompt, Sampling
from tests.builders import group

TASKS = """
import rlkit

class Letters(rlkit.SingleTurnEnv):
    def __init__(self, number): self.task_id = f"task-{number}"
    def prompt(self): return self.task_id
    def grade(self, reply): return float(reply.text.count("e"))

def tasks(): return [Letters(number) for number in range(5)]
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "letters.py").write_text(TASKS)
    spec = {"env": f"{tmp_path}/letters.py:tasks"}
    return Config(model="simulated", envs={"letters": spec}, service={"timeout_s": 600.0, "base_url": "http://x"})  # type: ignore[arg-type]  pydantic makes sections of them


def run_evaluation(
    config: Config, service: SimulatedTinker, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mapping[str, float], list[str]]:
    notes = list[str]()

    @asynccontextmanager
    async def connect(*args: object, **named: object) -> AsyncGenerator[SimulatedTinker]:
        yield service

    monkeypatch.setattr("rlkit.evaluation.evaluate.connect", connect)
    monkeypatch.setattr("rlkit.evaluation.evaluate.load_chat", lambda *args, **settings: ByteChat())
    return run_virtual(evaluate(config, note=notes.append)), notes


SLOW = """
import asyncio
import rlkit

class Slow(rlkit.Env):
    task_id = "slow"
    async def rollout(self, policy):
        await asyncio.sleep(60)
        return 1.0

def tasks(): return [Slow()]
"""


@pytest.mark.parametrize("has_own_limit", [True, False])
def test_time_limit_of_an_environment_applies_to_its_evaluation(
    tmp_path: Path, has_own_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    spec, quick = {"env": f"{tmp_path}/slow.py:tasks"}, {"timeout_s": 7.0}
    sections = {
        "envs": {"slow": spec | ({} if has_own_limit else quick)},
        "eval": {"envs": {"slow": spec | quick} if has_own_limit else {}},
    }
    config = Config(model="simulated", service={"base_url": "http://x"}, **sections)  # type: ignore[arg-type]  likewise
    metrics, notes = run_evaluation(config, SimulatedTinker(), monkeypatch)
    assert metrics["eval/slow/failed"] == 1
    late = "the rollout took longer than 7 s (timeout_s)"
    assert notes == [
        f"the first failed rollout of slow, task slow: {late}",
        f"slow: 3 rollouts failed, 2 of them were retried: {late}",
    ]


@pytest.mark.parametrize("kind", ["500", "429", "hang"])
def test_failed_request_is_retried_and_noted(config: Config, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run_evaluation(config, SimulatedTinker(), monkeypatch)
    world = World(faults=[Fault(kind, call="sample", call_number=2)])  # type: ignore[arg-type]  one of the kinds
    metrics, notes = run_evaluation(config, SimulatedTinker(world=world), monkeypatch)
    assert metrics == expected
    assert metrics["eval/letters/episodes"] == 5
    assert notes


def test_unreachable_service_is_an_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimulatedTinker(world=World(faults=[Fault("500", call="sample")]))
    with pytest.raises(ServiceError, match="InternalServerError"):
        run_evaluation(config, service, monkeypatch)
    assert service.world.calls["sample"] > 50


def test_request_for_the_context_size_is_retried(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(SimulatedTinker):
        attempts = 0

        async def context_tokens(self, model: str) -> int | None:
            self.attempts += 1
            if self.attempts == 1:
                raise ServiceError("busy")
            return await super().context_tokens(model)

    _, notes = run_evaluation(config, Forgetful(), monkeypatch)
    assert notes == ["busy; retrying"]


BROKEN = """
import rlkit

class Broken(rlkit.SingleTurnEnv):
    def __init__(self, number): self.number = number
    def prompt(self): return "?"
    def grade(self, reply):
        if self.number: raise KeyError("answer")
        return 1.0

def tasks(): return [Broken(number) for number in range(2)]
"""


def test_failure_of_evaluation_rollouts_is_noted_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    spec = {"env": f"{tmp_path}/broken.py:tasks"}
    config = Config(model="simulated", envs={"broken": spec}, service={"base_url": "http://x"})  # type: ignore[arg-type]  as above
    metrics, notes = run_evaluation(config, SimulatedTinker(), monkeypatch)
    assert (metrics["eval/broken/failed"], metrics["eval/broken/reward/mean"]) == (1, 1)
    first, summary = notes
    assert first.startswith("the first failed rollout of broken, task ")
    assert summary.startswith("broken: 3 rollouts failed, 2 of them were retried: KeyError: 'answer' at ")


def test_reported_metrics_do_not_replace_scores() -> None:
    reported = {"avg_at_2": 7.0, "pass_at_2": 7.0, "reward/mean": 7.0, "reward/stderr": 7.0, "spoken": 7.0}
    episodes = tuple(replace(episode, metrics=reported) for episode in group([1.0, 0.0]).episodes)
    groups = [replace(group([]), draw=draw, episodes=episodes) for draw in range(2)]
    metrics = asyncio.run(compute_eval_metrics(groups))
    assert [name for name, value in metrics.items() if value == 7.0] == ["eval/env/spoken", "eval/all/spoken"]
    assert metrics["eval/env/avg_at_2"] == 0.5
    report = EvaluationReport.from_metrics(metrics, groups, envs=["env"])
    assert report.render().endswith("mean spoken 7.000")


def test_standard_error_of_extreme_rewards_does_not_overflow() -> None:
    ends = [
        Group("e", f"{draw}", draw, (Episode(0, 0, (), "completed", reward, {}, {}, 1.0),))
        for draw, reward in enumerate([1.7e308, -1.7e308, 1.7e308])
    ]
    assert not math.isfinite(compute_score_metrics(ends, prefix="eval")["eval/e/reward/stderr"])


@given(st.lists(st.lists(st.floats(-5, 5) | st.none(), min_size=1, max_size=4), min_size=1, max_size=6))
def test_standard_error_is_clustered_by_task(rewards: list[list[float | None]]) -> None:
    groups = [
        Group(
            "e",
            f"{draw}",
            draw,
            tuple(
                Episode(member, 0, (), "failed" if reward is None else "completed", reward, {}, {}, 1.0)
                for member, reward in enumerate(row)
            ),
        )
        for draw, row in enumerate(rewards)
    ]
    metrics = compute_score_metrics(groups, prefix="eval")
    standard_errors = {name: value for name, value in metrics.items() if name.endswith("/stderr")}
    valid = [[reward for reward in row if reward is not None] for row in rewards]
    valid = [row for row in valid if row]
    if len(valid) < 2:
        assert standard_errors == {}
        return
    every = [reward for row in valid for reward in row]
    mean = sum(every) / len(every)
    squares = sum(sum(reward - mean for reward in row) ** 2 for row in valid)
    expected = math.sqrt(squares * len(valid) / (len(valid) - 1)) / len(every)
    assert standard_errors == {
        "eval/e/reward/stderr": pytest.approx(expected, abs=1e-9),
        "eval/all/reward/stderr": standard_errors["eval/e/reward/stderr"],
    }
    if all(len(row) == 1 for row in valid):
        assert standard_errors["eval/e/reward/stderr"] == pytest.approx(
            np.std(every, ddof=1) / math.sqrt(len(every)), abs=1e-9
        )


def make_reference(logprob: float, *, is_teacher: bool = True) -> Reference:
    async def score(prompt: Prompt, last: int, top: int) -> Scores:
        none = np.empty((last, 0), np.int32)
        return Scores(np.full(last, logprob, np.float32), none, none.astype(np.float32))

    return Reference(score, 1.0, is_teacher=is_teacher)


def test_the_divergence_is_from_each_teacher_at_temperature_1() -> None:
    def make(temperature: float) -> EnvSettings:
        return EnvSettings(1, Sampling(max_tokens=2, temperature=temperature), 60, 0, Limits())

    one, two = replace(make_reference(-5), name="one"), make_reference(-0.5)
    references = [make_reference(-9, is_teacher=False), one, two]
    settings = {"env": make(1.0), "cold": make(0.5), "untaught": make(1.0)}
    player = Player(LocalRunner(ByteChat()), settings, seed=0, slots=Slots(1))
    taught = {"env": references, "cold": references, "untaught": references[:1]}
    evaluation = Evaluation({}, player, 0, taught)
    groups = [group([1.0, 0.0], env=name) for name in settings]
    # Two sampled tokens with log-probabilities −0.1 and −0.2, to which the teachers give −5 and −0.5 each.
    divergence = {"eval/env/teacher/kl": (4.85 + 0.35) / 2, "eval/env/teacher/one/kl": 4.85}
    assert asyncio.run(evaluation.measure_divergence(groups)) == pytest.approx(divergence)
