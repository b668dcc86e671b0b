"""The search at a size for two processors: what its record says of budget forcing, the archive and the advantages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import override

import numpy as np
import pytest

import rlkit
from rlkit._util import threads
from rlkit._util.activity import Activity
from rlkit._util.model_names import DEFAULT_MODEL
from rlkit._util.paths import cache_dir
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_estimators, load_loss
from rlkit.config.schema import Config
from rlkit.envs.discovery.problem import hash_construction, load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.state import State
from rlkit.sandbox.inside import landlock, program_filter
from rlkit.store.history import load_history
from rlkit.testing import Latency, SimulatedTinker
from rlkit.tools.audit import audit_group
from rlkit.training.from_config import make_preparation
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group
from tests.envs.discovery.playing import FromAList
from tests.simulation import Ears

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "erdos_small.yaml"
TTT = ROOT / "examples" / "erdos_ttt.yaml"
INSTANT = Latency(first_s=0.0, token_s=0.0, gradient_s=0.0, step_s=0.0, save_s=0.0, load_s=0.0)
REAL = cache_dir() / "models" / DEFAULT_MODEL.replace("/", "--")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's protection is Linux's"),
    pytest.mark.skipif(
        not landlock.version() or program_filter.program() is None, reason="programs would not be kept apart"
    ),
]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Reports(Activity):
    """Remembers each kind that was reported with a count above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = set[str]()

    @override
    def put(self, kind: str, count: int) -> None:
        super().put(kind, count)
        self.kinds |= {kind} if count > 0 else set()

    @override
    def add(self, kind: str, count: int = 1) -> None:
        super().add(kind, count)
        self.kinds |= {kind} if count > 0 else set()


def load_recorded_groups(directory: Path) -> list[list[Group]]:
    """The groups of each step."""
    history = load_history(directory)
    return [[recorded_group.group for recorded_group in history.groups(step)] for step in range(1, history.step + 1)]


def children(groups: Sequence[Group]) -> list[State]:
    return [
        State.from_json(episode.info["child"])  # pyright: ignore[reportArgumentType]
        for group in groups
        for episode in group.episodes
        if "child" in episode.info
    ]


def check_forced_tokens(groups: Sequence[Group], *, phrase: bytes | None = None) -> int:
    """Check that forced tokens were not sampled and have no log-probability; how many turns have them."""
    forced = 0
    for turn in (turn for group in groups for episode in group.episodes for turn in episode.turns):
        is_forced = ~turn.sampled_mask
        forced += bool(is_forced.any())
        assert not turn.logprobs[is_forced].any()
        places = np.flatnonzero(is_forced)
        if len(places):
            assert (np.diff(places) == 1).all()  # one phrase, with what was sampled before and behind it
            assert places[0] > 0
            assert places[-1] < len(is_forced) - 1
            assert phrase is None or bytes(turn.completion[is_forced].astype(np.uint8)) == phrase
    return forced


def check_advantages(groups: Sequence[Group], config: Config) -> int:
    """Check each token's advantage against the formula; how many groups have any."""
    beta, contrasted = 2.0, 0
    prepare = make_preparation(config, load_estimators(config, {}), load_loss(config.loss), references={}).prepare
    for group in groups:
        weights = np.exp(beta * (group.rewards - group.rewards.max()))
        others = (weights.sum() - weights) / (len(weights) - 1)
        with np.errstate(divide="ignore"):
            expected = np.minimum(weights / others - 1, 16.0)
        if np.ptp(group.rewards) == 0:
            expected = np.zeros(len(weights))
        contrasted += bool(expected.any())
        prepared = asyncio.run(prepare(group))
        assert len(prepared.data) == np.count_nonzero(expected)
        for datum, advantage in zip(prepared.data, expected[expected != 0], strict=True):
            np.testing.assert_allclose(datum.advantages[datum.mask], advantage, rtol=1e-5)
            assert not datum.advantages[~datum.mask].any()
        checked = asyncio.run(audit_group(group))
        assert checked.mismatch is None
    return contrasted


def check_archive(steps: Sequence[Sequence[Group]], lines: Sequence[dict[str, float]], start_id: str) -> list[str]:
    """Check what the archive holds after each step against what was found; the states that groups started from."""
    known_ids, best = {start_id}, Erdos().verify(load_published("examples/erdos_small.json")).value
    parents = list[str]()
    for groups, line in zip(steps, lines, strict=True):
        for group in groups:
            parent = group.task.rpartition("-")[2]
            assert parent in known_ids  # it was drawn from the archive
            parents.append(parent)
        new_children = children(groups)
        known_ids |= {child.id for child in new_children}
        best = min([best, *(child.value for child in new_children)])
        assert line["env/erdos/tasks/best"] == best
        assert line["env/erdos/tasks/size"] == min(len(known_ids), 16)
    return parents


