"""A dry run plays the run, and says what does not work and what was not tried."""

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
from rlkit.config import load_config
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
TALKS = [Talk(number) for number in range(4)]
HELD_OUT_TASKS = [Word(number) for number in range(100, 130)]


class Broken(rlkit.SingleTurnEnv):
    """A grader with a mistake in it."""

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: rlkit.Reply) -> float:
        raise KeyError("answer")


class Silent(rlkit.Env):
    """Asks the model for nothing."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 1.0


class Remote(rlkit.Env):
    """Needs a machine that is not there."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        raise ConnectionRefusedError("sandbox.example:443")


class Counting(rlkit.SingleTurnEnv):
    """Counts how often it is played."""

    played = 0

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: rlkit.Reply) -> float:
        type(self).played += 1
        return float(len(reply.text))


class Endless(rlkit.TaskSource):
    """A source of one's own."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> rlkit.Env:
        self.drawn += 1
        return Word(self.drawn)

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:  # type: ignore[override]  what state_dict gave
        self.drawn = state["drawn"]


def played(tasks: Tasks | None = None, **more: object) -> Rehearsal:
    resolved = load_config([], settings=SETTINGS | more)
    envs = {"words": [Word(number) for number in range(9)] if tasks is None else tasks}
    return run_virtual(rehearse(resolved, envs=envs, chat=ByteChat()))


def part(made: Rehearsal, name: str) -> Part:
    return next(one for one in made.parts if one.name == name)


@pytest.mark.parametrize("schedule", [{}, {"mode": "stream"}, {"mode": "async", "max_staleness": 3}])
@pytest.mark.parametrize("substeps", [1, 3])
def test_a_run_that_works_takes_steps_and_is_resumed(schedule: dict[str, object], substeps: int) -> None:
    made = played(schedule=schedule, batch={"groups": 9, "substeps": substeps})
    assert made.ok, made.parts
    assert made.estimate is not None
    assert part(made, "training").detail.startswith(f"{2 * substeps} optimiser steps on")
    # No more than needed: of 8 × 8 rollouts a step, 2 × 2 or 3 × 2.
    assert part(made, "envs.words").detail.startswith("4 rollouts")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_rehearsed(name: str) -> None:
    assert played(advantage=name).ok


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_every_loss_is_rehearsed(name: str) -> None:
    assert played(loss={"name": name}).ok


def test_nothing_but_the_estimate_is_left_behind() -> None:
    played()
    assert [path.name for path in runs_dir().iterdir()] == [".estimates"]


def test_tasks_of_all_kinds_are_rehearsed() -> None:
    assert played([Talk(number) for number in range(3)]).ok
    assert played(Word(1)).ok
    assert played(Endless()).ok
    assert played(Word(number) for number in range(3)).ok  # an iterator can be read once only


class Finite(Endless):
    """A source that runs dry."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.tasks = tasks

    def next(self) -> rlkit.Env | None:
        return super().next() if self.drawn < self.tasks else None


def test_a_source_of_few_tasks_begins_anew_in_each_part() -> None:
    source = Finite(4)
    made = played(source)
    assert made.ok, made.parts
    assert part(made, "training").status == "ok"
    short = played(Finite(2))
    assert part(short, "envs.words").status == "ok"
    assert part(short, "training") == Part(
        "training", "not tried", "ended after 1 steps, because there are no more tasks"
    )
    assert short.estimate is not None


@pytest.mark.parametrize("batch", [{"max_tokens": 2, "overlong": "drop"}, {"clip_advantages": 1e-300}])
def test_a_run_that_would_train_on_nothing_is_named(batch: dict[str, object]) -> None:
    made = played(batch=batch)
    assert part(made, "training").status == "failed"
    assert part(made, "training").detail.startswith("there was no data to train on: check batch.max_tokens")


def test_a_source_that_cannot_be_set_back_is_named() -> None:
    class Forgetful(Endless):
        def load_state_dict(self, state: dict[str, int]) -> None:  # type: ignore[override]  what state_dict gave
            raise KeyError("place")

    made = played(Forgetful())
    assert any("load_state_dict failed on the result of state_dict: KeyError" in one.detail for one in made.parts)
    assert not made.ok


