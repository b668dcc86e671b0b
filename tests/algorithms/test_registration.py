"""An estimator, a loss and a schedule from outside of the package, found by name as the built-in ones are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import pandas as pd
import pytest
from pydantic import Field

from rlkit.algorithms.estimator import RewardEstimator
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.losses import CISPO, LOSSES, LocalLoss
from rlkit.algorithms.schedules import SCHEDULES, Schedule
from rlkit.config.loading.load import load_config
from rlkit.errors import ConfigError
from rlkit.types import Datum, Group
from tests.builders import group
from tests.doc_commands import reference_markdown
from tests.simulation import Simulation

if TYPE_CHECKING:
    from torch import Tensor

batches = list[int]()


class Power(RewardEstimator):
    """Standardised rewards, raised to a power.

    A_i = sign(z_i) |z_i|^p with z_i = (r_i − mean(r)) / std(r).
    """

    name: ClassVar = "power"
    in_reward_units: ClassVar = False
    metric_names: ClassVar = ("spread",)
    exponent: Annotated[float, Field(gt=0)] = 2.0
    """p: above 1 the great differences count more."""

    def formula(self, r: np.ndarray) -> np.ndarray:
        z = (r - r.mean()) / r.std()
        return np.sign(z) * np.abs(z) ** self.exponent

    def metrics(self, group: Group) -> Mapping[str, float]:
        return {"spread": float(np.ptp(group.rewards))}


class Capped(CISPO):
    """The service's `cispo` with another upper bound."""

    name: ClassVar = "capped"
    service_name: ClassVar = "cispo"
    clip_high: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the weight p/q."""


class Likelihood(LocalLoss):
    """−scale · Σ A · log p, on this machine."""

    name: ClassVar = "likelihood"
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor."""

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        import torch

        batches.append(len(data))
        terms = [-(torch.tensor(d.advantages) * logp).sum() for d, logp in zip(data, logprobs, strict=True)]
        return self.scale * torch.stack(terms).sum(), {}


class Lead(Schedule):
    """Plays so many steps ahead, in the order of the draws."""

    name: ClassVar = "lead"
    lead: Annotated[int, Field(ge=1)] = 2
    """Steps that are played ahead."""

    @property
    def steps_ahead(self) -> int:
        return self.lead


@pytest.fixture(autouse=True)
def register_classes() -> Iterator[None]:
    ESTIMATORS[Power.name] = Power
    SCHEDULES[Lead.name] = Lead
    LOSSES.update({each.name: each for each in (Capped, Likelihood)})
    yield
    del ESTIMATORS[Power.name], SCHEDULES[Lead.name], LOSSES[Capped.name], LOSSES[Likelihood.name]


def test_external_estimator_follows_its_formula() -> None:
    rewards = np.array([0.0, 4.0, 100.0])
    z = (rewards - rewards.mean()) / rewards.std()
    advantages = Power(exponent=3.0).advantages(group(rewards.tolist()))
    np.testing.assert_allclose(advantages, z**3, rtol=1e-12)


def test_external_estimator_trains_a_step_by_its_name(tmp_path: Path) -> None:
    settings = {"steps": 1, "advantage": {"name": "power", "exponent": 3.0}}
    run = Simulation(tmp_path / "run", settings=settings)
    assert run.train().status == "completed"
    saved = pd.read_parquet(run.directory / "episodes")
    spreads = [rewards.max() - rewards.min() for _, rewards in saved.groupby("draw").reward]
    assert run.lines()[0]["env/words/advantage/spread"] == pytest.approx(np.mean(spreads))
    other = Simulation(tmp_path / "other", settings={"steps": 1, "advantage": "power"})
    other.train()
    assert run.weights() != other.weights()


@pytest.mark.parametrize("loss", [{"name": "capped"}, {"name": "likelihood", "scale": 2.0}])
def test_external_loss_trains_a_step_by_its_name(loss: dict[str, object], tmp_path: Path) -> None:
    batches.clear()
    run = Simulation(tmp_path / "run", settings={"steps": 1, "loss": loss})
    assert run.train().status == "completed"
    assert run.lines()[0]["optim/skipped"] == 0
    assert bool(batches) == (loss["name"] == "likelihood")


def test_configuration_has_the_settings_of_external_classes() -> None:
    def mistake(**settings: object) -> str:
        with pytest.raises(ConfigError) as refused:
            load_config([], settings={"envs": {"arithmetic": {}}, **settings})
        return str(refused.value)

    assert mistake(advantage="powr").endswith("found 'powr'. Did you mean 'power'?")
    assert "advantage.exponent: expected a value above 0, found 0" in mistake(
        advantage={"name": "power", "exponent": 0}
    )
    assert "loss.scal: is not a field of likelihood. Did you mean 'scale'?" in mistake(
        loss={"name": "likelihood", "scal": 1}
    )
    assert "| `advantage.exponent` | number > 0 | `2.0` | p: above 1 the great differences count more. |" in (
        reference_markdown()
    )


def test_unregistered_name_is_unknown() -> None:
    del ESTIMATORS[Power.name]
    try:
        with pytest.raises(ConfigError, match="expected group_mean, "):
            load_config([], settings={"envs": {"arithmetic": {}}, "advantage": "power"})
        assert "advantage.exponent" not in reference_markdown()
    finally:
        ESTIMATORS[Power.name] = Power


@pytest.mark.parametrize("lead", [1, 3])
def test_run_uses_an_external_schedule(lead: int, tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", settings={"steps": 6, "schedule": {"mode": "lead", "lead": lead}})
    assert run.train().status == "completed"
    assert max(line["batch/staleness/max"] for line in run.lines()) == lead
    assert "## `schedule` with `mode: lead`" in reference_markdown()
    with pytest.raises(ConfigError, match=r"schedule\.lead: expected at least 1, found 0"):
        load_config([], settings={"envs": {"words": {}}, "schedule": {"mode": "lead", "lead": 0}})
