"""Temperature of the entropic estimators: solve KL(softmax(βr) ‖ uniform) = `kl` for β.

Invariant: the divergence grows with β, so there is at most one solution.
"""

from __future__ import annotations

import math

import numpy as np

from rlkit.algorithms.reward_scale import EQUAL, Values, exponent, merge_equal

_REACH = 0.9  # limit as a share of ln n, the divergence if one episode has all the weight
_STEEPNESS_MAX = 2.0**50  # in 1/spread; steeper weights separate all rewards that are not equal
_BISECTIONS = 60  # a few more than the bits of a float64
_LOGIT_MIN = -1e300  # in place of −inf, because −inf − (−inf) is NaN


def adaptive_advantages(rewards: Values, *, kl: float, clip: float) -> Values:
    """Return [n] advantages with the β at which KL(softmax(βr) ‖ uniform) is `kl`, or as close to it as possible.

    Args:
        rewards: [n], not all equal and scaled to [−1, 1].
        kl: divergence in nats.
        clip: largest advantage.
    """
    gaps = (rewards - rewards.max()) / (rewards.max() - rewards.min())
    return advantages_over_others(_steepness(gaps, divergence=_target(len(gaps), kl)) * gaps, clip=clip)


def saturation_metrics(rewards: Values, *, kl: float) -> dict[str, float]:
    """Return `saturated`: 1 if no β gives `kl`, because m of n rewards are the best and ln(n/m) < `kl`, else 0.

    The result is empty if all rewards are equal.
    """
    values = merge_equal(np.ldexp(rewards, -exponent(rewards)))
    if not len(values) or values.min() == values.max():
        return {}
    best = int(np.count_nonzero(values == values.max()))
    return {"saturated": float(math.log(len(values) / best) < _target(len(values), kl) * (1 - EQUAL))}


def advantages_over_others(logits: Values, *, clip: float) -> Values:
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


def _target(count: int, kl: float) -> float:
    """Return the target divergence of `count` weights in nats."""
    return min(kl, _REACH * math.log(count))


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
