from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.config.schema.envs import CurriculumConfig, TargetCurriculum
from rlkit.env import TaskSource
from rlkit.errors import ConfigError, EnvironmentFault, UsageError
from rlkit.tasks.curriculum import TargetSource
from rlkit.tasks.from_config import task_source
from rlkit.tasks.sources import Mixture, SequenceSource
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group
from tests.builders import episode
from tests.marks import split_slow
from tests.simulation import Simulation, Word

FILTER = {"name": "filter", "min_groups": 1, "newest_weight": 1.0}
TARGET = {"name": "target", "newest_weight": 1.0}
BOTH = pytest.mark.parametrize("settings", [FILTER, TARGET], ids=["filter", "target"])


def make_source(settings: dict[str, object] | None, *, count: int = 4, seed: int = 0) -> TaskSource:
    section = None if settings is None else TypeAdapter[CurriculumConfig](CurriculumConfig).validate_python(settings)
    return task_source([Word(number) for number in range(count)], section, field="envs.words.curriculum", seed=seed)


def draw_numbers(tasks: TaskSource, count: int) -> list[int]:
    """Numbers of the next tasks."""
    envs = [tasks.next() for _ in range(count)]
    assert all(isinstance(env, Word) for env in envs)
    return [int(env.task_id.removeprefix("task-")) for env in envs]  # type: ignore[union-attr]  as just checked


def make_group(number: int, rewards: Sequence[float | None]) -> Group:
    return Group("words", f"task-{number}", 0, tuple(episode(r, member=i) for i, r in enumerate(rewards)))


def observe_solve_rates(tasks: TaskSource, rates: Sequence[float]) -> None:
    """Tell of a group of ten for each task, with these shares of solved ones."""
    for number, rate in enumerate(rates):
        tasks.observe(make_group(number, [float(member < round(10 * rate)) for member in range(10)]))


groups = st.lists(st.none() | st.floats(-1, 2), min_size=1, max_size=4)
histories = st.lists(st.integers(1, 6) | st.tuples(st.integers(0, 3), groups), max_size=30)
"""What happens to a source of four tasks: so many draws, or the rewards of a group of a task."""


def replay_history(tasks: TaskSource, history: Sequence[int | tuple[int, Sequence[float | None]]]) -> list[int]:
    draws = list[int]()
    for event in history:
        if isinstance(event, int):
            draws += draw_numbers(tasks, event)
        else:
            tasks.observe(make_group(*event))
    return draws


@BOTH
@given(history=histories, seed=st.integers(0, 2**31 - 1))
def test_the_same_seed_and_observations_give_the_same_draws(
    settings: dict[str, object], history: list[int | tuple[int, list[float | None]]], seed: int
) -> None:
    first, second = (replay_history(make_source(settings, seed=seed), [*history, 20]) for _ in range(2))
    assert first == second


@BOTH
@given(before=histories, after=histories)
def test_restored_curriculum_continues_with_the_same_draws(
    settings: dict[str, object],
    before: list[int | tuple[int, list[float | None]]],
    after: list[int | tuple[int, list[float | None]]],
) -> None:
    first, second = make_source(settings), make_source(settings)
    replay_history(first, before)
    observe_solve_rates(second, [0.1, 0.2, 0.3, 0.4])  # what it knew before is forgotten
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert replay_history(first, [*after, 20]) == replay_history(second, [*after, 20])
    assert first.state_dict() == second.state_dict()


@given(st.lists(groups, max_size=10))
def test_a_solve_rate_is_a_moving_mean_of_the_shares_of_solved_episodes(
    group_rewards: list[list[float | None]],
) -> None:
    tasks = TargetSource([Word(0)], TargetCurriculum(name="target", newest_weight=0.25), seed=0)
    for rewards in group_rewards:
        tasks.observe(make_group(0, rewards))
    valid = [[reward for reward in rewards if reward is not None] for rewards in group_rewards]
    shares = [sum(reward >= 1 - 1e-9 for reward in rewards) / len(rewards) for rewards in valid if rewards]
    expected = 0.0
    for number, share in enumerate(shares):
        expected = share if number == 0 else 0.75 * expected + 0.25 * share
    assert tasks.rates[0] == pytest.approx(expected, abs=1e-12)
    assert tasks.groups[0] == len(shares)


