"""A dry run plays a small run, and reports failures and parts that it could not test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import rlkit
from rlkit._util.paths import runs_dir
from rlkit.algorithms.estimators import ESTIMATORS, BatchStd
from rlkit.config.loading.load import load_config
from rlkit.config.schema import Config
from rlkit.dry_run.rehearse import Part, Rehearsal, make_small_config, rehearse
from rlkit.errors import ConfigError, MissingError, UsageError
from rlkit.tasks.sources import Tasks
from rlkit.testing import ByteChat, run_virtual
from rlkit.types import Datum
from tests.simulation import Simulation, Talk, Word

SETTINGS: dict[str, object] = {
    "model": "simulated",
    "envs": {"words": {}},
    "steps": 50,
    "service": {"base_url": "http://127.0.0.1:9"},  # nobody listens there
}


def advise(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    return [{"role": "system", "content": "Be brief."}, *messages]


TALKS = [Talk(number) for number in range(4)]
HELD_OUT_TASKS = [Word(number) for number in range(100, 130)]


class Broken(rlkit.SingleTurnEnv):
    """Grader with a bug."""

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: rlkit.Reply) -> float:
        raise KeyError("answer")


class Silent(rlkit.Env):
    """Send no request to the model."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 1.0


class Remote(rlkit.Env):
    """Need a machine that does not exist."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        raise ConnectionRefusedError("sandbox.example:443")


class Counting(rlkit.SingleTurnEnv):
    """Count its rollouts."""

    run_rehearsal = 0

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: rlkit.Reply) -> float:
        type(self).played += 1
        return float(len(reply.text))


class Endless(rlkit.TaskSource):
    """Custom task source."""

    def __init__(self) -> None:
        self.draw_count = 0

    def next(self) -> rlkit.Env:
        self.draw_count += 1
        return Word(self.draw_count)

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: dict[str, int]) -> None:  # type: ignore[override]  what state_dict gave
        self.draw_count = state["drawn"]


def run_rehearsal(tasks: Tasks | None = None, **more: object) -> Rehearsal:
    resolved = load_config([], settings=SETTINGS | more)
    envs = {"words": [Word(number) for number in range(9)] if tasks is None else tasks}
    return run_virtual(rehearse(resolved, envs=envs, chat=ByteChat()))


def find_part(rehearsal: Rehearsal, name: str) -> Part:
    return next(part for part in rehearsal.parts if part.name == name)


@pytest.mark.parametrize("schedule", [{}, {"mode": "stream"}, {"mode": "async", "max_staleness": 3}])
@pytest.mark.parametrize("substeps", [1, 3])
def test_rehearsal_trains_and_resumes(schedule: dict[str, object], substeps: int) -> None:
    rehearsal = run_rehearsal(schedule=schedule, batch={"groups": 9, "substeps": substeps})
    assert rehearsal.ok, rehearsal.parts
    assert rehearsal.estimate is not None
    assert find_part(rehearsal, "training").detail.startswith(f"{2 * substeps} optimiser steps on")
    # No more than needed: of 8 × 8 rollouts a step, 2 × 2 or 3 × 2.
    assert find_part(rehearsal, "envs.words").detail.startswith("4 rollouts")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_rehearsed(name: str) -> None:
    assert run_rehearsal(advantage=name).ok


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_every_loss_is_rehearsed(name: str) -> None:
    assert run_rehearsal(loss={"name": name}).ok


def test_rehearsal_leaves_only_the_estimate() -> None:
    run_rehearsal()
    assert [path.name for path in runs_dir().iterdir()] == [".estimates"]


def test_tasks_of_all_kinds_are_rehearsed() -> None:
    assert run_rehearsal([Talk(number) for number in range(3)]).ok
    assert run_rehearsal(Word(1)).ok
    assert run_rehearsal(Endless()).ok
    assert run_rehearsal(Word(number) for number in range(3)).ok  # an iterator can be read once only


class Caller(rlkit.ToolEnv[None]):
    """Environment whose tools random replies do not call."""

    max_turns = 5

    def reset(self) -> tuple[None, Sequence[rlkit.Message]]:
        return None, [{"role": "user", "content": "?"}]

    def tools(self) -> Sequence[rlkit.Tool]:
        return [{"name": "look", "description": "looks", "parameters": {}}]

    async def call(self, state: None, call: rlkit.ToolCall) -> str:
        return ""

    async def grade(self, state: None, reply: rlkit.Reply | None) -> float:
        return float(len(reply.text)) if reply else 0.0


def test_upper_bound_counts_the_turns_of_an_agent_that_calls_tools() -> None:
    def high(**more: object) -> float:
        rehearsal = run_rehearsal(Caller(), **more)
        assert rehearsal.estimate is not None
        return rehearsal.estimate.tokens.high

    single = high(envs={"words": {"max_turns": 1}})
    assert high(envs={"words": {"max_turns": 3}}) > 3 * single
    assert high(envs={"words": {"max_turns": 9}}) == high() > 5 * single


class Finite(Endless):
    """Source with a limited number of tasks."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.tasks = tasks

    def next(self) -> rlkit.Env | None:
        return super().next() if self.draw_count < self.tasks else None


