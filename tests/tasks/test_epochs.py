"""Runs of `epochs`: each task is drawn once per epoch with every schedule, and the number of steps follows."""

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
from rlkit.config.loading.load import load_config
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
from tests.builders import draw
from tests.simulation import Ears, Simulation, Word


class Constant(Word):
    """Give every reply the same reward, so that its groups are uninformative."""

    def grade(self, reply: rlkit.Reply) -> float:
        return 1.0


class Broken(Word):
    """Fail every rollout."""

    def grade(self, reply: rlkit.Reply) -> float:
        raise ValueError("broken")


class Endless(rlkit.env.TaskSource):
    """Create tasks on demand."""

    draw_count = 0

    def next(self) -> rlkit.Env:
        self.draw_count += 1
        return Word(self.draw_count)

    def observe(self, group: rlkit.Group) -> None: ...

    def state_dict(self) -> Mapping[str, int]:
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:  # type: ignore[override]  what state_dict gave
        self.draw_count = state["drawn"]


def endless() -> Endless:
    return Endless()


def make_words(count: int) -> list[Word]:
    return [Word(number) for number in range(count)]


def make_run(directory: Path, tasks: Sequence[rlkit.Env], **settings: object) -> Simulation:
    return Simulation(directory, tasks=tasks, settings={"steps": None, "epochs": 2, **settings})


def count_step_tasks(directory: Path) -> list[Counter[str]]:
    """Count the groups of each task in each step, replaced groups included."""
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [Counter(record.group.task for record in read_table(table_path(directory, step))) for step in steps if step]


def count_task_groups(steps: Sequence[Counter[str]]) -> dict[str, int]:
    return dict(sum(steps, Counter[str]()))


MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {"mode": "sync"},
    "stream": {"mode": "stream"},
    "paced": {"mode": "async", "max_staleness": 2},
    "strict": {"mode": "async", "max_staleness": 2, "staleness": "strict"},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_task_is_drawn_once_per_epoch_and_the_last_step_is_smaller(mode: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_words(7), schedule=MODES[mode], batch={"groups": 4, "group_size": 3})
    result = run.train()
    steps = count_step_tasks(run.directory)
    assert (result.status, result.steps) == ("completed", 4)
    assert [step.total() for step in steps] == [4, 4, 4, 2]
    assert count_task_groups(steps) == {f"task-{number}": 2 for number in range(7)}
    assert "epochs: 7 tasks, each drawn twice, are 4 steps of 4, the last of them with 2" in run.ears.notes
    assert json.loads((run.directory / "run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_draws_the_remaining_tasks(mode: str, tmp_path: Path) -> None:
    settings = {"schedule": MODES[mode], "epochs": 3, "batch": {"groups": 2, "group_size": 3}}
    uninterrupted = make_run(tmp_path / "whole", make_words(5), **settings)
    uninterrupted.train()
    interrupted = make_run(tmp_path / "cut", make_words(5), **settings)
    interrupted.train_until(uninterrupted.virtual_s * 0.55)
    assert 0 < len(interrupted.lines()) < 8
    assert interrupted.train(resume=True).steps == 8
    assert count_task_groups(count_step_tasks(interrupted.directory)) == {f"task-{number}": 3 for number in range(5)}
    if mode in ("sync", "strict"):
        assert interrupted.weights() == uninterrupted.weights()


def test_run_resumes_with_more_epochs_but_not_with_other_tasks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_words(4), epochs=1)
    assert run.train().steps == 2
    run.settings = {"steps": None, "epochs": 3}
    assert run.train(resume=True).steps == 6
    assert count_task_groups(count_step_tasks(run.directory)) == {f"task-{number}": 3 for number in range(4)}
    run.tasks = make_words(5)
    message = "envs.words: there were 4 tasks when the run began, and now there are 5"
    with pytest.raises(UsageError, match=message):
        run.train(resume=True)


@pytest.mark.parametrize("mode", MODES)
def test_replaced_groups_use_draws_of_the_epochs(mode: str, tmp_path: Path) -> None:
    tasks = [*make_words(4), *(Constant(number) for number in range(4, 8))]
    batch = {"groups": 2, "group_size": 3, "replace_uninformative": True}
    run = make_run(tmp_path / "run", tasks, schedule=MODES[mode], batch=batch)
    result = run.train()
    metadata = json.loads((run.directory / "run.json").read_text())
    assert result.status == metadata["status"] == "completed"
    assert result.steps < 8
    assert f"the tasks have run out after {result.steps} steps" in run.ears.notes
    draws = count_task_groups(count_step_tasks(run.directory))
    # What is left over at the end, and teaches nothing, makes no step.
    assert all(draws[f"task-{number}"] == 2 for number in range(4))
    assert all(draws.get(f"task-{number}", 0) <= 2 for number in range(4, 8))


def test_dropped_groups_shorten_the_run_and_its_last_weights_are_evaluated(tmp_path: Path) -> None:
    tasks = [*make_words(5), Broken(5), Broken(6)]
    held_out = {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT", "tasks": 2}}, "every": 0}
    for mode, schedule in MODES.items():
        run = make_run(tmp_path / mode, tasks, epochs=1, schedule=schedule, eval=held_out)
        result = run.train()
        assert result.steps == 3
        assert {
            task for task in count_task_groups(count_step_tasks(run.directory)) if task in ("task-0", "task-4")
        } == {"task-0", "task-4"}
        evaluated = [line["step"] for line in run.lines() if "eval/all/reward/mean" in line]
        assert evaluated == [0, 3]
        assert [line["step"] for line in run.lines()] == [0, 1, 2, 3]


HELD_OUT = [Word(100), Word(101)]
MANY = [Word(number) for number in range(10)]


def test_learning_rate_decays_over_the_steps_of_the_epochs(tmp_path: Path) -> None:
    optimizer = {"schedule": "linear", "learning_rate": 0.6, "warmup_steps": 1}
    run = make_run(tmp_path / "run", make_words(4), epochs=2, optimizer=optimizer)
    run.train()
    assert [line["optim/learning_rate"] for line in run.lines()] == pytest.approx([0.3, 0.6, 0.4, 0.2])
    with pytest.raises(ConfigError, match=r"warmup_steps: the run ends after 1 steps, .* set it below 1"):
        make_run(tmp_path / "short", make_words(2), epochs=1, optimizer=optimizer).trainer()


def test_progress_counts_the_steps_of_the_epochs(tmp_path: Path) -> None:
    class Watching(Ears):
        def on_start(self, run: rlkit.trackers.RunInfo) -> None:
            self.total_steps = run.progress().steps

    run = make_run(tmp_path / "run", make_words(5), epochs=1)
    run.ears = Watching()
    run.train()
    assert run.ears.total_steps == 3


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
    cut=st.integers(0, 60),
)
def test_restored_mixture_draws_each_task_once_per_epoch(counts: list[int], epochs: int, seed: int, cut: int) -> None:
    def mixture() -> Mixture:
        sources = {
            f"env{number}": SequenceSource([Word(task) for task in range(count)], seed=seed + number, epochs=epochs)
            for number, count in enumerate(counts)
        }
        return Mixture(sources, weights=None, seed=seed)

    first, restored = mixture(), mixture()
    first_draws = draw(first, cut)
    restored.load_state_dict(json.loads(json.dumps(first.state_dict())))
    draws = Counter((task.name, task.id) for task in [*first_draws, *draw(restored, 1000)])
    expected = {(f"env{number}", f"task-{task}") for number, count in enumerate(counts) for task in range(count)}
    assert draws == Counter(dict.fromkeys(expected, epochs))
    assert restored.is_exhausted
    assert not draw(restored, 1)


def test_mixture_shuffles_the_tasks_of_all_sources_together() -> None:
    share = [0.0] * 20
    for seed in range(200):
        sources = {
            "few": SequenceSource(make_words(5), seed=seed, epochs=1),
            "many": SequenceSource(make_words(15), seed=1, epochs=1),
        }
        for place, task in enumerate(draw(Mixture(sources, weights=None, seed=seed), 20)):
            share[place] += (task.name == "few") / 200
    # A quarter at every place; 5 deviations of the mean of 200 coins.
    assert max(abs(place_share - 0.25) for place_share in share) < 5 * math.sqrt(0.25 * 0.75 / 200)


def test_tasks_of_all_environments_are_played_equally_often(tmp_path: Path) -> None:
    class Two(Simulation):
        def trainer(self, *, resume: bool = False, stop: rlkit.StopSignal | None = None) -> rlkit.RLTrainer:
            self.settings = {**self.settings, "envs": {"words": {}, "more": {"env": f"{__file__}:MANY"}}}
            return super().trainer(resume=resume, stop=stop)

    run = Two(tmp_path / "run", tasks=make_words(3), settings={"steps": None, "epochs": 2, "batch": {"groups": 5}})
    run.train()
    groups = [record.group for step in range(1, 7) for record in read_table(table_path(run.directory, step))]
    counts = Counter((group.env, group.task) for group in groups)
    assert set(counts.values()) == {2}
    assert Counter(env for env, _ in counts) == {"words": 3, "more": 10}


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_settings_that_contradict_epochs_are_an_error_of_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], settings={"envs": {"words": {}}, **settings})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_epochs_replace_the_default_steps() -> None:
    config = load_config([], settings={"envs": {"arithmetic": {}}, "epochs": 2}).config
    assert (config.epochs, config.steps) == (2, None)
    again = Config.model_validate_json(config.model_dump_json())
    assert (again.epochs, again.steps) == (2, None)
    assert load_config([], settings={"envs": {"arithmetic": {}}}).config.steps == 100