def start_id() -> str:
    return hash_construction(Erdos().verify(load_published("examples/erdos_small.json")).construction)


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_budget_forcing_the_archive_and_entropic_advantages_are_in_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports = Reports()
    monkeypatch.setattr("rlkit.training.trainer.Activity", lambda: reports)
    values = ["model=simulated", "steps=4", "sampling.budget_forcing.context_window_tokens=4000"]
    resolved = load_config([EXAMPLE], values)
    trainer = RLTrainer(resolved, directory=tmp_path, service=SimulatedTinker(latency=INSTANT), chat=FromAList())
    threads.run(trainer.train())
    steps, lines = load_recorded_groups(tmp_path), metrics(tmp_path)
    played = [group for groups in steps for group in groups]
    assert [len(group.episodes) for group in played] == [8] * 8
    forcing = resolved.config.sampling.budget_forcing
    assert forcing is not None
    assert check_forced_tokens(played, phrase=forcing.phrase.encode()) > 0
    assert any(line.get("env/erdos/budget_forced", 0) > 0 for line in lines)
    assert check_advantages(played, resolved.config) > 0
    parents = check_archive(steps, lines, start_id())
    assert len(set(parents)) > 1  # what was found was started from
    assert reports.kinds == {"programs running or queued"}
    assert not reports.counts


@pytest.mark.slow
def test_the_documented_search_is_trained_on_with_its_large_budget_its_buffer_and_advantages(tmp_path: Path) -> None:
    large = ["sampling.max_tokens=26000", "sampling.budget_forcing.context_window_tokens=32768"]
    assert all(value in TTT.read_text().partition("\nmodel:")[0] for value in large)
    resolved = load_config([TTT], [*large, "model=simulated", "steps=1", "batch.groups=1", "batch.group_size=24"])
    config = resolved.config
    forcing = config.sampling.budget_forcing
    assert forcing is not None
    latency = replace(INSTANT, mean_tokens=26_000.0)
    trainer = RLTrainer(resolved, directory=tmp_path, service=SimulatedTinker(latency=latency), chat=FromAList())
    threads.run(trainer.train())
    played = [group for groups in load_recorded_groups(tmp_path) for group in groups]
    assert [len(group.episodes) for group in played] == [24]
    assert check_forced_tokens(played, phrase=forcing.phrase.encode()) > 0
    assert check_advantages(played, config) > 0
    assert 1 < metrics(tmp_path)[-1]["env/erdos/tasks/size"] <= 16


ENGINE_WORK = {"tokens of prompts being read", "replies in progress", "tokens in them", "training sequences to go"}


def test_each_long_phase_of_a_run_reports_its_activity(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    reports, ears = Reports(), Ears()
    monkeypatch.setattr("rlkit.training.trainer.Activity", lambda: reports)
    small = {
        "model": str(byte_model_dir),
        "steps": 1,
        "batch": {"groups": 1, "group_size": 2},
        "sampling": {"max_tokens": 4, "budget_forcing": None},
        "kl_penalty": {"coefficient": 0.1},  # so that there is something to train on
    }
    rlkit.train(EXAMPLE, trackers=[ears], **small)  # pyright: ignore
    assert reports.kinds >= ENGINE_WORK
    assert not reports.counts  # nothing is left
    remaining_notes = iter(ears.notes)
    for beginning in ("starting the embedded engine", "starting a training session for"):
        assert any(note.startswith(beginning) for note in remaining_notes), ears.notes


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"{DEFAULT_MODEL} is not in the cache: a run with it puts it there")
def test_the_documented_command_scores_with_the_real_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlkit", "train", "examples/erdos_small.yaml", "--name", "small"]
    values = ["steps=1", "batch.groups=1", "batch.group_size=4", "service.engine_device=cpu"]
    environ = {**os.environ, "RLKIT_RUNS_DIR": str(tmp_path)}
    done = subprocess.run([*command, *values], env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "small"
    steps, lines = load_recorded_groups(directory), metrics(directory)
    played = [group for groups in steps for group in groups]
    assert check_forced_tokens(played) > 0
    assert children(played)  # some programs are valid
    check_archive(steps, lines, start_id())
    assert check_advantages(played, load_config([EXAMPLE], values).config) > 0
    assert "best of erdos" in done.stderr