def test_rewards_that_sum_to_one_up_to_rounding_are_solved() -> None:
    tasks = TargetSource([Word(0)], TargetCurriculum(name="target"), seed=0)
    tasks.observe(make_group(0, [sum([0.1] * 10)]))
    assert tasks.rates[0] == 1


@given(st.integers(2, 20), st.integers(0, 1000))
def test_filter_without_observations_draws_like_no_filter(count: int, seed: int) -> None:
    assert draw_numbers(make_source(FILTER, count=count, seed=seed), 50) == draw_numbers(
        make_source(None, count=count, seed=seed), 50
    )


def test_filter_plays_tasks_of_medium_difficulty_and_rechecks_the_others() -> None:
    tasks = make_source({**FILTER, "min_solve_rate": 0.2, "max_solve_rate": 0.8, "recheck_epochs": 10}, count=6)
    observe_solve_rates(tasks, [0.0, 0.1, 0.2, 0.5, 0.8, 1.0])
    counts = Counter(draw_numbers(tasks, 3 * 50 + 3 * 5))  # fifty epochs, in which each of the others has five turns
    assert counts == {0: 5, 1: 5, 2: 50, 3: 50, 4: 50, 5: 5}


def test_task_is_filtered_only_after_min_groups() -> None:
    tasks = make_source({**FILTER, "min_groups": 2, "recheck_epochs": 100}, count=2)
    draw_numbers(tasks, 2)  # the epoch in which task 0 has its turn is over
    tasks.observe(make_group(0, [0.0]))
    assert set(draw_numbers(tasks, 8)) == {0, 1}
    tasks.observe(make_group(0, [None, None]))  # which says nothing about the task
    assert set(draw_numbers(tasks, 8)) == {0, 1}
    tasks.observe(make_group(0, [0.0]))
    assert set(draw_numbers(tasks, 8)) == {1}


def test_filtered_task_returns_once_it_is_solved_sometimes() -> None:
    tasks = make_source({**FILTER, "recheck_epochs": 100}, count=2)
    observe_solve_rates(tasks, [0.0, 0.5])
    draw_numbers(tasks, 3)
    assert set(draw_numbers(tasks, 20)) == {1}
    observe_solve_rates(tasks, [0.5, 0.5])
    assert Counter(draw_numbers(tasks, 21)).keys() == {0, 1}


@given(st.integers(2, 30), st.integers(2, 50), st.sampled_from([0.0, 1.0]))
def test_all_tasks_are_drawn_in_turn_if_all_are_filtered(count: int, recheck: int, rate: float) -> None:
    tasks = make_source({**FILTER, "recheck_epochs": recheck}, count=count)
    observe_solve_rates(tasks, [rate] * count)
    assert Counter(draw_numbers(tasks, 3 * count)) == dict.fromkeys(range(count), 3)


@pytest.mark.parametrize(("target", "sharpness"), [(0.5, 2.0), (0.3, 1.0), (0.7, 8.0)])
def test_target_draws_in_proportion_to_its_weights(target: float, sharpness: float) -> None:
    tasks = make_source({**TARGET, "target": target, "sharpness": sharpness, "explore_share": 0.2}, count=8)
    solve_rates = np.array([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])  # of the last task no group was seen
    observe_solve_rates(tasks, solve_rates)
    with np.errstate(divide="ignore"):
        divergence = target * np.log(target / solve_rates) + (1 - target) * np.log((1 - target) / (1 - solve_rates))
    weights = np.append(np.exp(-sharpness * divergence), 1.0)
    expected = 0.8 * weights / weights.sum() + 0.2 / 8
    total = 10_000
    counts = np.bincount(draw_numbers(tasks, total), minlength=8)
    assert (np.abs(counts - total * expected) < 4 * np.sqrt(total * expected * (1 - expected))).all()


def test_the_default_target_weighs_by_learnability() -> None:
    tasks = make_source({**TARGET, "explore_share": 1e-9}, count=5)
    observe_solve_rates(tasks, shares := [0.1, 0.3, 0.5, 0.8, 1.0])
    weights = np.array([4 * p * (1 - p) for p in shares])
    assert tasks.probabilities() == pytest.approx(weights / weights.sum(), abs=1e-8)  # type: ignore[attr-defined]