def test_source_of_unknown_length_is_an_error_of_one_line(tmp_path: Path) -> None:
    message = "epochs: the number of tasks of envs.words is unknown, because a Endless is a task source"
    with pytest.raises(UsageError, match=message):
        Simulation(tmp_path / "run", tasks=Endless(), settings={"steps": None, "epochs": 1}).trainer()  # type: ignore[arg-type]
    config = load_config([], settings={"model": "m", "epochs": 1, "envs": {"words": {"env": f"{__file__}:endless"}}})
    with pytest.raises(UsageError, match=message):
        rlkit._util.threads.run(rehearse(config, chat=ByteChat()))


def make_rollout() -> Rollout:
    return Rollout(turns=1, first=10, later=0, repeated=0, sampled=5, trained=15, own_s=0)


def make_config(**settings: object) -> Config:
    base: dict[str, object] = {
        "model": "m",
        "epochs": 2,
        "envs": {"words": {}},
        "batch": {"groups": 4, "group_size": 3},
    }
    return load_config([], settings=base | settings).config


def test_estimate_counts_draws_instead_of_full_steps() -> None:
    tasks = {"words": make_words(7)}
    config = resolve_steps(make_config(), tasks, note=print)
    free = Price(prefill=1.0, cached=1.0, sample=1.0, train=1.0)
    cost = estimate(
        config,
        {"words": (make_rollout(), make_rollout())},
        {},
        price=free,
        speed=None,
        draws=count_draws(config, tasks),
    )
    assert config.step_count == 4
    assert cost.tokens.low == 14 * 3 * (10 + 5), "the least has nothing to train on"
    assert cost.tokens.high == 14 * 3 * (10 + 5 + 15)
    replacing_batch = {"groups": 4, "replace_uninformative": True, "max_replaced_groups": 3}
    replacing = resolve_steps(make_config(batch=replacing_batch), tasks, note=print)
    assert [extent(replacing, count_draws(replacing, tasks), long=long).steps for long in (False, True)] == [2, 4]


def test_dry_run_plans_as_many_steps_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    notes = list[str]()
    config = make_config(optimizer={"schedule": "cosine", "warmup_steps": 2})
    rehearsal = rlkit._util.threads.run(
        rehearse(config, envs={"words": make_words(7)}, chat=ByteChat(), note=notes.append)
    )
    assert rehearsal.ok, rehearsal.parts
    assert rehearsal.estimate is not None
    assert "epochs: 7 tasks, each drawn twice, are 4 steps of 4, the last of them with 2" in notes


def test_python_takes_epochs_and_tells_how_many_steps_they_are(
    byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    heard = Ears()
    settings: dict[str, Callable[[], object] | object] = {"batch": {"groups": 2, "group_size": 2}}
    result = rlkit.train(
        model=str(byte_model_dir),
        envs=make_words(3),
        epochs=1,
        sampling={"max_tokens": 2},
        trackers=[heard],
        **settings,  # type: ignore[arg-type]
    )
    assert result.steps == 2
    assert [step for step, _ in heard.steps] == [1, 2]
