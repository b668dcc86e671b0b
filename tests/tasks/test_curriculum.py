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
from rlkit.config import load_config
from rlkit.config.schema.envs import CurriculumConfig
from rlkit.env import TaskSource
from rlkit.errors import ConfigError, EnvironmentFault, UsageError
from rlkit.tasks.curriculum import SolveRates
from rlkit.tasks.from_config import task_source
from rlkit.tasks.sources import Mixture, SequenceSource, as_source
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group
from tests.builders import episode
from tests.simulation import Simulation, Word

FILTER = {"name": "filter", "min_groups": 1, "newest_weight": 1.0}
TARGET = {"name": "target", "newest_weight": 1.0}
BOTH = pytest.mark.parametrize("settings", [FILTER, TARGET], ids=["filter", "target"])


def source(settings: dict[str, object] | None, *, count: int = 4, seed: int = 0) -> TaskSource:
    section = None if settings is None else TypeAdapter[CurriculumConfig](CurriculumConfig).validate_python(settings)
    return task_source([Word(number) for number in range(count)], section, field="envs.words.curriculum", seed=seed)


def drawn(tasks: TaskSource, count: int) -> list[int]:
    """Numbers of the next tasks."""
    found = [tasks.next() for _ in range(count)]
    assert all(isinstance(env, Word) for env in found)
    return [int(env.task_id.removeprefix("task-")) for env in found]  # type: ignore[union-attr]  as just checked


def played(number: int, rewards: Sequence[float | None]) -> Group:
    return Group("words", f"task-{number}", 0, tuple(episode(r, member=i) for i, r in enumerate(rewards)))


def told(tasks: TaskSource, rates: Sequence[float]) -> None:
    """Tell of a group of ten for each task, with these shares of solved ones."""
    for number, rate in enumerate(rates):
        tasks.observe(played(number, [float(member < round(10 * rate)) for member in range(10)]))


groups = st.lists(st.none() | st.floats(-1, 2), min_size=1, max_size=4)
histories = st.lists(st.integers(1, 6) | st.tuples(st.integers(0, 3), groups), max_size=30)
"""What happens to a source of four tasks: so many draws, or the rewards of a group of a task."""


def lived(tasks: TaskSource, history: Sequence[int | tuple[int, Sequence[float | None]]]) -> list[int]:
    found = list[int]()
    for event in history:
        if isinstance(event, int):
            found += drawn(tasks, event)
        else:
            tasks.observe(played(*event))
    return found


@BOTH
@given(history=histories, seed=st.integers(0, 2**31 - 1))
def test_the_same_seed_and_observations_give_the_same_draws(
    settings: dict[str, object], history: list[int | tuple[int, list[float | None]]], seed: int
) -> None:
    first, second = (lived(source(settings, seed=seed), [*history, 20]) for _ in range(2))
    assert first == second


@BOTH
@given(before=histories, after=histories)
def test_a_restored_curriculum_goes_on_where_it_was(
    settings: dict[str, object],
    before: list[int | tuple[int, list[float | None]]],
    after: list[int | tuple[int, list[float | None]]],
) -> None:
    first, second = source(settings), source(settings)
    lived(first, before)
    told(second, [0.1, 0.2, 0.3, 0.4])  # what it knew before is forgotten
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert lived(first, [*after, 20]) == lived(second, [*after, 20])
    assert first.state_dict() == second.state_dict()


@given(st.lists(groups, max_size=10))
def test_a_solve_rate_is_a_moving_mean_of_the_shares_of_solved_episodes(seen: list[list[float | None]]) -> None:
    found = SolveRates(["task-0"], solved_reward=1.0, newest_weight=0.25)
    for rewards in seen:
        found.observe(played(0, rewards))
    valid = [[reward for reward in rewards if reward is not None] for rewards in seen]
    shares = [sum(reward >= 1 - 1e-9 for reward in rewards) / len(rewards) for rewards in valid if rewards]
    expected = 0.0
    for number, share in enumerate(shares):
        expected = share if number == 0 else 0.75 * expected + 0.25 * share
    assert found.rates[0] == pytest.approx(expected, abs=1e-12)
    assert found.groups[0] == len(shares)


