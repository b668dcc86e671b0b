"""The best weights, the checkpoints that are kept, and an early end."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.config.schema.operation import BestConfig
from rlkit.testing import Fault, World
from rlkit.training.model_selection import ModelSelection
from rlkit.types import Checkpoint
from tests.simulation import Simulation, Word

HELD_OUT = {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 3, "temperature": 1.0}
HELD_OUT_TASKS = [Word(number) for number in range(100, 103)]
VALUES = st.lists(st.floats(-10, 10) | st.none(), min_size=1, max_size=12)


def select_from(aim: BestConfig, values: list[float | None], **keep: int) -> ModelSelection:
    selection = ModelSelection(aim, **keep)
    for step, value in enumerate(values):
        selection.add(step, {} if value is None else {"m": value})
    return selection


def make_checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, f"tinker://run/weights/{step}", f"tinker://run/sampler_weights/{step}")


@given(VALUES, st.booleans())
def test_the_best_is_the_first_of_the_best_values(values: list[float | None], lower: bool) -> None:
    reported = [value for value in values if value is not None]
    best = select_from(BestConfig(metric="m", lower_is_better=lower), values).best
    if not reported:
        assert best is None
    else:
        value = (min if lower else max)(reported)
        assert best == (values.index(value), value)


@given(VALUES, st.integers(1, 4), st.floats(0, 3))
def test_patience_ends_a_run_after_values_without_gain(
    values: list[float | None], patience: int, min_gain: float
) -> None:
    reported = [value for value in values if value is not None]
    best, since = -math.inf, 0
    for value in reported:
        best, since = (value, 0) if value > best + min_gain else (best, since + 1)
    end_reason = select_from(BestConfig(metric="m", patience=patience, min_gain=min_gain), values).end_reason
    assert (end_reason is not None) == (since >= patience)


@given(VALUES, st.floats(-10, 10), st.booleans())
def test_a_goal_ends_a_run_once_it_is_reached(values: list[float | None], goal: float, lower: bool) -> None:
    reached = any(value is not None and (value <= goal if lower else value >= goal) for value in values)
    selection = select_from(BestConfig(metric="m", lower_is_better=lower, goal=goal), values)
    assert (selection.end_reason is not None) == reached


@given(VALUES, st.integers(1, 4), st.integers(0, 3), st.integers(0, 12))
def test_selection_keeps_the_newest_the_best_and_unreported_checkpoints(
    values: list[float | None], keep_last: int, keep_best: int, reported: int
) -> None:
    selection = select_from(BestConfig(metric="m"), values, keep_last=keep_last, keep_best=keep_best)
    checkpoints = [make_checkpoint(step) for step in range(len(values))]
    deleted = {checkpoint.step for checkpoint in selection.superfluous(checkpoints, last_step=reported)}
    judged = [checkpoint.step for checkpoint in checkpoints if checkpoint.step <= reported]
    ranked = sorted((-values[step], step) for step in judged if values[step] is not None)  # type: ignore[operator]  not None
    assert deleted == set(judged) - set(judged[-keep_last:]) - {step for _, step in ranked[:keep_best]}


def test_non_finite_values_are_ignored() -> None:
    assert select_from(BestConfig(metric="m"), [math.nan, math.inf, None]).best is None
    assert select_from(BestConfig(), [1.0]).best is None


def make_run(directory: Path, **settings: object) -> Simulation:
    base = {"steps": 8, "eval": {"every": 2, "envs": {"held_out": HELD_OUT}}, "checkpoint": {"every": 3}}
    return Simulation(directory, World(), settings=base | settings)


def read_metric(run: Simulation, name: str = "eval/all/reward/mean") -> dict[int, float]:
    return {int(line["step"]): line[name] for line in run.lines() if name in line}


def test_evaluated_steps_are_saved_and_the_best_is_selected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    result = run.train()
    assert run.ears.saved == [2, 3, 4, 6, 8]
    judged = {step: value for step, value in read_metric(run).items() if step}
    assert result.best_checkpoint is not None
    assert judged[result.best_checkpoint.step] == max(judged.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_superfluous_checkpoints_are_deleted_on_the_service(mode: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every": 1, "keep_last": 2, "keep_best": 1}, schedule={"mode": mode})
    result = run.train()
    assert result.best_checkpoint is not None
    expected = {result.best_checkpoint.step, 7, 8}
    remaining = {int(path.rsplit("-", 1)[1]) for path in run.world.checkpoints}
    assert remaining == expected
    lines = [json.loads(line) for line in (run.directory / "checkpoints.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "deleted" in line]) == 8 - len(expected)
    run.settings = {**run.settings, "steps": 9}
    assert run.train(resume=True).steps == 9
    assert not any("cannot be used" in note for note in run.ears.notes)


def test_failed_deletion_of_a_checkpoint_is_only_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every": 1, "keep_last": 1}, service={"timeout_s": 20.0})
    run.world.faults = [Fault("500", call="delete")]
    assert run.train().status == "completed"
    assert any("could not be deleted" in note for note in run.ears.notes)


def test_goal_ends_training_and_a_resumed_run_stays_completed(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain")
    plain.train()
    by_step = sorted(read_metric(plain).items())
    goal = max(value for step, value in by_step if 0 < step < 8)
    first = next(step for step, value in by_step if value >= goal)
    run = make_run(tmp_path / "run", best={"goal": goal})
    result = run.train()
    assert result.status == "completed"
    assert result.reason == f"eval/all/reward/mean has reached {goal:g} at step {first}"
    assert first <= result.steps < 8 or first == 0
    again = run.train(resume=True)
    assert (again.steps, again.reason) == (result.steps, result.reason)


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
def test_patience_ends_training(mode: str, tmp_path: Path) -> None:
    best = {"metric": "env/all/reward/mean", "patience": 3}
    run = make_run(tmp_path / "run", steps=60, best=best, schedule={"mode": mode}, eval={"envs": {}})
    result = run.train()
    assert result.status == "completed"
    assert result.steps < 60
    rewards = [value for _, value in sorted(read_metric(run, "env/all/reward/mean").items())]
    stale = [value <= max(rewards[:place]) for place, value in enumerate(rewards) if place]
    assert any(len(list(group)) >= 3 for is_stale, group in itertools.groupby(stale) if is_stale)
    assert result.checkpoint is not None
    assert result.checkpoint.step == result.steps


def test_metric_that_is_never_reported_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", best={"metric": "service/nonsense"})
    run.train()
    assert (
        "the best checkpoint is unknown, because no step has the metric service/nonsense (best.metric)"
        in run.ears.notes
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"best": {"patience": 3}}, "best.patience has no effect: add environments"),
        ({"best": {"goal": 3}}, "best.goal has no effect"),
        ({"best": {"metric": "eval/odd/reward/mean"}}, "there is no environment 'odd' in eval.envs"),
        ({"best": {"metric": "env/odd/reward/mean"}}, "there is no environment 'odd' in envs"),
        ({"best": {"metric": "m", "min_gain": 0.1}}, "min_gain has no effect: set patience"),
        ({"checkpoint": {"keep_best": 3}}, "keep_best has no effect: set keep_last"),
        ({"checkpoint": {"keep_last": 1, "keep_best": 2}}, "checkpoint.keep_best: has no effect, because no metric"),
        ({"best": {"metric": "eval/all/reward/mean", "patience": 3}}, "best.metric: there are no evaluations"),
    ],
)
def test_setting_without_effect_is_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(rlkit.ConfigError, match=message):
        load_config([], settings={"envs": {"words": {}}, **settings})
