"""The documented runs on a folder of tasks, a step of each, in real trials in the local sandbox."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from rlkit.config.loading.load import load_config
from rlkit.config.loading.resolved import ResolvedConfig
from tests.doc_commands import ROOT
from tests.scripted_model import Requests, train

from .playing import working_in_turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

MIGRATED = ROOT / "examples" / "migrated"
SOLUTION = "echo 'Hello, world!' > /app/hello.txt\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of two tasks, of which the model can do one."""
    for name in ("hello-world", "edit-config"):
        shutil.copytree(ROOT / "examples" / "tasks" / name, tmp_path / "tasks" / name)
    return tmp_path / "tasks"


def play(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch, directory: Path, *, steps: int
) -> tuple[pd.DataFrame, Requests]:
    """Train; the episodes, and what was asked of the service."""
    result, requests = train(resolved, working_in_turn(SOLUTION), monkeypatch, directory=directory)
    assert (result.status, result.steps) == ("completed", steps)
    episodes = pd.read_parquet(directory / "episodes")
    assert set(episodes.status) == {"completed"}
    assert sorted(episodes.reward[episodes.task == "hello-world"]) == [0.0, 1.0]
    assert {len(turns) for turns in episodes.turns} == {2}
    return episodes, requests


def small(name: str, values: Sequence[str]) -> ResolvedConfig:
    return load_config([MIGRATED / name], [*values, "track=null", "batch.group_size=2"])


def test_the_run_of_terminal_bench_trainer_draws_each_task_once(
    cache: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKS", str(tasks))
    resolved = small("trainer_terminal_bench.yaml", ["envs.terminal.args.environment=local"])
    config = resolved.config
    assert (config.epochs, config.steps, config.envs["terminal"].args["max_turns"]) == (1, None, None)
    assert (config.batch.groups, config.rollouts.max_concurrent) == (8, 1)
    episodes, requests = play(resolved, monkeypatch, tmp_path / "run", steps=1)
    assert sorted(episodes.task) == ["edit-config"] * 2 + ["hello-world"] * 2
    assert {(params.temperature, params.max_tokens) for params in requests.sampled} == {(0.7, 4096)}
    assert [gradient[1] for gradient in requests.gradients] == ["ppo"]
    assert [adam.learning_rate for adam in requests.updates] == [3e-4]


@pytest.mark.parametrize("name", ["tinking_small_scale.yaml", "tinking_papergym.yaml"])
def test_a_run_of_tinking_on_a_folder_of_tasks_trains(
    name: str, cache: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAPERS", str(tasks))
    here = ["envs.papers.args.environment=local", "steps=2"]  # a group each: the second task is the other one
    resolved = small(name, here)
    assert "max_turns" not in resolved.config.envs["papers"].args
    episodes, requests = play(resolved, monkeypatch, tmp_path / "run", steps=2)
    assert sorted(episodes.task) == ["edit-config"] * 2 + ["hello-world"] * 2
    assert {params.max_tokens for params in requests.sampled} == {2048}
    assert {gradient[1] for gradient in requests.gradients} == {"importance_sampling"}


def test_tasks_that_are_kept_for_evaluation_are_evaluated_and_not_trained_on(
    cache: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKS", str(tasks))
    halves = [
        f"{section}.args.{value}"
        for section, half in (("envs.terminal", "train"), ("eval.envs.held_out", "eval"))
        for value in ("environment=local", "eval_tasks=[edit-config]", f"split={half}")
    ]
    held_out = ["eval.envs.held_out.env=harbor", f"eval.envs.held_out.args.tasks_dir={tasks}"]
    attempts = ["eval.envs.held_out.attempts=2", "eval.envs.held_out.temperature=0.7"]
    resolved = small("trainer_terminal_bench.yaml", [*halves, *held_out, *attempts])
    episodes, _ = play(resolved, monkeypatch, tmp_path / "run", steps=1)
    assert set(episodes.task) == {"hello-world"}
    evaluated = pd.read_parquet(tmp_path / "run" / "evaluations")
    assert set(evaluated.task) == {"edit-config"}
    assert dict(evaluated.groupby("step").size()) == {0: 2, 1: 2}
