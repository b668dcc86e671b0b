"""The documented runs of OpenReward's cookbook, a step of each, on servers of these tests instead of the hosted ones.

The model's tokens and format, what is between the run and its environments, and the training loop are the real ones.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from rlkit.config.loading.load import load_config, split_arguments
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.testing import World
from rlkit.testing.world import digest
from tests.envs.openreward.conftest import worlds
from tests.envs.openreward.worlds import Served, call

from .doc_commands import ROOT
from .scripted_model import Requests, train
from .test_coverage import SPAN, read_rows

__all__ = ["worlds"]

PAGE = ROOT / "docs" / "migrating" / "openreward.md"
RUNS = "## The documented runs"
PPO = ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
SECRET = "sk-of-the-judge-0123456789"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


def documented_words(run: str) -> list[str]:
    """The words after `rlkit train` in the page's row of a documented run, options left out."""
    table = read_rows(PAGE.read_text().partition(RUNS)[2])
    (words,) = [SPAN.findall(rlkit_cell)[0] for cookbook_cell, rlkit_cell, *_ in table if cookbook_cell == run]
    return [word for word in shlex.split(words)[2:] if not word.startswith("--")]


def load_small(words: Sequence[str], *values: str) -> ResolvedConfig:
    """The run that a documented command names, with a step of few groups."""
    files, overrides = split_arguments(words)
    return load_config(files, [*overrides, "steps=1", "track=null", "batch.groups=2", *values])


def detective() -> Callable[[str], str]:
    """A model that first says something, and then reveals the secrets for a reward of 1 or marks for 0.

    The first two replies to a text differ, so that a group that has a text of its own earns both; more are by chance,
    because groups with one text play at once, and one of them could get every second reply.
    """
    counts, random = Counter[str](), Random(0)

    def reply(text: str) -> str:
        if "Hm." not in text:
            return "Hm."
        counts[text] += 1
        is_solved = counts[text] == 1 or (counts[text] > 2 and random.random() < 0.5)
        return call("reveal") if is_solved else call("mark", mark="w", reward=0.0, finished=True)

    return reply


def play(
    resolved: ResolvedConfig, monkeypatch: pytest.MonkeyPatch, directory: Path, *, world: World | None = None
) -> tuple[pd.DataFrame, Requests]:
    """Train for a step; its episodes, and what was asked of the service."""
    author = detective()
    result, requests = train(resolved, author, monkeypatch, directory=directory, world=world)
    assert (result.status, result.steps) == ("completed", 1)
    episodes = pd.read_parquet(directory / "episodes")
    assert set(episodes.status) == {"completed"}
    assert episodes.groupby("draw").reward.nunique().max() > 1, "nothing was trained on"
    assert SECRET not in str(episodes.to_dict())
    return episodes, requests


def test_whodunit_alone_is_trained_on(worlds: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = f"envs.whodunit.args.target={worlds.url}#marks"
    resolved = load_small(documented_words("WhoDunIt alone"), target, "batch.groups=1")
    episodes, requests = play(resolved, monkeypatch, tmp_path / "run")
    assert len(episodes) == 16
    assert set(episodes.reward) == {0.0, 1.0}
    assert {len(turns) for turns in episodes.turns} == {2}, "a reply without a call is told to call a tool"
    assert "('openai_api_key', '***')" in "".join(episodes["info"])
    assert {(params.temperature, params.max_tokens) for params in requests.sampled} == {(1.0, 4096)}
    assert [gradient[1:] for gradient in requests.gradients] == [PPO]
    assert [adam.learning_rate for adam in requests.updates] == [1e-5]


def test_documented_overrides_reach_the_service(
    worlds: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = documented_words("overrides of the command line")
    assert words[1:] == [
        "batch.groups=64",
        "optimizer.learning_rate=2.0e-5",
        "loss=null",
        "loss.name=importance_sampling",
    ]
    files, overrides = split_arguments(words)
    assert load_config(files, overrides).config.batch.groups == 64
    smaller = (f"envs.whodunit.args.target={worlds.url}#marks", "envs.whodunit.group_size=4")
    _, requests = play(load_small(words, *smaller), monkeypatch, tmp_path / "run")
    assert [gradient[1:] for gradient in requests.gradients] == [("importance_sampling", None)]
    assert [adam.learning_rate for adam in requests.updates] == [2e-5]


def test_whodunit_and_gsm8k_are_trained_on_together(
    worlds: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    targets = [f"envs.{name}.args.target={worlds.url}#marks" for name in ("whodunit", "gsm8k")]
    resolved = load_small(documented_words("WhoDunIt and GSM8K"), *targets)
    episodes, requests = play(resolved, monkeypatch, tmp_path / "run")
    assert {env: len(env_episodes) for env, env_episodes in episodes.groupby("env")} == {"whodunit": 16, "gsm8k": 8}
    assert {params.temperature for params in requests.sampled} == {1.0, 0.7}
    assert [gradient[1:] for gradient in requests.gradients] == [PPO]


def test_run_starts_from_a_checkpoint_of_another_run(
    worlds: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, world = f"envs.whodunit.args.target={worlds.url}#marks", World()
    smaller = (target, "envs.whodunit.group_size=4")
    play(load_small(documented_words("WhoDunIt alone"), *smaller), monkeypatch, tmp_path / "first", world=world)
    ((path, weights),) = world.checkpoints.items()
    *words, stated = documented_words("resuming from a checkpoint")
    assert stated.startswith("load_checkpoint=tinker://")
    resolved = load_small([*words, f"load_checkpoint={path}"], *smaller)
    _, requests = play(resolved, monkeypatch, tmp_path / "second", world=world)
    (adam,) = requests.updates
    assert [*world.checkpoints.values()][1:] == [digest(weights, adam.learning_rate, *world.step_digests[-1])]