def test_a_goal_that_is_reached_at_once_does_not_cut_the_rehearsal_short() -> None:
    made = played(best={"metric": "env/words/reward/mean", "goal": -5.0})
    assert part(made, "training").status == "ok"


def test_a_held_out_split_is_played_too_and_little_of_it() -> None:
    made = played(eval={"envs": {"held_out": {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 30, "attempts": 4}}})
    assert made.ok, made.parts
    assert part(made, "eval.envs.held_out").detail.startswith("8 rollouts")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (Broken(), "4 of 4 rollouts failed: "),
        (Silent(), "none of 4 rollouts made a request to the model"),
        (Remote(), "ConnectionRefusedError: sandbox.example:443"),
    ],
)
def test_what_does_not_work_is_named_and_nothing_is_estimated(env: rlkit.Env, told: str) -> None:
    made = played(env)
    assert not made.ok
    assert part(made, "envs.words").status == "failed"
    assert told in part(made, "envs.words").detail
    assert made.estimate is None
    assert "training" not in [one.name for one in made.parts]


def test_an_environment_without_tasks_is_named() -> None:
    class Dry(Endless):
        def next(self) -> None:  # type: ignore[override]  it has run dry
            return None

    assert part(played(Dry()), "envs.words").detail == "there are no tasks"


def wrong(group: rlkit.Group) -> np.ndarray:
    return np.zeros(1)


