from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.config.loading.objects import list_envs
from rlkit.env import Env, Task
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Policy
from rlkit.tasks.sources import Mixture, SequenceSource
from tests.builders import draw
from tests.simulation import Word


def make_source(count: int, *, seed: int = 0) -> SequenceSource:
    return SequenceSource(list(range(count)), seed=seed)  # type: ignore[arg-type]  any object stands for a task


class Played:
    async def rollout(self, policy):
        return 1.0


class Dry(rlkit.TaskSource):
    """A source that gives three tasks and then no more."""

    def __init__(self) -> None:
        self.remaining = 3

    def next(self):
        self.remaining -= 1
        return self.remaining if self.remaining >= 0 else None

    def observe(self, group) -> None: ...

    def state_dict(self):
        return {"left": self.remaining}

    def load_state_dict(self, state) -> None:
        self.remaining = state["left"]


@given(st.integers(1, 20), st.integers(0, 1000))
def test_each_epoch_plays_every_task_once(count: int, seed: int) -> None:
    tasks = make_source(count, seed=seed)
    for _ in range(3):
        assert sorted(tasks.next() for _ in range(count)) == list(range(count))


@given(st.integers(1, 20), st.integers(0, 50))
def test_restored_source_continues_with_the_same_draws(count: int, draw_count: int) -> None:
    first, second = make_source(count), make_source(count)
    for _ in range(draw_count):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.next() for _ in range(30)] == [second.next() for _ in range(30)]


def test_empty_collection_is_an_error() -> None:
    with pytest.raises(UsageError, match="no tasks"):
        make_source(0)


def test_single_task_is_a_collection_of_one() -> None:
    assert list_envs(task := Played()) == [task]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([5], "envs is a collection whose item 0 is a value of type int: each must be an Env"),
        ([Played(), Played], "envs is a collection whose item 1 is the class Played itself"),
        ("arithmetic", "envs is a value of type str: it must be an Env, a collection of Envs or a TaskSource"),
        (5, "envs is a value of type int"),
        (Dry(), "envs is a value of type Dry: it has no list of tasks; pass a collection of Envs"),
        ([], "envs is a collection without tasks"),
    ],
)
def test_invalid_tasks_are_an_error(tasks, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list_envs(tasks)


def test_error_of_a_source_names_it() -> None:
    class Broken(Dry):
        def next(self):
            raise OSError("disk")

    with pytest.raises(EnvironmentFault, match="the task source of a failed: OSError: disk"):
        draw(Mixture({"a": Broken()}, weights={"a": 1}, seed=0), 1)


def test_draws_of_a_mixture_match_its_weights_and_repeat_with_its_seed() -> None:
    weights, total = {"a": 1.0, "b": 3.0, "c": 0.5}, 10_000

    def draws(seed: int) -> list[tuple[str, object]]:
        mixture = Mixture({name: make_source(5 + len(name)) for name in weights}, weights=weights, seed=seed)
        return [(task.name, task.env) for task in draw(mixture, total)]

    first_draws = draws(4)
    assert first_draws == draws(4)
    assert first_draws != draws(5)
    counts = Counter(name for name, _ in first_draws)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        # 4 deviations of the binomial distribution: one seed in ten thousand would fail
        assert abs(counts[name] - total * share) < 4 * (total * share * (1 - share)) ** 0.5


def test_restored_mixture_continues_with_the_same_draws() -> None:
    def mixture() -> Mixture:
        return Mixture({"a": make_source(5), "b": Dry()}, weights={"a": 1, "b": 1}, seed=4)

    def describe(tasks: Sequence[Task]) -> list[tuple[int, str, Env, str]]:
        return [(task.draw, task.name, task.env, task.id) for task in tasks]

    first, second = mixture(), mixture()
    draw(first, 9)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert describe(draw(first, 20)) == describe(draw(second, 20))


def test_mixture_draws_fewer_tasks_only_if_all_sources_are_exhausted() -> None:
    mixture = Mixture({"a": Dry(), "b": Dry()}, weights={"a": 1, "b": 1}, seed=0)
    assert len(draw(mixture, 4)) == 4
    assert [task.draw for task in draw(mixture, 10)] == [4, 5]
    assert not draw(mixture, 1)


class Named:
    def __init__(self, name: object) -> None:
        self.name = name
        self.reads = 0

    @property
    def task_id(self) -> object:
        self.reads += 1
        if isinstance(self.name, BaseException):
            raise self.name
        return self.name

    async def rollout(self, policy: Policy) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("name", "known_as"), [("sum", "sum"), (3, "3"), ("b\udcff", "b\\udcff"), (ValueError(), "7"), (SystemExit(), "7")]
)
def test_task_id_is_read_once_and_made_recordable(name: object, known_as: str) -> None:
    env = Named(name)
    task = Task(7, "e", env)
    assert [task.id, task.id] == [known_as, known_as]
    assert env.reads == 1


def test_weights_may_be_as_large_as_floats() -> None:
    sources = {name: SequenceSource([Word(0)], seed=0) for name in ("a", "b")}
    draws = draw(Mixture(sources, weights={"a": 1e308, "b": 1e308}, seed=0), 50)
    assert {task.name for task in draws} == {"a", "b"}