@given(st.floats(0.01, 0.99), st.floats(0.1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_weight_falls_on_both_sides_of_the_target(
    target: float, sharpness: float, first_rate: float, second_rate: float
) -> None:
    tasks = make_source({**TARGET, "target": target, "sharpness": sharpness}, count=2)
    tasks.groups[:], tasks.rates[:] = 1, (first_rate, second_rate)  # type: ignore[attr-defined]
    first_weight, second_weight = tasks.probabilities()  # type: ignore[attr-defined]
    assert first_weight + second_weight == pytest.approx(1)
    assert min(first_weight, second_weight) >= 0.05 - 1e-9  # a half of what explores
    if target <= first_rate <= second_rate or second_rate <= first_rate <= target:
        assert first_weight >= second_weight - 1e-9


def test_zero_weights_draw_all_tasks_equally() -> None:
    tasks = make_source(TARGET, count=4)
    observe_solve_rates(tasks, [0.0, 1.0, 0.0, 1.0])
    assert tasks.probabilities().tolist() == [0.25] * 4  # type: ignore[attr-defined]


@BOTH
def test_group_of_an_unknown_task_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFault, match="'task-9' is not a task of the curriculum"):
        Mixture({"words": make_source(settings)}, weights={"words": 1}, seed=0).observe(make_group(9, [0.0]))


@BOTH
def test_state_of_another_source_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="the state has no "):
        make_source(settings).load_state_dict(SequenceSource([Word(0)], seed=0).state_dict())
    larger = make_source(settings, count=5)
    observe_solve_rates(larger, [0.5] * 5)
    with pytest.raises(UsageError, match="the task 'task-4' no longer exists"):
        make_source(settings).load_state_dict(larger.state_dict())


class Nameless(Word):
    def __init__(self) -> None:
        pass


class Own(rlkit.TaskSource):
    """A task source."""

    def next(self) -> Word:
        return Word(0)

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (Own(), "has no effect: a Own is a task source"),
        ([Word(0)], "needs at least two tasks to choose from, not 1"),
        ([Word(0), Nameless()], "task 1 has no task_id"),
        ([Word(0), Word(1), Word(0)], "tasks 0 and 2 have the same task_id, 'task-0'"),
    ],
)
def test_tasks_that_a_curriculum_cannot_use_are_an_error(tasks: object, message: str) -> None:
    config = load_config([], settings={"model": "m", "envs": {"words": {"curriculum": {"name": "filter"}}}})
    with pytest.raises(UsageError, match=rf"^envs\.words\.curriculum: .*{message}"):
        RLTrainer(config, envs={"words": tasks})  # type: ignore[dict-item]  which is what is tested


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "filter", "min_solve_rate": 0.0, "max_solve_rate": 1.0}, "no task would be skipped"),
        ({"name": "filter", "min_solve_rate": 0.6, "max_solve_rate": 0.4}, "0.6 is above max_solve_rate, 0.4"),
        ({"name": "filter", "target": 0.5}, "target"),
        ({"name": "filter", "recheck_epochs": 1}, "recheck_epochs"),
        ({"name": "target", "explore_share": 0.0}, "explore_share"),
        ({"name": "easy"}, "curriculum"),
    ],
)
def test_settings_without_effect_are_errors(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], settings={"envs": {"arithmetic": {"curriculum": section}}})


def test_curriculum_can_be_set_and_removed_on_the_command_line() -> None:
    overrides = ["envs.arithmetic.curriculum.name=target", "envs.arithmetic.curriculum.target=0.3"]
    curriculum = load_config([], overrides).config.envs["arithmetic"].curriculum
    assert curriculum is not None
    assert (curriculum.name, getattr(curriculum, "target", None)) == ("target", 0.3)
    assert load_config([], [*overrides, "envs.arithmetic.curriculum=null"]).config.envs["arithmetic"].curriculum is None


STRICT = {"mode": "async", "max_staleness": 2, "staleness": "strict"}