def test_small_source_restarts_for_each_part() -> None:
    source = Finite(4)
    rehearsal = run_rehearsal(source)
    assert rehearsal.ok, rehearsal.parts
    assert find_part(rehearsal, "training").status == "ok"
    exhausted = run_rehearsal(Finite(2))
    assert find_part(exhausted, "envs.words").status == "ok"
    assert find_part(exhausted, "training") == Part(
        "training", "not tried", "ended after 1 steps, because there are no more tasks"
    )
    assert exhausted.estimate is not None


@pytest.mark.parametrize("batch", [{"max_tokens": 2, "overlong": "drop"}, {"clip_advantages": 1e-300}])
def test_rehearsal_reports_a_step_without_data(batch: dict[str, object]) -> None:
    rehearsal = run_rehearsal(batch=batch)
    assert find_part(rehearsal, "training").status == "failed"
    assert find_part(rehearsal, "training").detail.startswith("there was no data to train on: check batch.max_tokens")


def test_rehearsal_reports_a_source_that_cannot_be_restored() -> None:
    class Forgetful(Endless):
        def load_state_dict(self, state: dict[str, int]) -> None:  # type: ignore[override]  what state_dict gave
            raise KeyError("place")

    rehearsal = run_rehearsal(Forgetful())
    assert any(
        "load_state_dict failed on the result of state_dict: KeyError" in part.detail for part in rehearsal.parts
    )
    assert not rehearsal.ok


def test_goal_reached_at_once_does_not_end_the_rehearsal() -> None:
    rehearsal = run_rehearsal(best={"metric": "env/words/reward/mean", "goal": -5.0})
    assert find_part(rehearsal, "training").status == "ok"


def test_rehearsal_plays_few_rollouts_of_a_held_out_split() -> None:
    rehearsal = run_rehearsal(
        eval={"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 30, "attempts": 4}}}
    )
    assert rehearsal.ok, rehearsal.parts
    assert find_part(rehearsal, "eval.envs.held_out").detail.startswith("8 rollouts")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Broken(), "4 of 4 rollouts failed: "),
        (Silent(), "none of 4 rollouts made a request to the model"),
        (Remote(), "ConnectionRefusedError: sandbox.example:443"),
    ],
)
def test_failing_environment_is_reported_without_an_estimate(env: rlkit.Env, message: str) -> None:
    rehearsal = run_rehearsal(env)
    assert not rehearsal.ok
    assert find_part(rehearsal, "envs.words").status == "failed"
    assert message in find_part(rehearsal, "envs.words").detail
    assert rehearsal.estimate is None
    assert "training" not in [part.name for part in rehearsal.parts]


def test_rehearsal_reports_an_environment_without_tasks() -> None:
    class Dry(Endless):
        def next(self) -> None:  # type: ignore[override]  it has run dry
            return None

    assert find_part(run_rehearsal(Dry()), "envs.words").detail == "there are no tasks"


def wrong(group: rlkit.Group) -> np.ndarray:
    return np.zeros(1)


