from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.datums import PreparedGroup, UpdateResult
from rlkit.algorithms.losses import CISPO, DRO, GSPO, LOSSES, PPO, ImportanceSampling, Loss
from rlkit.engine.training.losses import make_loss
from rlkit.metrics.metrics import update_metrics
from rlkit.types import Datum, as_prompt
from tests.builders import group

# Products of subnormal numbers have no digits left to compare.
NUMBERS = st.lists(
    st.tuples(st.floats(-3, 3, allow_subnormal=False), st.floats(-2, 2, allow_subnormal=False)), min_size=1, max_size=8
)


def test_settings_have_the_names_of_the_service() -> None:
    assert PPO().service_loss() == ("ppo", make_loss("ppo", {}).settings)
    assert CISPO().service_loss() == ("cispo", make_loss("cispo", {}).settings)
    assert GSPO().service_loss() == ("gspo", make_loss("gspo", {}).settings)
    assert ImportanceSampling().service_loss() == ("importance_sampling", {})
    assert DRO().beta == make_loss("dro", {}).settings["beta"]


@given(NUMBERS, st.sampled_from(["ppo", "cispo", "gspo"]))
def test_clipped_tokens_are_those_of_the_formula_of_the_service(pairs: list[tuple[float, float]], name: str) -> None:
    log_ratios, advantages = (np.array(column) for column in zip(*pairs, strict=True))
    bounds = (0.8, 1.2)
    tested = LOSSES[name](clip_low=bounds[0], clip_high=bounds[1])
    clips = tested.clips(log_ratios, advantages)
    assert clips is not None
    ratios = [math.exp(log_ratios.mean() if name == "gspo" else value) for value in log_ratios]
    for ratio, advantage, clip in zip(ratios, advantages, clips, strict=True):
        clipped_ratio = min(max(ratio, bounds[0]), bounds[1])
        if name == "cispo":
            assert clip == (clipped_ratio != ratio)
        else:  # the minimum is the constant, and has no gradient
            assert clip == (clipped_ratio * advantage < ratio * advantage)


def test_a_loss_without_bounds_clips_nothing() -> None:
    assert ImportanceSampling().clips(np.array([9.0]), np.array([1.0])) is None


def make_datum(size: int, mask: np.ndarray, seed: int = 0) -> Datum:
    rng = np.random.default_rng(seed)
    return Datum(
        as_prompt(range(size)),
        np.arange(size, dtype=np.int32),
        np.where(mask, -rng.exponential(1, size), 0).astype(np.float32),
        np.where(mask, rng.normal(size=size), 0).astype(np.float32),
        mask,
    )


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.floats(0.01, 2))
def test_dro_has_the_gradient_of_the_service_at_sampled_tokens_only(flags: list[bool], beta: float) -> None:
    datum = make_datum(len(flags), np.array(flags))
    logp = torch.tensor(-np.random.default_rng(1).exponential(1, len(flags)).astype(np.float32), requires_grad=True)
    value, _ = DRO(beta=beta).compute([datum], [logp])
    value.backward()
    assert logp.grad is not None
    inputs = {"advantages": torch.tensor(datum.advantages), "logprobs": torch.tensor(datum.logprobs)}
    losses, slopes = make_loss("dro", {"beta": beta}).gradient(logp, inputs)
    sampled = torch.tensor(flags)
    torch.testing.assert_close(value.detach(), losses[sampled].sum())
    torch.testing.assert_close(logp.grad[sampled], slopes[sampled])
    assert not logp.grad[~sampled].any()


def measure(log_ratios: list[float], loss: Loss) -> Mapping[str, float]:
    size = len(log_ratios)
    datum = make_datum(size, np.ones(size, np.bool_))
    logprobs = datum.logprobs + np.array(log_ratios, np.float32)
    return update_metrics(UpdateResult([PreparedGroup(group([]), [], (datum,))], [logprobs], {}, loss, 0.25))


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=9))
def test_importance_weights_are_reported(log_ratios: list[float]) -> None:
    metrics = measure(log_ratios, ImportanceSampling())
    weights = [math.exp(value) for value in log_ratios]
    effective = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    assert metrics["optim/ratio/effective"] == pytest.approx(effective, rel=1e-4)
    assert metrics["optim/ratio/max"] == pytest.approx(max(weights), rel=1e-4)
    assert metrics["optim/ratio/min"] == pytest.approx(min(weights), rel=1e-4)
    assert "optim/ratio/clipped" not in metrics
    assert metrics["optim/learning_rate"] == 0.25


def test_overflowing_weight_is_reported_as_infinite() -> None:
    metrics = measure([1000.0, 0.0, 0.0, 0.0], CISPO(clip_high=4.0))
    assert metrics["optim/ratio/max"] == math.inf
    assert metrics["optim/ratio/effective"] == pytest.approx(0.25)
    assert metrics["optim/ratio/clipped"] == 0.25