@pytest.mark.parametrize("schedule", split_slow([{}, STRICT], bool), ids=["sync", "async"])
@pytest.mark.parametrize(
    "curriculum",
    [{"name": "filter", "min_groups": 1, "recheck_epochs": 3}, {"name": "target", "explore_share": 0.05}],
    ids=["filter", "target"],
)
def test_resumed_run_has_the_draws_of_an_uninterrupted_run(
    curriculum: dict[str, object], schedule: dict[str, object], tmp_path: Path
) -> None:
    # few tasks, of which some are solved: a reward of 1 is an e in the reply
    settings = {
        "envs": {"words": {"curriculum": curriculum}},
        "steps": 12,
        "sampling": {"max_tokens": 40},
        "schedule": schedule,
    }

    def simulation(name: str) -> Simulation:
        return Simulation(tmp_path / name, settings=settings, tasks=[Word(number) for number in range(6)])

    def trained(run: Simulation) -> list[tuple[str, int, float]]:
        episodes = (
            pd.read_parquet(run.directory / "episodes").query("final").sort_values(["step", "position", "member"])
        )
        return list(zip(episodes["task"], episodes["draw"], episodes["reward"], strict=True))

    uninterrupted = simulation("whole")
    uninterrupted.train()
    without_curriculum = Simulation(
        tmp_path / "plain", settings={**settings, "envs": {"words": {}}}, tasks=uninterrupted.tasks
    )
    without_curriculum.train()
    assert [task for task, *_ in trained(without_curriculum)] != [task for task, *_ in trained(uninterrupted)]
    for share in (0.2, 0.5, 0.8):
        killed = simulation(f"killed-{share}")
        killed.train_until(share * uninterrupted.virtual_s)
        killed.train(resume=True)
        assert trained(killed) == trained(uninterrupted)
        assert killed.weights() == uninterrupted.weights()


def test_filter_reports_the_share_of_filtered_tasks() -> None:
    tasks = make_source(FILTER | {"min_solve_rate": 0.2, "max_solve_rate": 0.8}, count=4)
    assert tasks.metrics() == {"seen": 0.0, "too_hard": 0.0, "too_easy": 0.0}  # type: ignore[attr-defined]  curricula have it
    observe_solve_rates(tasks, [0.0, 0.5, 1.0])
    assert tasks.metrics() == {  # type: ignore[attr-defined]  as above
        "seen": 0.75,
        "solve_rate": pytest.approx(0.5),
        "too_hard": 0.25,
        "too_easy": 0.25,
    }


def test_target_reports_its_effective_number_of_tasks() -> None:
    tasks = make_source(TARGET, count=4)
    assert tasks.metrics() == {"seen": 0.0, "effective": pytest.approx(4.0)}  # type: ignore[attr-defined]  as above
    observe_solve_rates(tasks, [0.0, 0.5, 1.0, 0.0])
    shares = np.array([0.025, 0.925, 0.025, 0.025])
    assert tasks.metrics()["effective"] == pytest.approx(1 / np.square(shares).sum())  # type: ignore[attr-defined]  as above


@BOTH
def test_each_step_reports_the_progress_of_the_curriculum(settings: dict[str, object], tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", settings={"envs": {"words": {"curriculum": settings}}, "steps": 4})
    run.train()
    seen_shares = [line["env/words/tasks/seen"] for line in run.lines() if line["step"]]
    assert seen_shares == sorted(seen_shares)
    assert 0 < seen_shares[0] < seen_shares[-1] <= 8 / 40
    assert all(0 <= line["env/words/tasks/solve_rate"] <= 1 for line in run.lines() if line["step"])


def test_custom_source_can_report_metrics(tmp_path: Path) -> None:
    class Own(SequenceSource):
        reported: object = {"held": 3}

        def metrics(self) -> object:
            return self.reported

    source = Own([Word(number) for number in range(9)], seed=0)
    run = Simulation(tmp_path / "run", tasks=source)  # type: ignore[arg-type]  a source is as good as a list
    run.train()
    assert [line["env/words/tasks/held"] for line in run.lines() if line["step"]] == [3.0] * 3
    source.reported = {"held": "many"}
    with pytest.raises(EnvironmentFault, match="the task source of words failed: ValueError"):
        Simulation(tmp_path / "broken", tasks=source).train()  # type: ignore[arg-type]  as above


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_replayed_step_has_the_same_task_metrics(tmp_path: Path, mode: str) -> None:
    settings = {
        "envs": {"words": {"curriculum": {"name": "target"}}},
        "schedule": {"mode": mode},
    }
    run = Simulation(tmp_path / "run", settings=settings)
    run.train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))  # as if killed before the last was written
    run.train(resume=True)
    names = {name for name in json.loads(lines[-1]) if name.startswith("env/words/tasks/")}
    assert names
    expected, rewritten = json.loads(lines[-1]), run.lines()[-1]
    assert {name: rewritten[name] for name in names} == {name: expected[name] for name in names}
