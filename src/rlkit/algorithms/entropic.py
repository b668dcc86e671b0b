"""Entropic estimators, and their temperature: solve KL(softmax(βr) ‖ uniform) = `kl` for β.

Invariant: the divergence grows with β, so there is at most one solution. `estimators` states those of every estimator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rlkit.algorithms.estimator import Estimator, RewardEstimator
from rlkit.algorithms.reward_scale import EQUAL, Values, exponent, map_rewards, merge_equal
from rlkit.types import Bools, Group

type AboveZero = Annotated[float, Field(gt=0)]

_REACH = 0.9  # limit as a share of ln n, the divergence if one episode has all the weight
_STEEPNESS_MAX = 2.0**50  # in 1/spread; steeper weights separate all rewards that are not equal
_BISECTIONS = 60  # a few more than the bits of a float64
_LOGIT_MIN = -1e300  # in place of −inf, because −inf − (−inf) is NaN


class Entropic(Estimator):
    """Weights exp(βr) relative to the mean weight of the other episodes, with a constant β.

    A_i = e^{βr_i} / mean_{j≠i} e^{βr_j} − 1 ascends log E[e^{βr}], which prefers rare high rewards to a good mean.
    Shift invariant, at least −1; does not sum to zero. Source: Yuksekgonul et al. 2026, TTT-Discover
    (arXiv:2601.16175), with its constant β.
    """

    name: ClassVar = "entropic"
    beta: AboveZero = 2.0
    """Weight of a higher reward, in 1/reward; the default is the value of the TTT-Discover ablation."""
    clip: AboveZero = 16.0
    """Largest advantage. Otherwise a single good episode of 64 would weigh a hundred times more than the others."""

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        unit = exponent(group.rewards[np.isfinite(group.rewards)])

        def formula(r: Values) -> Values:
            return _advantages_over_others(np.ldexp(self.beta * (r - r.max()), unit), clip=self.clip)

        with np.errstate(over="ignore"):
            return map_rewards(group.rewards, formula, in_reward_units=False)


class EntropicAdaptive(RewardEstimator):
    """The formula of `entropic`, with the β at which the weights have a given KL divergence from uniform weights.

    β ≥ 0 solves KL(softmax(βr) ‖ uniform) = min(`kl`, 0.9 ln n); ln n is the largest divergence of n weights. If too
    many episodes share the best reward for that divergence, they get all the weight. Shift and scale invariant, at
    least −1; does not sum to zero. Source: Yuksekgonul et al. 2026, TTT-Discover, §A.1 (arXiv:2601.16175).
    """

    name: ClassVar = "entropic_adaptive"
    in_reward_units: ClassVar = False
    metric_names: ClassVar = ("saturated",)
    kl: AboveZero = math.log(2)
    """KL divergence of the weights from uniform weights in nats; ln 2 corresponds to weights on half of the group."""
    clip: AboveZero = 16.0
    """Largest advantage."""

    def formula(self, r: Values) -> Values:  # noqa: D102  inherited
        gaps = (r - r.max()) / (r.max() - r.min())
        return _advantages_over_others(_steepness(gaps, divergence=self._target(len(r))) * gaps, clip=self.clip)

    def compared_mask(self, group: Group) -> Bools:
        """Return the [G] mask of the episodes whose rewards are compared."""
        return np.isfinite(group.rewards)

    def metrics(self, group: Group) -> Mapping[str, float]:
        """Return `saturated`: 1 if no β gives the divergence, else 0; nothing if all rewards are equal.

        No β does if m of n rewards are the best, and ln(n/m) is below the divergence.
        """
        rewards = group.rewards[self.compared_mask(group)]
        values = merge_equal(np.ldexp(rewards, -exponent(rewards)))
        if not len(values) or values.min() == values.max():
            return {}
        best = int(np.count_nonzero(values == values.max()))
        return {"saturated": float(math.log(len(values) / best) < self._target(len(values)) * (1 - EQUAL))}

    def _target(self, count: int) -> float:
        """Return the target divergence of `count` weights in nats."""
        return min(self.kl, _REACH * math.log(count))


class EntropicValidAware(EntropicAdaptive):
    """The formula of `entropic_adaptive` for valid episodes; invalid episodes get a constant negative advantage.

    If many episodes are invalid, `entropic_adaptive` separates valid from invalid, and not good from better. An episode
    is invalid if its metric `valid` is 0 or, without this metric, if its reward is not above 0. If all valid episodes
    are equal, they share the advantage that invalid episodes lose. A group without a valid episode gets 0.

    With the metric, shift and scale invariant; does not sum to zero. Source: ours, after TTT-Discover's estimator.
    """

    name: ClassVar = "entropic_valid_aware"
    penalty: AboveZero = 1.0
    """Negative advantage of an invalid episode; valid episodes get at least −1."""

    def advantages(self, group: Group) -> Values:  # noqa: D102  inherited
        valid = self.compared_mask(group)
        invalid = np.isfinite(group.rewards) & ~valid
        if not valid.any():
            return np.zeros(len(group.episodes))
        advantages = map_rewards(group.rewards, self.formula, in_reward_units=False, valid=valid)
        if not advantages.any():
            advantages[valid] = min(self.penalty * invalid.sum() / valid.sum(), self.clip)
        advantages[invalid] = -self.penalty
        return advantages

    def compared_mask(self, group: Group) -> Bools:
        """Return the [G] mask of the valid episodes with a reward."""
        valid = [e.metrics["valid"] != 0 if "valid" in e.metrics else (e.reward or 0) > 0 for e in group.episodes]
        return np.isfinite(group.rewards) & np.array(valid, np.bool_)


def _advantages_over_others(logits: Values, *, clip: float) -> Values:
    """Return A_i = min(e^{x_i} / mean_{j≠i} e^{x_j} − 1, `clip`) for [n] logits x with maximum 0."""
    logits = np.maximum(logits, _LOGIT_MIN)
    count, best = len(logits), int(np.argmax(logits))
    above = np.expm1(logits)  # exact for logits close to 0
    others = (above.sum() - above) / (count - 1)
    # for a single best logit, `others` may be only rounding errors: compute it relative to the second best
    rest = np.delete(logits, best)
    others[best] = np.expm1(rest - rest.max()).mean()
    log_mean = np.log1p(others)
    log_mean[best] += rest.max()
    return np.minimum(np.expm1(np.minimum(logits - log_mean, math.log1p(clip))), clip)


def _steepness(gaps: Values, *, divergence: float) -> float:
    """Solve KL(softmax(b·gaps) ‖ uniform) = `divergence` for b ≥ 0 by bisection, up to `_STEEPNESS_MAX`.

    Args:
        gaps: [n] in [−1, 0]; 0 for the best reward.
    """
    high = 1.0
    while _divergence(high * gaps) < divergence and high < _STEEPNESS_MAX:
        high *= 2
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _divergence(middle * gaps) < divergence:
            low = middle
        else:
            high = middle
    return high


def _divergence(logits: Values) -> float:
    """Return KL(softmax(logits) ‖ uniform) in nats for [n] logits with maximum 0."""
    weights = np.exp(logits)
    total = float(weights.sum())
    return math.log(len(logits)) - math.log(total) + float(weights @ logits) / total