def test_rewards_that_sum_to_full_marks_but_for_rounding_are_solved() -> None:
    found = SolveRates(["task-0"], solved_reward=1.0, newest_weight=0.5)
    found.observe(played(0, [sum([0.1] * 10)]))
    assert found.rates[0] == 1


@given(st.integers(2, 20), st.integers(0, 1000))
def test_a_filter_that_knows_nothing_draws_as_if_there_were_none(count: int, seed: int) -> None:
    assert drawn(source(FILTER, count=count, seed=seed), 50) == drawn(source(None, count=count, seed=seed), 50)


def test_a_filter_plays_only_what_is_neither_too_hard_nor_too_easy_and_rechecks_the_rest() -> None:
    tasks = source({**FILTER, "min_solve_rate": 0.2, "max_solve_rate": 0.8, "recheck_epochs": 10}, count=6)
    told(tasks, [0.0, 0.1, 0.2, 0.5, 0.8, 1.0])
    counts = Counter(drawn(tasks, 3 * 50 + 3 * 5))  # fifty epochs, in which each of the others has five turns
    assert counts == {0: 5, 1: 5, 2: 50, 3: 50, 4: 50, 5: 5}


def test_a_task_is_left_out_only_after_enough_groups() -> None:
    tasks = source({**FILTER, "min_groups": 2, "recheck_epochs": 100}, count=2)
    drawn(tasks, 2)  # the epoch in which task 0 has its turn is over
    tasks.observe(played(0, [0.0]))
    assert set(drawn(tasks, 8)) == {0, 1}
    tasks.observe(played(0, [None, None]))  # which says nothing about the task
    assert set(drawn(tasks, 8)) == {0, 1}
    tasks.observe(played(0, [0.0]))
    assert set(drawn(tasks, 8)) == {1}


def test_a_task_that_was_left_out_comes_back_when_it_is_solved_at_times() -> None:
    tasks = source({**FILTER, "recheck_epochs": 100}, count=2)
    told(tasks, [0.0, 0.5])
    drawn(tasks, 3)
    assert set(drawn(tasks, 20)) == {1}
    told(tasks, [0.5, 0.5])
    assert Counter(drawn(tasks, 21)).keys() == {0, 1}


@given(st.integers(2, 30), st.integers(2, 50), st.sampled_from([0.0, 1.0]))
def test_where_every_task_is_left_out_each_has_its_turn(count: int, recheck: int, rate: float) -> None:
    tasks = source({**FILTER, "recheck_epochs": recheck}, count=count)
    told(tasks, [rate] * count)
    assert Counter(drawn(tasks, 3 * count)) == dict.fromkeys(range(count), 3)


@pytest.mark.parametrize(("target", "sharpness"), [(0.5, 2.0), (0.3, 1.0), (0.7, 8.0)])
def test_a_target_draws_in_the_wanted_proportions(target: float, sharpness: float) -> None:
    tasks = source({**TARGET, "target": target, "sharpness": sharpness, "explore_share": 0.2}, count=8)
    found = np.array([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])  # of the last task no group was seen
    told(tasks, found)
    with np.errstate(divide="ignore"):
        divergence = target * np.log(target / found) + (1 - target) * np.log((1 - target) / (1 - found))
    weights = np.append(np.exp(-sharpness * divergence), 1.0)
    wanted = 0.8 * weights / weights.sum() + 0.2 / 8
    total = 10_000
    counts = np.bincount(drawn(tasks, total), minlength=8)
    assert (np.abs(counts - total * wanted) < 4 * np.sqrt(total * wanted * (1 - wanted))).all()