def without_gradient(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.tensor(1.0), {}


def test_an_estimator_that_fails_is_found() -> None:
    made = played(advantage=f"{__file__}:wrong")
    assert part(made, "training").status == "failed"
    assert part(made, "training").detail.startswith("the advantage estimator wrong (test_rehearse.py:")
    assert "returned 1 advantage: it must return " in part(made, "training").detail


def leaving(group: rlkit.Group) -> np.ndarray:
    raise SystemExit(5)


def test_an_estimator_that_ends_the_program_is_found_and_does_not() -> None:
    made = played(advantage=f"{__file__}:leaving")
    assert "the advantage estimator leaving (test_rehearse.py:" in part(made, "training").detail
    assert "SystemExit: 5" in part(made, "training").detail


@pytest.mark.parametrize(
    ("more", "told"),
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
def test_what_is_said_of_turns_where_there_is_one_is_refused_as_it_is_by_a_run(
    more: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        played(**more)
    with pytest.raises(ConfigError, match=told):
        Simulation(tmp_path, settings=more).trainer()


class Often(Word):
    """Of a single turn by its class, and of several by its rollout."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        for _ in range(2):
            reply = await policy.sample("?")
        return self.grade(reply)


def test_what_is_said_of_turns_is_kept_where_a_task_may_have_several() -> None:
    returns = {"name": "turn_returns", "discount": 0.9}
    for tasks in ([Word(1), Talk(2)], [Often(1)], Endless()):
        assert played(tasks, envs={"words": {"max_turns": 3}}, advantage=returns).ok
    one_turn = {"words": {"max_turns": 1}}
    with pytest.raises(ConfigError, match=r"advantage\.discount: has no effect"):
        played([Talk(1)], envs=one_turn, advantage=returns)
    own = {"words": {}, "talks": {"env": f"{__file__}:TALKS", "advantage": returns}}
    assert played(envs=own).ok
    with pytest.raises(ConfigError, match=r"envs\.words\.advantage\.discount: has no effect"):
        played(envs=own | {"words": {"advantage": returns}})


@pytest.mark.parametrize("metric", ["env/words/spoken", "env/all/format", "env/all/pass_at_16", "service/speed"])
def test_a_metric_that_no_step_of_the_dry_run_has_is_named(metric: str) -> None:
    made = played(best={"metric": metric})
    assert made.ok
    assert part(made, "best.metric").status == "not tried"
    assert f"no step of the dry run had a '{metric}'" in part(made, "best.metric").detail
    for known in ("env/words/retried/gap", "env/words/pass_at_8", "env/words/reward/mean"):
        assert "best.metric" not in [one.name for one in played(best={"metric": known}).parts]


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
    ("function", "told"),
    [
        ("without_gradient", "one number"),
        ("not_a_number", "the loss is nan"),
        ("wordy", "the metric 'said' is not a number"),
        ("leaves", "SystemExit: 3 at "),
        ("alone", "it returned a value of type Tensor: it must return a pair, the loss and a mapping of metrics"),
        ("later", "it returned a coroutine, as it is an async function: it must return a pair"),
    ],
)
def test_a_loss_that_fails_is_found(function: str, told: str) -> None:
    made = played(loss={"name": "custom", "function": f"{__file__}:{function}"})
    assert part(made, "training").status == "failed"
    assert part(made, "training").detail.startswith("loss.function: ")
    assert told in part(made, "training").detail


def test_a_loss_that_is_not_there_is_refused_before_anything_is_played() -> None:
    with pytest.raises(rlkit.ConfigError, match=r"loss\.function: .* has no 'absent'"):
        played(loss={"name": "custom", "function": f"{__file__}:absent"})


def test_a_rate_of_which_nothing_is_known_is_refused_before_anything_is_played() -> None:
    with pytest.raises(rlkit.ConfigError, match=r"optimizer\.learning_rate: there is no advice"):
        played(optimizer={"learning_rate": "auto"})


def test_what_only_the_service_knows_is_named() -> None:
    path = "tinker://0:train:0/weights/before"
    reference = "tinker://0:train:0/sampler_weights/before"
    made = played(load_checkpoint=path, kl_penalty={"coefficient": 0.1, "reference": reference})
    assert made.ok, made.parts
    untried = {one.name: one.detail for one in made.parts if one.status == "not tried"}
    assert list(untried) == ["service", "load_checkpoint", "kl_penalty.reference", "prices"]
    assert path in untried["load_checkpoint"]
    assert "127.0.0.1:9" in untried["service"]
    assert untried["prices"].endswith(
        "is known: set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
    )


def test_a_tokenizer_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **settings: object) -> None:
        raise MissingError("the tokenizer of simulated cannot be loaded from the hub: no route")

    monkeypatch.setattr("rlkit.dry_run.rehearse.load_chat", unreachable)
    resolved = load_config([], settings=SETTINGS)
    made = asyncio.run(rehearse(resolved, envs={"words": [Word(1)]}))
    assert made.ok
    assert part(made, "chat") == Part(
        "chat",
        "not tried",
        "the tokenizer of simulated cannot be loaded from the hub: no route; bytes are used and counted as tokens",
    )


def test_an_environment_of_several_is_named_though_the_others_work() -> None:
    resolved = load_config([], settings=SETTINGS | {"envs": {"good": {"weight": 99.0}, "bad": {"weight": 0.01}}})
    made = run_virtual(rehearse(resolved, envs={"good": [Word(1)], "bad": [Broken()]}, chat=ByteChat()))
    assert part(made, "envs.good").status == "ok"
    assert part(made, "envs.bad").status == "failed"


def test_a_schedule_of_the_learning_rate_does_not_mind_that_it_is_cut_short() -> None:
    for schedule in ("constant", "linear", "cosine"):
        for warmup in (0, 1, 20):
            assert played(optimizer={"warmup_steps": warmup, "schedule": schedule}).ok


def test_a_pilot_of_less_than_no_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="pilot: -1 must not be negative"):
        asyncio.run(rehearse(load_config([], settings=SETTINGS), pilot=-1))


def test_few_rollouts_are_played() -> None:
    Counting.played = 0
    assert played([Counting()] * 5, batch={"groups": 64, "group_size": 16}).ok
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


def test_an_estimator_of_whole_steps_stays_one() -> None:
    from rlkit.dry_run.pilot import NudgedEstimator

    equal = [rlkit.Group("words", "task", 0, ())]
    one = NudgedEstimator(inner=BatchStd())
    assert one.needs_whole_steps
    assert len(one.step_advantages(equal)) == 1
