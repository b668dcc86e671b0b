"""Learning is right, not only running: each estimator and each loss finds the best answer of a bandit.

Every estimator with one loss and every loss with one estimator; all pairs with RLKIT_TEST_EXHAUSTIVE=1.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import rlkit
from rlkit.algorithms.advantages import AnyEstimator
from rlkit.algorithms.estimators import ESTIMATORS, GroupMean
from rlkit.config.loading.load import load_config
from rlkit.engine import EngineServer
from rlkit.tinker_client.connector import ServiceAddress
from rlkit.tinker_client.sdk import TinkerService
from rlkit.trackers import Tracker
from rlkit.training.trainer import RLTrainer
from rlkit.types import Datum
from tests.marks import split_slow

EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"

LEVELS = 5
CHANCE, OPTIMUM = 0.5, 1.0
"""Mean reward of bytes drawn uniformly, and of the best ones."""


@dataclass(frozen=True)
class Bandit(rlkit.SingleTurnEnv):
    """Two bytes, each of which pays one of five amounts: with 0 and 1 alone, estimators from medians see no spread, and
    with one byte the ratio of a sequence would be that of its token.
    """

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: rlkit.Reply) -> float:
        return float(np.sum(reply.turn.completion % LEVELS)) / (2 * (LEVELS - 1))


def reinforce(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    terms = [-(torch.tensor(d.advantages) * logp).sum() for d, logp in zip(data, logprobs, strict=True)]
    return torch.stack(terms).sum(), {}


LOSSES: dict[str, dict[str, str]] = {
    **{name: {"name": name} for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo")},
    "custom": {"name": "custom", "function": f"{__file__}:reinforce"},
}

# Half of the groups are trained on with weights that have moved since, without which most losses are the same.
BATCH = {"groups": 4, "group_size": 16, "substeps": 2}

BATCHES = {
    # Where two are equally good it gives nothing, and the better the policy, the more often two of 16 are: it stalls
    # below the criterion. Of two, one leads whenever they differ.
    "best_vs_second": {"groups": 32, "group_size": 2, "substeps": 2},
}
"""Of estimators that by their nature do not get there with the batch of the others; each has as many episodes."""

PAIRS = [
    (estimator, loss)
    for estimator in ESTIMATORS
    for loss in LOSSES
    if EXHAUSTIVE or estimator == "group_mean" or loss == "importance_sampling"
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    # One for all runs: starting it costs as much as some steps.
    with EngineServer(threads=1, device="cpu", root=tmp_path_factory.mktemp("engine")) as running:
        yield running


def learned(rewards: Sequence[float]) -> bool:
    """From chance to nine tenths of the optimum, and not by one lucky step."""
    return rewards[0] < CHANCE + 0.1 and float(np.mean(rewards[-2:])) > 0.9 * OPTIMUM


@dataclass
class UntilLearned(Tracker):
    """Ends the run as soon as it has learned."""

    rewards: list[float] = field(default_factory=list)
    stop: rlkit.StopSignal = field(default_factory=rlkit.StopSignal)
    learned: bool = False

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rewards.append(metrics["env/bandit/reward/mean"])
        if learned(self.rewards):
            self.learned = True
            self.stop.request()


def trained(
    server: EngineServer,
    model: Path,
    *,
    batch: Mapping[str, int] = BATCH,
    estimators: Mapping[str, AnyEstimator] | None = None,
    **more: object,
) -> UntilLearned:
    settings = {
        "model": str(model),
        "envs": {"bandit": {}},
        "steps": 20,  # pkpo's advantages are small beside the pull of dro, so that the two together need more than 12
        "batch": batch,
        "sampling": {"max_tokens": 2, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 4, "train_unembed": True},
        "checkpoint": {"every": 0},
        **more,
    }
    run = UntilLearned()
    trainer = RLTrainer(
        load_config([], settings=settings),
        envs={"bandit": [Bandit()]},
        estimators=estimators,
        trackers=[run],
        stop=run.stop,
        service=TinkerService(ServiceAddress(base_url=server.url, api_key=server.api_key)),
    )
    asyncio.run(trainer.train())
    return run


@pytest.mark.parametrize(("estimator", "loss"), split_slow(PAIRS, lambda pair: pair[0] == "group_mean"))
def test_every_estimator_and_loss_finds_the_best_answer(
    server: EngineServer, byte_model_dir: Path, estimator: str, loss: str
) -> None:
    batch = BATCHES.get(estimator, BATCH)
    run = trained(server, byte_model_dir, batch=batch, advantage=estimator, loss=LOSSES[loss])
    assert run.learned, run.rewards


def test_without_a_learning_rate_nothing_is_learned(server: EngineServer, byte_model_dir: Path) -> None:
    assert not trained(server, byte_model_dir, steps=5, optimizer={"learning_rate": 1e-9}).learned


def against(group: rlkit.Group) -> np.ndarray:
    return -GroupMean().advantages(group)


@pytest.mark.parametrize("loss", LOSSES if EXHAUSTIVE else ["importance_sampling"])
def test_an_estimator_of_the_wrong_sign_finds_the_worst_answer(
    server: EngineServer, byte_model_dir: Path, loss: str
) -> None:
    run = trained(server, byte_model_dir, steps=12, estimators={"bandit": against}, loss=LOSSES[loss])
    assert not run.learned
    assert float(np.mean(run.rewards[-2:])) < 0.1 * OPTIMUM, run.rewards