def without_gradient(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.tensor(1.0), {}


def test_rehearsal_reports_a_failing_estimator() -> None:
    rehearsal = run_rehearsal(advantage=f"{__file__}:wrong")
    assert find_part(rehearsal, "training").status == "failed"
    assert find_part(rehearsal, "training").detail.startswith("the advantage estimator wrong (test_rehearse.py:")
    assert "returned 1 advantage: it must return " in find_part(rehearsal, "training").detail


def leaving(group: rlkit.Group) -> np.ndarray:
    raise SystemExit(5)


def test_rehearsal_survives_an_estimator_that_exits() -> None:
    rehearsal = run_rehearsal(advantage=f"{__file__}:leaving")
    assert "the advantage estimator leaving (test_rehearse.py:" in find_part(rehearsal, "training").detail
    assert "SystemExit: 5" in find_part(rehearsal, "training").detail


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"envs": {"words": {"max_turns": 3}}},
            r"envs\.words\.max_turns: has no effect, because each task has a ",
        ),
        (
            {"advantage": {"name": "turn_returns", "discount": 0.9}},
            r"advantage\.discount: has no effect, because each task of words has a single turn",
        ),
        (
            {"eval": {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "max_turns": 2}}}},
            r"eval\.envs\.held_out\.max_turns: has no effect",
        ),
    ],
)
def test_turn_settings_of_single_turn_tasks_are_errors_in_rehearsal_and_run(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_rehearsal(**settings)
    with pytest.raises(ConfigError, match=message):
        Simulation(tmp_path, settings=settings).trainer()


class Often(Word):
    """Single-turn environment by its class whose rollout has several turns."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        for _ in range(2):
            reply = await policy.sample("?")
        return self.grade(reply)


def test_turn_settings_are_accepted_if_a_task_may_have_several_turns() -> None:
    returns = {"name": "turn_returns", "discount": 0.9}
    for tasks in ([Word(1), Talk(2)], [Often(1)], Endless()):
        assert run_rehearsal(tasks, envs={"words": {"max_turns": 3}}, advantage=returns).ok
    one_turn = {"words": {"max_turns": 1}}
    with pytest.raises(ConfigError, match=r"advantage\.discount: has no effect"):
        run_rehearsal([Talk(1)], envs=one_turn, advantage=returns)
    envs = {"words": {}, "talks": {"env": f"{__file__}:TALKS", "advantage": returns}}
    assert run_rehearsal(envs=envs).ok
    with pytest.raises(ConfigError, match=r"envs\.words\.advantage\.discount: has no effect"):
        run_rehearsal(envs=envs | {"words": {"advantage": returns}})


@pytest.mark.parametrize("metric", ["env/words/spoken", "env/all/format", "env/all/pass_at_16", "service/speed"])
def test_rehearsal_reports_a_best_metric_that_no_step_has(metric: str) -> None:
    rehearsal = run_rehearsal(best={"metric": metric})
    assert rehearsal.ok
    assert find_part(rehearsal, "best.metric").status == "not tried"
    assert f"no step of the dry run had a '{metric}'" in find_part(rehearsal, "best.metric").detail
    for known_metric in ("env/words/retried/gap", "env/words/pass_at_8", "env/words/reward/mean"):
        assert "best.metric" not in [part.name for part in run_rehearsal(best={"metric": known_metric}).parts]


def not_a_number(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([row.sum() for row in logprobs]).sum() * float("nan"), {}


def wordy(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, object]]:
    return torch.stack([row.sum() for row in logprobs]).sum(), {"said": "text"}


def leaves(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    raise SystemExit(3)


def alone(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row.sum() for row in logprobs]).sum()


async def later(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    return alone(data, logprobs)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("without_gradient", "one number"),
        ("not_a_number", "the loss is nan"),
        ("wordy", "the metric 'said' is not a number"),
        ("leaves", "SystemExit: 3 at "),
        ("alone", "it returned a value of type Tensor: it must return a pair, the loss and a mapping of metrics"),
        ("later", "it returned a coroutine, as it is an async function: it must return a pair"),
    ],
)
def test_rehearsal_reports_a_failing_loss(function: str, message: str) -> None:
    rehearsal = run_rehearsal(loss={"name": "custom", "function": f"{__file__}:{function}"})
    assert find_part(rehearsal, "training").status == "failed"
    assert find_part(rehearsal, "training").detail.startswith("loss.function: ")
    assert message in find_part(rehearsal, "training").detail


def lonely(data: Sequence[Datum]) -> torch.Tensor:
    return torch.tensor(float(len(data)))


def test_a_loss_of_other_arguments_is_an_error_before_any_rollout() -> None:
    with pytest.raises(rlkit.UsageError, match=r"loss\.function: it must take the data and the log-probabilities: too"):
        run_rehearsal(loss={"name": "custom", "function": f"{__file__}:lonely"})


def test_missing_loss_is_an_error_before_any_rollout() -> None:
    with pytest.raises(rlkit.ConfigError, match=r"loss\.function: .* has no 'absent'"):
        run_rehearsal(loss={"name": "custom", "function": f"{__file__}:absent"})


def test_unknown_learning_rate_is_an_error_before_any_rollout() -> None:
    with pytest.raises(rlkit.ConfigError, match=r"optimizer\.learning_rate: there is no advice"):
        run_rehearsal(optimizer={"learning_rate": "auto"})


def test_rehearsal_lists_what_only_the_service_can_check() -> None:
    path = "tinker://0:train:0/weights/before"
    reference = "tinker://0:train:0/sampler_weights/before"
    rehearsal = run_rehearsal(load_checkpoint=path, kl_penalty={"coefficient": 0.1, "reference": reference})
    assert rehearsal.ok, rehearsal.parts
    untried = {part.name: part.detail for part in rehearsal.parts if part.status == "not tried"}
    assert list(untried) == ["service", "load_checkpoint", "kl_penalty.reference", "prices"]
    assert path in untried["load_checkpoint"]
    assert "127.0.0.1:9" in untried["service"]
    assert untried["prices"].endswith(
        "is known: set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
    )


def test_rehearsal_uses_bytes_if_the_tokenizer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **settings: object) -> None:
        raise MissingError("the tokenizer of simulated cannot be loaded from the hub: no route")

    monkeypatch.setattr("rlkit.dry_run.rehearse.load_chat", unreachable)
    resolved = load_config([], settings=SETTINGS)
    rehearsal = asyncio.run(rehearse(resolved, envs={"words": [Word(1)]}))
    assert rehearsal.ok
    assert find_part(rehearsal, "chat") == Part(
        "chat",
        "not tried",
        "the tokenizer of simulated cannot be loaded from the hub: no route; bytes are used and counted as tokens",
    )


def test_rehearsal_reports_the_one_failing_environment() -> None:
    resolved = load_config([], settings=SETTINGS | {"envs": {"good": {"weight": 99.0}, "bad": {"weight": 0.01}}})
    rehearsal = run_virtual(rehearse(resolved, envs={"good": [Word(1)], "bad": [Broken()]}, chat=ByteChat()))
    assert find_part(rehearsal, "envs.good").status == "ok"
    assert find_part(rehearsal, "envs.bad").status == "failed"


def test_learning_rate_schedule_runs_in_a_shortened_rehearsal() -> None:
    for schedule in ("constant", "linear", "cosine"):
        for warmup in (0, 1, 20):
            assert run_rehearsal(optimizer={"warmup_steps": warmup, "schedule": schedule}).ok


def test_negative_number_of_pilot_groups_is_an_error() -> None:
    with pytest.raises(UsageError, match="pilot: -1 must not be negative"):
        asyncio.run(rehearse(load_config([], settings=SETTINGS), pilot=-1))


def test_few_rollouts_are_played() -> None:
    Counting.played = 0
    assert run_rehearsal([Counting()] * 5, batch={"groups": 64, "group_size": 16}).ok
    assert Counting.played == 4 + 2 * 4


def test_a_small_run_keeps_what_its_settings_need() -> None:
    def small(**more: object) -> Config:
        return make_small_config(load_config([], settings=SETTINGS | more).config)

    assert (small().batch.groups, small().batch.group_size) == (2, 2)
    assert small(batch={"groups": 8, "substeps": 4}).batch.groups == 4
    assert small(advantage={"name": "pkpo", "k": 5}).batch.group_size == 5
    assert small(rollouts={"min_valid": 6}).batch.group_size == 6
    assert small(budget_tokens=5, max_hours=0.1, name="mine").budget_tokens is None
    assert small(envs={"words": {"group_size": 12}, "others": {}}).envs["words"].group_size == 2
    assert (
        small(batch={"group_size": 1}, advantage=f"{__file__}:wrong", rollouts={"min_valid": 1}).batch.group_size == 1
    )


@pytest.mark.parametrize("window", [{"first_step": 15}, {"last_step": 3}])
def test_a_teacher_of_some_steps_counts_in_the_steps_of_a_small_run(window: dict[str, object]) -> None:
    teacher = {"model": "larger", "weight": 2.0, **window}
    settings: dict[str, object] = {"steps": 5}
    if "first_step" in window:
        settings |= {"warm_start": {"files": "talks.jsonl", "steps": 10}}  # the small run has one of these steps
    for more in ({"teacher": teacher}, {"envs": {"words": {"teachers": {"strict": teacher}}}}):
        config = make_small_config(load_config([], settings=SETTINGS | settings | more).config)
        (found,) = config.find_teachers("words").values()
        assert (found.weight, found.first_step, found.last_step) == (2.0, 1, None)


@pytest.mark.parametrize("loss", ["importance_sampling", "distillation"])
def test_a_run_with_a_teacher_is_rehearsed(loss: str) -> None:
    rehearsal = run_rehearsal(TALKS, reward="none", teacher={"prompt": f"{__name__}:advise"}, loss=loss)
    assert rehearsal.ok, rehearsal.parts
    assert find_part(rehearsal, "training").status == "ok"


def test_nudged_estimator_keeps_estimating_whole_steps() -> None:
    from rlkit.dry_run.pilot import NudgedEstimator

    groups = [rlkit.Group("words", "task", 0, ())]
    estimator = NudgedEstimator(inner=BatchStd())
    assert estimator.needs_whole_steps
    assert len(estimator.step_advantages(groups)) == 1
