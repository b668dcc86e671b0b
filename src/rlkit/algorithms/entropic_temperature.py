"""The temperature of the entropic estimators: weights softmax(βr) at a set distance from equal ones.

Invariant: KL(softmax(βr) ‖ uniform) grows with β, so that there is one β or none.
"""

from __future__ import annotations

import math

import numpy as np

from rlkit.algorithms.reward_scale import EQUAL, Values, exponent, merge_equal

_REACH = 0.9  # of ln n, the divergence of all weight on one episode: near it a weight on the others is next to nothing
_STEEPNESS_MAX = 2.0**50  # past this, in 1/spread, only rewards that are equal would still share their weight
_BISECTIONS = 60  # as many as a float64 has bits to settle, and a few more
_LOGIT_MIN = -1e300  # stands for minus infinity, which could not be subtracted from itself


def adaptive_advantages(rewards: Values, *, kl: float, clip: float) -> Values:
    """Return [n] advantages with the β at which KL(softmax(βr) ‖ uniform) is `kl`, or as near to it as can be.

    Args:
        rewards: [n], not all equal and in a unit in which none is above 1.
        kl: the divergence, in nats.
        clip: largest advantage.
    """
    gaps = (rewards - rewards.max()) / (rewards.max() - rewards.min())
    return advantages_over_others(_steepness(gaps, divergence=_target(len(gaps), kl)) * gaps, clip=clip)


def saturation_metrics(rewards: Values, *, kl: float) -> dict[str, float]:
    """Return `saturated`: 1 if too many share the best reward for any β to give `kl`. Empty if all rewards are equal.

    With m of the n finite rewards at the best, weights can be no further than ln(n/m) from equal ones.
    """
    values = merge_equal(np.ldexp(rewards, -exponent(rewards)))
    if not len(values) or values.min() == values.max():
        return {}
    best = int(np.count_nonzero(values == values.max()))
    return {"saturated": float(math.log(len(values) / best) < _target(len(values), kl) * (1 - EQUAL))}


def advantages_over_others(logits: Values, *, clip: float) -> Values:
    """Return A_i = e^{x_i} / mean_{j≠i} e^{x_j} − 1, at most `clip`, of [n] logits x of which the largest is 0."""
    logits = np.maximum(logits, _LOGIT_MIN)
    count, best = len(logits), int(np.argmax(logits))
    above = np.expm1(logits)  # keeps what differs by little from the best
    others = (above.sum() - above) / (count - 1)
    # For the best alone the sum may be nothing but rounding errors: the largest of the others takes its place.
    rest = np.delete(logits, best)
    others[best] = np.expm1(rest - rest.max()).mean()
    log_mean = np.log1p(others)
    log_mean[best] += rest.max()
    return np.minimum(np.expm1(np.minimum(logits - log_mean, math.log1p(clip))), clip)


def _target(count: int, kl: float) -> float:
    """Return the divergence, in nats, that so many weights are to have."""
    return min(kl, _REACH * math.log(count))


def _steepness(gaps: Values, *, divergence: float) -> float:
    """Return b ≥ 0 with KL(softmax(b·gaps) ‖ uniform) = divergence, by bisection; the steepest if none is enough.

    Args:
        gaps: [n] in [−1, 0], with 0 for the best.
        divergence: in nats; KL grows with b.
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
    """Return KL(softmax(logits) ‖ uniform) in nats, of [n] logits of which the largest is 0."""
    weights = np.exp(logits)
    total = float(weights.sum())
    return math.log(len(logits)) - math.log(total) + float(weights @ logits) / total
