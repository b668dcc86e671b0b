"""The temperature of the entropic estimators: which weights softmax(βr) are as far from equal ones as is asked for.

Invariant: KL(softmax(βr) ‖ uniform) grows with β, so that there is one β or none.
"""

from __future__ import annotations

import math

import numpy as np

from rlkit.algorithms.reward_scale import EQUAL, Values, exponent, settled

_REACH = 0.9  # of ln n, the divergence of all weight on one episode: near it a weight on the others is next to nothing
_STEEPEST = 2.0**50  # past this, in 1/spread, only rewards that are equal would still share their weight
_BISECTIONS = 60  # as many as a float64 has bits to settle, and a few more
_LEAST = -1e300  # stands for minus infinity, which could not be subtracted from itself


def adaptive(rewards: Values, *, kl: float, clip: float) -> Values:
    """[n] advantages with the β at which KL(softmax(βr) ‖ uniform) is `kl`, or as near to it as weights can be.

    Args:
        rewards: [n], not all equal and in a unit in which none is above 1.
        kl: the divergence, in nats.
        clip: largest advantage.
    """
    gaps = (rewards - rewards.max()) / (rewards.max() - rewards.min())
    steepness = _steepness(gaps, divergence=_looked_for(len(gaps), kl))
    return against_others(steepness * gaps, clip=clip)


def saturated(rewards: Values, *, kl: float) -> bool | None:
    """Whether no β of `entropic_adaptive` gives the divergence that is looked for, as too many share the best reward.

    With m of n at the best, weights can be no further than ln(n/m) from equal ones.

    Args:
        rewards: [n] that are compared, all finite.
        kl: the divergence, in nats.

    Returns:
        None where nothing is looked for: the rewards are equal.
    """
    values = settled(np.ldexp(rewards, -exponent(rewards)))
    if not len(values) or values.min() == values.max():
        return None
    best = int(np.count_nonzero(values == values.max()))
    return math.log(len(values) / best) < _looked_for(len(values), kl) * (1 - EQUAL)


def against_others(logits: Values, *, clip: float) -> Values:
    """A_i = e^{x_i} / mean_{j≠i} e^{x_j} − 1, at most `clip`, of [n] logits x of which the largest is 0."""
    logits = np.maximum(logits, _LEAST)
    count, best = len(logits), int(np.argmax(logits))
    above = np.expm1(logits)  # keeps what differs by little from the best
    others = (above.sum() - above) / (count - 1)
    # For the best alone the sum may be nothing but rounding errors: the largest of the others takes its place.
    rest = np.delete(logits, best)
    others[best] = np.expm1(rest - rest.max()).mean()
    log_mean = np.log1p(others)
    log_mean[best] += rest.max()
    return np.minimum(np.expm1(np.minimum(logits - log_mean, math.log1p(clip))), clip)


def _looked_for(count: int, kl: float) -> float:
    """The divergence, in nats, that so many weights are to have."""
    return min(kl, _REACH * math.log(count))


def _steepness(gaps: Values, *, divergence: float) -> float:
    """The b ≥ 0 with KL(softmax(b·gaps) ‖ uniform) = divergence, by bisection; the steepest where none is enough.

    Args:
        gaps: [n] in [−1, 0], with 0 for the best.
        divergence: in nats; KL grows with b.
    """
    high = 1.0
    while _divergence(high * gaps) < divergence and high < _STEEPEST:
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
    """KL(softmax(logits) ‖ uniform) in nats, of [n] logits of which the largest is 0."""
    weights = np.exp(logits)
    total = float(weights.sum())
    return math.log(len(logits)) - math.log(total) + float(weights @ logits) / total