def test_the_default_target_weighs_by_learnability() -> None:
    tasks = source({**TARGET, "explore_share": 1e-9}, count=5)
    told(tasks, shares := [0.1, 0.3, 0.5, 0.8, 1.0])
    weights = np.array([4 * p * (1 - p) for p in shares])
    assert tasks.probabilities() == pytest.approx(weights / weights.sum(), abs=1e-8)  # type: ignore[attr-defined]


@given(st.floats(0.01, 0.99), st.floats(0.1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_weight_falls_on_both_sides_of_the_target(target: float, sharpness: float, one: float, two: float) -> None:
    tasks = source({**TARGET, "target": target, "sharpness": sharpness}, count=2)
    tasks._rates.groups[:], tasks._rates.rates[:] = 1, (one, two)  # type: ignore[attr-defined]
    first, second = tasks.probabilities()  # type: ignore[attr-defined]
    assert first + second == pytest.approx(1)
    assert min(first, second) >= 0.05 - 1e-9  # a half of what explores
    if target <= one <= two or two <= one <= target:
        assert first >= second - 1e-9


def test_where_every_weight_is_nothing_all_tasks_are_drawn_alike() -> None:
    tasks = source(TARGET, count=4)
    told(tasks, [0.0, 1.0, 0.0, 1.0])
    assert tasks.probabilities().tolist() == [0.25] * 4  # type: ignore[attr-defined]


@BOTH
def test_a_group_of_another_task_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(EnvironmentFault, match="'task-9' is not a task of the curriculum"):
        Mixture({"words": source(settings)}, weights={"words": 1}, seed=0).observe(played(9, [0.0]))


@BOTH
def test_the_state_of_another_source_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="the state has no "):
        source(settings).load_state_dict(as_source([Word(0)], seed=0).state_dict())
    larger = source(settings, count=5)
    told(larger, [0.5] * 5)
    with pytest.raises(UsageError, match="the task 'task-4' no longer exists"):
        source(settings).load_state_dict(larger.state_dict())


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
    ("tasks", "said"),
    [
        (Own(), "has no effect: a Own is a task source"),
        ([Word(0)], "needs at least two tasks to choose from, not 1"),
        ([Word(0), Nameless()], "task 1 has no task_id"),
        ([Word(0), Word(1), Word(0)], "tasks 0 and 2 have the same task_id, 'task-0'"),
    ],
)
def test_tasks_that_a_curriculum_has_no_use_for_are_refused(tasks: object, said: str) -> None:
    config = load_config([], settings={"model": "m", "envs": {"words": {"curriculum": {"name": "filter"}}}})
    with pytest.raises(UsageError, match=rf"^envs\.words\.curriculum: .*{said}"):
        RLTrainer(config, envs={"words": tasks})  # type: ignore[dict-item]  which is what is tested


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "filter", "min_solve_rate": 0.0, "max_solve_rate": 1.0}, "no task would be skipped"),
        ({"name": "filter", "min_solve_rate": 0.6, "max_solve_rate": 0.4}, "0.6 is above max_solve_rate, 0.4"),
        ({"name": "filter", "target": 0.5}, "target"),
        ({"name": "filter", "recheck_epochs": 1}, "recheck_epochs"),
        ({"name": "target", "explore_share": 0.0}, "explore_share"),
        ({"name": "easy"}, "curriculum"),
    ],
)
def test_settings_without_effect_are_refused(section: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([], settings={"envs": {"arithmetic": {"curriculum": section}}})


def test_a_curriculum_can_be_set_and_taken_back_on_the_command_line() -> None:
    given = ["envs.arithmetic.curriculum.name=target", "envs.arithmetic.curriculum.target=0.3"]
    chosen = load_config([], given).config.envs["arithmetic"].curriculum
    assert chosen is not None
    assert (chosen.name, getattr(chosen, "target", None)) == ("target", 0.3)
    assert load_config([], [*given, "envs.arithmetic.curriculum=null"]).config.envs["arithmetic"].curriculum is None


STRICT = {"mode": "async", "max_staleness": 2, "staleness": "strict"}


@pytest.mark.parametrize("schedule", [{}, STRICT], ids=["sync", "async"])
@pytest.mark.parametrize(
    "curriculum",
    [{"name": "filter", "min_groups": 1, "recheck_epochs": 3}, {"name": "target", "explore_share": 0.05}],
    ids=["filter", "target"],
)
def test_a_killed_run_goes_on_with_the_draws_that_it_would_have_had(
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
        found = pd.read_parquet(run.directory / "episodes").query("final").sort_values(["step", "position", "member"])
        return list(zip(found["task"], found["draw"], found["reward"], strict=True))

    whole = simulation("whole")
    whole.train()
    plain = Simulation(tmp_path / "plain", settings={**settings, "envs": {"words": {}}}, tasks=whole.tasks)
    plain.train()
    assert [task for task, *_ in trained(plain)] != [task for task, *_ in trained(whole)]
    for share in (0.2, 0.5, 0.8):
        killed = simulation(f"killed-{share}")
        killed.train_until(share * whole.virtual_s)
        killed.train(resume=True)
        assert trained(killed) == trained(whole)
        assert killed.weights() == whole.weights()


def test_a_filter_says_how_many_tasks_it_leaves_out() -> None:
    tasks = source(FILTER | {"min_solve_rate": 0.2, "max_solve_rate": 0.8}, count=4)
    assert tasks.metrics() == {"seen": 0.0, "too_hard": 0.0, "too_easy": 0.0}  # type: ignore[attr-defined]  curricula have it
    told(tasks, [0.0, 0.5, 1.0])
    assert tasks.metrics() == {  # type: ignore[attr-defined]  as above
        "seen": 0.75,
        "solve_rate": pytest.approx(0.5),
        "too_hard": 0.25,
        "too_easy": 0.25,
    }


def test_a_target_says_how_many_tasks_its_draws_go_to() -> None:
    tasks = source(TARGET, count=4)
    assert tasks.metrics() == {"seen": 0.0, "effective": pytest.approx(4.0)}  # type: ignore[attr-defined]  as above
    told(tasks, [0.0, 0.5, 1.0, 0.0])
    shares = np.array([0.025, 0.925, 0.025, 0.025])
    assert tasks.metrics()["effective"] == pytest.approx(1 / np.square(shares).sum())  # type: ignore[attr-defined]  as above


@BOTH
def test_each_step_of_a_run_says_how_far_the_curriculum_is(settings: dict[str, object], tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", settings={"envs": {"words": {"curriculum": settings}}, "steps": 4})
    run.train()
    seen = [line["env/words/tasks/seen"] for line in run.lines() if line["step"]]
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] <= 8 / 40
    assert all(0 <= line["env/words/tasks/solve_rate"] <= 1 for line in run.lines() if line["step"])


def test_a_source_of_ones_own_may_say_something_too(tmp_path: Path) -> None:
    class Own(SequenceSource):
        said: object = {"held": 3}

        def metrics(self) -> object:
            return self.said

    own = Own([Word(number) for number in range(9)], seed=0)
    run = Simulation(tmp_path / "run", tasks=own)  # type: ignore[arg-type]  a source is as good as a list
    run.train()
    assert [line["env/words/tasks/held"] for line in run.lines() if line["step"]] == [3.0] * 3
    own.said = {"held": "many"}
    with pytest.raises(EnvironmentFault, match="the task source of words failed: ValueError"):
        Simulation(tmp_path / "broken", tasks=own).train()  # type: ignore[arg-type]  as above


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_is_taken_again_for_its_numbers_has_those_of_its_tasks_too(tmp_path: Path, mode: str) -> None:
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
    before, after = json.loads(lines[-1]), run.lines()[-1]
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
