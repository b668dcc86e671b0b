"""Runs of so many epochs: each task is drawn that often, whatever the schedule, and the number of steps follows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.config import load_config
from rlkit.config.schema import Config
from rlkit.cost.estimate import Rollout, estimate, extent
from rlkit.cost.usage import Price
from rlkit.dry_run.rehearse import rehearse
from rlkit.errors import ConfigError, UsageError
from rlkit.store.history import table_path
from rlkit.store.table import read_table
from rlkit.tasks.from_config import count_draws, resolve_steps
from rlkit.tasks.sources import Mixture, SequenceSource
from rlkit.testing import ByteChat
from tests.simulation import Ears, Simulation, Word


class Constant(Word):
    """The same reward for every reply: a group of it teaches nothing."""

    def grade(self, reply: rlkit.Reply) -> float:
        return 1.0


class Broken(Word):
    """No rollout of it ever has a reward."""

    def grade(self, reply: rlkit.Reply) -> float:
        raise ValueError("broken")


class Endless(rlkit.env.TaskSource):
    """Makes tasks as they are asked for."""

    drawn = 0

    def next(self) -> rlkit.Env:
        self.drawn += 1
        return Word(self.drawn)

    def observe(self, group: rlkit.Group) -> None: ...

    def state_dict(self) -> Mapping[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:  # type: ignore[override]  what state_dict gave
        self.drawn = state["drawn"]


def endless() -> Endless:
    return Endless()


def words(count: int) -> list[Word]:
    return [Word(number) for number in range(count)]


def run(directory: Path, tasks: Sequence[rlkit.Env], **settings: object) -> Simulation:
    return Simulation(directory, tasks=tasks, settings={"steps": None, "epochs": 2, **settings})


def played(directory: Path) -> list[Counter[str]]:
    """Of each step, how many of its groups were of each task, replaced ones included."""
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [Counter(one.group.task for one in read_table(table_path(directory, step))) for step in steps if step]


def times(steps: Sequence[Counter[str]]) -> dict[str, int]:
    return dict(sum(steps, Counter[str]()))


MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {"mode": "sync"},
    "stream": {"mode": "stream"},
    "paced": {"mode": "async", "max_staleness": 2},
    "strict": {"mode": "async", "max_staleness": 2, "staleness": "strict"},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_task_is_drawn_so_often_and_the_last_step_has_the_rest(mode: str, tmp_path: Path) -> None:
    made = run(tmp_path / "run", words(7), schedule=MODES[mode], batch={"groups": 4, "group_size": 3})
    result = made.train()
    steps = played(made.directory)
    assert (result.status, result.steps) == ("completed", 4)
    assert [step.total() for step in steps] == [4, 4, 4, 2]
    assert times(steps) == {f"task-{number}": 2 for number in range(7)}
    assert "epochs: 7 tasks, each drawn twice, are 4 steps of 4, the last of them with 2" in made.ears.notes
    assert json.loads((made.directory / "run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_run_draws_what_is_left(mode: str, tmp_path: Path) -> None:
    settings = {"schedule": MODES[mode], "epochs": 3, "batch": {"groups": 2, "group_size": 3}}
    whole = run(tmp_path / "whole", words(5), **settings)
    whole.train()
    cut = run(tmp_path / "cut", words(5), **settings)
    cut.train_until(whole.virtual_s * 0.55)
    assert 0 < len(cut.lines()) < 8
    assert cut.train(resume=True).steps == 8
    assert times(played(cut.directory)) == {f"task-{number}": 3 for number in range(5)}
    if mode in ("sync", "strict"):
        assert cut.weights() == whole.weights()


def test_a_run_of_more_epochs_goes_on_and_one_of_other_tasks_does_not(tmp_path: Path) -> None:
    made = run(tmp_path / "run", words(4), epochs=1)
    assert made.train().steps == 2
    made.settings = {"steps": None, "epochs": 3}
    assert made.train(resume=True).steps == 6
    assert times(played(made.directory)) == {f"task-{number}": 3 for number in range(4)}
    made.tasks = words(5)
    told = "envs.words: there were 4 tasks when the run began, and now there are 5"
    with pytest.raises(UsageError, match=told):
        made.train(resume=True)


@pytest.mark.parametrize("mode", MODES)
def test_groups_that_are_replaced_come_out_of_the_same_draws(mode: str, tmp_path: Path) -> None:
    tasks = [*words(4), *(Constant(number) for number in range(4, 8))]
    batch = {"groups": 2, "group_size": 3, "replace_uninformative": True}
    made = run(tmp_path / "run", tasks, schedule=MODES[mode], batch=batch)
    result = made.train()
    held = json.loads((made.directory / "run.json").read_text())
    assert result.status == held["status"] == "completed"
    assert result.steps < 8
    assert f"the tasks have run out after {result.steps} steps" in made.ears.notes
    drawn = times(played(made.directory))
    # What is left over at the end, and teaches nothing, makes no step.
    assert all(drawn[f"task-{number}"] == 2 for number in range(4))
    assert all(drawn.get(f"task-{number}", 0) <= 2 for number in range(4, 8))


def test_groups_that_are_dropped_make_the_run_shorter_and_its_last_weights_are_evaluated(tmp_path: Path) -> None:
    tasks = [*words(5), Broken(5), Broken(6)]
    held_out = {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT", "tasks": 2}}, "every": 0}
    for mode, schedule in MODES.items():
        made = run(tmp_path / mode, tasks, epochs=1, schedule=schedule, eval=held_out)
        result = made.train()
        assert result.steps == 3
        assert {task for task in times(played(made.directory)) if task in ("task-0", "task-4")} == {"task-0", "task-4"}
        evaluated = [line["step"] for line in made.lines() if "eval/all/reward/mean" in line]
        assert evaluated == [0, 3]
        assert [line["step"] for line in made.lines()] == [0, 1, 2, 3]


HELD_OUT = [Word(100), Word(101)]
MANY = [Word(number) for number in range(10)]


def test_learning_rates_fall_over_the_steps_that_the_epochs_are(tmp_path: Path) -> None:
    optimizer = {"schedule": "linear", "learning_rate": 0.6, "warmup_steps": 1}
    made = run(tmp_path / "run", words(4), epochs=2, optimizer=optimizer)
    made.train()
    assert [line["optim/learning_rate"] for line in made.lines()] == pytest.approx([0.3, 0.6, 0.4, 0.2])
    with pytest.raises(ConfigError, match=r"warmup_steps: the run ends after 1 steps, .* set it below 1"):
        run(tmp_path / "short", words(2), epochs=1, optimizer=optimizer).trainer()


def test_progress_is_of_the_steps_that_the_epochs_are(tmp_path: Path) -> None:
    class Watching(Ears):
        def on_start(self, run: rlkit.trackers.RunInfo) -> None:
            self.whole = run.progress().steps

    made = run(tmp_path / "run", words(5), epochs=1)
    made.ears = Watching()
    made.train()
    assert made.ears.whole == 3


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
    cut=st.integers(0, 60),
)
def test_a_mixture_gives_each_task_of_each_source_so_often_also_after_a_restart(
    counts: list[int], epochs: int, seed: int, cut: int
) -> None:
    def mixture() -> Mixture:
        sources = {
            f"env{number}": SequenceSource([Word(task) for task in range(count)], seed=seed + number, epochs=epochs)
            for number, count in enumerate(counts)
        }
        return Mixture(sources, weights=None, seed=seed)

    first, again = mixture(), mixture()
    before = first.draw(cut)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drawn = Counter((task.name, task.id) for task in [*before, *again.draw(1000)])
    expected = {(f"env{number}", f"task-{task}") for number, count in enumerate(counts) for task in range(count)}
    assert drawn == Counter(dict.fromkeys(expected, epochs))
    assert again.is_exhausted
    assert not again.draw(1)


def test_the_tasks_of_a_mixture_come_as_if_they_were_shuffled_together() -> None:
    share = [0.0] * 20
    for seed in range(200):
        sources = {
            "few": SequenceSource(words(5), seed=seed, epochs=1),
            "many": SequenceSource(words(15), seed=1, epochs=1),
        }
        for place, task in enumerate(Mixture(sources, weights=None, seed=seed).draw(20)):
            share[place] += (task.name == "few") / 200
    # A quarter at every place; 5 deviations of the mean of 200 coins.
    assert max(abs(one - 0.25) for one in share) < 5 * math.sqrt(0.25 * 0.75 / 200)


def test_several_environments_have_their_tasks_played_equally_often(tmp_path: Path) -> None:
    class Two(Simulation):
        def trainer(self, *, resume: bool = False, stop: rlkit.StopSignal | None = None) -> rlkit.RLTrainer:
            self.settings = {**self.settings, "envs": {"words": {}, "more": {"env": f"{__file__}:MANY"}}}
            return super().trainer(resume=resume, stop=stop)

    made = Two(tmp_path / "run", tasks=words(3), settings={"steps": None, "epochs": 2, "batch": {"groups": 5}})
    made.train()
    groups = [one.group for step in range(1, 7) for one in read_table(table_path(made.directory, step))]
    counts = Counter((group.env, group.task) for group in groups)
    assert set(counts.values()) == {2}
    assert Counter(env for env, _ in counts) == {"words": 3, "more": 10}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 5, "epochs": 2}, "epochs: `steps: 5` also sets the length of the run; set steps to null"),
        ({"steps": None}, "steps: both `steps` and `epochs` are null; set one of them"),
        ({"epochs": 0}, "epochs: expected at least 1, found 0"),
        ({"epochs": 1.5}, "epochs: expected an integer"),
        ({"epochs": 1, "envs": {"words": {"weight": 2.0}, "b": {}}}, "envs.words.weight: has no effect with `epochs`"),
        (
            {"epochs": 1, "envs": {"words": {"curriculum": {"name": "filter"}}}},
            "envs.words.curriculum: contradicts `epochs`, because both set how often a task is drawn",
        ),
    ],
)
def test_what_cannot_be_said_beside_epochs_is_one_line(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], settings={"envs": {"words": {}}, **settings})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_epochs_take_the_place_of_the_steps_that_there_are_by_default() -> None:
    config = load_config([], settings={"envs": {"arithmetic": {}}, "epochs": 2}).config
    assert (config.epochs, config.steps) == (2, None)
    again = Config.model_validate_json(config.model_dump_json())
    assert (again.epochs, again.steps) == (2, None)
    assert load_config([], settings={"envs": {"arithmetic": {}}}).config.steps == 100


def test_a_source_without_a_number_of_tasks_is_refused_in_one_line(tmp_path: Path) -> None:
    told = "epochs: the number of tasks of envs.words is unknown, because a Endless is a task source"
    with pytest.raises(UsageError, match=told):
        Simulation(tmp_path / "run", tasks=Endless(), settings={"steps": None, "epochs": 1}).trainer()  # type: ignore[arg-type]
    config = load_config([], settings={"model": "m", "epochs": 1, "envs": {"words": {"env": f"{__file__}:endless"}}})
    with pytest.raises(UsageError, match=told):
        rlkit._util.threads.run(rehearse(config, chat=ByteChat()))


def one() -> Rollout:
    return Rollout(turns=1, first=10, later=0, repeated=0, sampled=5, trained=15, own_s=0)


def of_epochs(**settings: object) -> Config:
    base: dict[str, object] = {
        "model": "m",
        "epochs": 2,
        "envs": {"words": {}},
        "batch": {"groups": 4, "group_size": 3},
    }
    return load_config([], settings=base | settings).config


def test_an_estimate_counts_the_draws_and_not_the_places_of_the_steps() -> None:
    tasks = {"words": words(7)}
    config = resolve_steps(of_epochs(), tasks, note=print)
    free = Price(prefill=1.0, cached=1.0, sample=1.0, train=1.0)
    made = estimate(config, {"words": (one(), one())}, {}, price=free, speed=None, draws=count_draws(config, tasks))
    assert config.step_count == 4
    assert made.tokens.low == 14 * 3 * (10 + 5), "the least has nothing to train on"
    assert made.tokens.high == 14 * 3 * (10 + 5 + 15)
    replacing_batch = {"groups": 4, "replace_uninformative": True, "max_replaced_groups": 3}
    replacing = resolve_steps(of_epochs(batch=replacing_batch), tasks, note=print)
    assert [extent(replacing, count_draws(replacing, tasks), long=long).steps for long in (False, True)] == [2, 4]


def test_a_dry_run_is_of_as_many_steps_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    notes = list[str]()
    config = of_epochs(optimizer={"schedule": "cosine", "warmup_steps": 2})
    made = rlkit._util.threads.run(rehearse(config, envs={"words": words(7)}, chat=ByteChat(), note=notes.append))
    assert made.ok, made.parts
    assert made.estimate is not None
    assert "epochs: 7 tasks, each drawn twice, are 4 steps of 4, the last of them with 2" in notes


def test_python_takes_epochs_and_tells_how_many_steps_they_are(
    byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    heard = Ears()
    settings: dict[str, Callable[[], object] | object] = {"batch": {"groups": 2, "group_size": 2}}
    result = rlkit.train(
        model=str(byte_model_dir),
        envs=words(3),
        epochs=1,
        sampling={"max_tokens": 2},
        trackers=[heard],
        **settings,  # type: ignore[arg-type]
    )
    assert result.steps == 2
    assert [step for step, _ in heard.steps] == [1, 2]
