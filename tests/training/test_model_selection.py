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
from rlkit.config import load_config
from rlkit.testing import Fault, World
from rlkit.training.model_selection import Criterion, ModelSelection
from rlkit.types import Checkpoint
from tests.simulation import Simulation, Word

HELD_OUT = {"env": f"{__file__}:HELD_OUT_TASKS", "tasks": 3, "temperature": 1.0}
HELD_OUT_TASKS = [Word(number) for number in range(100, 103)]
VALUES = st.lists(st.floats(-10, 10) | st.none(), min_size=1, max_size=12)


def told(aim: Criterion, values: list[float | None], **keep: int) -> ModelSelection:
    selection = ModelSelection(aim, **keep)
    for step, value in enumerate(values):
        selection.add(step, {} if value is None else {"m": value})
    return selection


def saved(step: int) -> Checkpoint:
    return Checkpoint(step, f"tinker://run/weights/{step}", f"tinker://run/sampler_weights/{step}")


@given(VALUES, st.booleans())
def test_the_best_is_the_first_of_the_best_values(values: list[float | None], lower: bool) -> None:
    known = [value for value in values if value is not None]
    best = told(Criterion("m", is_lower_better=lower), values).best
    if not known:
        assert best is None
    else:
        value = (min if lower else max)(known)
        assert best == (values.index(value), value)


@given(VALUES, st.integers(1, 4), st.floats(0, 3))
def test_patience_ends_a_run_once_so_many_values_in_a_row_gained_too_little(
    values: list[float | None], patience: int, min_gain: float
) -> None:
    known = [value for value in values if value is not None]
    best, since = -math.inf, 0
    for value in known:
        best, since = (value, 0) if value > best + min_gain else (best, since + 1)
    enough = told(Criterion("m", patience=patience, min_gain=min_gain), values).end_reason
    assert (enough is not None) == (since >= patience)


@given(VALUES, st.floats(-10, 10), st.booleans())
def test_a_goal_ends_a_run_once_it_is_reached(values: list[float | None], goal: float, lower: bool) -> None:
    reached = any(value is not None and (value <= goal if lower else value >= goal) for value in values)
    assert (told(Criterion("m", is_lower_better=lower, goal=goal), values).end_reason is not None) == reached


@given(VALUES, st.integers(1, 4), st.integers(0, 3), st.integers(0, 12))
def test_the_newest_and_the_best_are_kept_and_so_is_what_is_not_judged_yet(
    values: list[float | None], keep_last: int, keep_best: int, reported: int
) -> None:
    selection = told(Criterion("m"), values, keep_last=keep_last, keep_best=keep_best)
    checkpoints = [saved(step) for step in range(len(values))]
    gone = {one.step for one in selection.superfluous(checkpoints, last_step=reported)}
    judged = [one.step for one in checkpoints if one.step <= reported]
    ranked = sorted((-values[step], step) for step in judged if values[step] is not None)  # type: ignore[operator]  not None
    assert gone == set(judged) - set(judged[-keep_last:]) - {step for _, step in ranked[:keep_best]}


def test_values_that_are_no_numbers_are_no_values() -> None:
    assert told(Criterion("m"), [math.nan, math.inf, None]).best is None
    assert told(Criterion(), [1.0]).best is None


def runs(directory: Path, **settings: object) -> Simulation:
    base = {"steps": 8, "eval": {"every": 2, "envs": {"held_out": HELD_OUT}}, "checkpoint": {"every": 3}}
    return Simulation(directory, World(), settings=base | settings)


def values(run: Simulation, name: str = "eval/all/reward/mean") -> dict[int, float]:
    return {int(line["step"]): line[name] for line in run.lines() if name in line}


def test_steps_that_are_evaluated_are_saved_and_the_best_of_them_is_known(tmp_path: Path) -> None:
    run = runs(tmp_path / "run")
    result = run.train()
    assert run.ears.saved == [2, 3, 4, 6, 8]
    judged = {step: value for step, value in values(run).items() if step}
    assert result.best_checkpoint is not None
    assert judged[result.best_checkpoint.step] == max(judged.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_checkpoints_that_are_neither_new_nor_good_are_deleted_on_the_service(mode: str, tmp_path: Path) -> None:
    run = runs(tmp_path / "run", checkpoint={"every": 1, "keep_last": 2, "keep_best": 1}, schedule={"mode": mode})
    result = run.train()
    assert result.best_checkpoint is not None
    kept = {result.best_checkpoint.step, 7, 8}
    left = {int(path.rsplit("-", 1)[1]) for path in run.world.checkpoints}
    assert left == kept
    lines = [json.loads(line) for line in (run.directory / "checkpoints.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "deleted" in line]) == 8 - len(kept)
    run.settings = {**run.settings, "steps": 9}
    assert run.train(resume=True).steps == 9
    assert not any("cannot be used" in note for note in run.ears.notes)


def test_a_checkpoint_that_cannot_be_deleted_is_told_and_harms_nothing(tmp_path: Path) -> None:
    run = runs(tmp_path / "run", checkpoint={"every": 1, "keep_last": 1}, service={"timeout_s": 20.0})
    run.world.faults = [Fault("500", call="delete")]
    assert run.train().status == "completed"
    assert any("could not be deleted" in note for note in run.ears.notes)


def test_a_goal_ends_training_and_a_run_that_goes_on_stays_ended(tmp_path: Path) -> None:
    plain = runs(tmp_path / "plain")
    plain.train()
    by_step = sorted(values(plain).items())
    goal = max(value for step, value in by_step if 0 < step < 8)
    first = next(step for step, value in by_step if value >= goal)
    run = runs(tmp_path / "run", best={"goal": goal})
    result = run.train()
    assert result.status == "completed"
    assert result.reason == f"eval/all/reward/mean has reached {goal:g} at step {first}"
    assert first <= result.steps < 8 or first == 0
    again = run.train(resume=True)
    assert (again.steps, again.reason) == (result.steps, result.reason)


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
def test_patience_ends_training(mode: str, tmp_path: Path) -> None:
    best = {"metric": "env/all/reward/mean", "patience": 3}
    run = runs(tmp_path / "run", steps=60, best=best, schedule={"mode": mode}, eval={"envs": {}})
    result = run.train()
    assert result.status == "completed"
    assert result.steps < 60
    seen = [value for _, value in sorted(values(run, "env/all/reward/mean").items())]
    stale = [value <= max(seen[:place]) for place, value in enumerate(seen) if place]
    assert any(len(list(group)) >= 3 for bad, group in itertools.groupby(stale) if bad)
    assert result.checkpoint is not None
    assert result.checkpoint.step == result.steps


def test_a_metric_that_is_never_reported_is_told(tmp_path: Path) -> None:
    run = runs(tmp_path / "run", best={"metric": "service/nonsense"})
    run.train()
    assert "best.metric: no step has the metric service/nonsense" in run.ears.notes


@pytest.mark.parametrize(
    ("settings", "said"),
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
def test_a_setting_without_effect_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(rlkit.ConfigError, match=said):
        load_config([], settings={"envs": {"words": {}}, **settings})
