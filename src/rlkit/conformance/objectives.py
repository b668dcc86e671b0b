"""Formulas of the protocol's losses, in float64: the values and gradients that a service's answers are tested with.

For each token, p is the trained model's log-probability, q the sampler's, A the advantage and r = exp(p − q). A loss is
a sum over tokens, and its gradient is Σ c · ∇p with the coefficient c of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tinker.types import LossFnType

type Values = NDArray[np.float64]
type Formula = Callable[[Values, Values, Values], Values]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of the protocol.

    Args:
        value: the loss of each token, from p, q and A.
        coefficient: c of each token, from the same.
        settings: `loss_fn_config`; without entries the service's defaults apply.
    """

    loss: LossFnType
    value: Formula
    coefficient: Formula
    settings: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_sequence_ratio(self) -> bool:
        """True if one ratio applies to all tokens of a sequence."""
        return self.loss == "gspo"


def _clipped(low: float, high: float, ratio: Callable[[Values, Values], Values]) -> tuple[Formula, Formula]:
    def value(p: Values, q: Values, a: Values) -> Values:
        return -np.minimum(ratio(p, q) * a, np.clip(ratio(p, q), low, high) * a)

    def coefficient(p: Values, q: Values, a: Values) -> Values:
        r = ratio(p, q)
        return np.where(r * a <= np.clip(r, low, high) * a, -r * a, 0.0)

    return value, coefficient


def _cispo(low: float, high: float) -> tuple[Formula, Formula]:
    def coefficient(p: Values, q: Values, a: Values) -> Values:
        return -np.clip(np.exp(p - q), low, high) * a

    return lambda p, q, a: coefficient(p, q, a) * p, coefficient


def _dro(beta: float) -> tuple[Formula, Formula]:
    return lambda p, q, a: -(p * a - beta / 2 * (p - q) ** 2), lambda p, q, a: -(a - beta * (p - q))


def _token_ratio(p: Values, q: Values) -> Values:
    return np.exp(p - q)


def _sequence_ratio(p: Values, q: Values) -> Values:
    return np.full_like(p, np.exp((p - q).mean()))


def _importance(p: Values, q: Values, a: Values) -> Values:
    return -np.exp(p - q) * a


_BOUNDS = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}

CROSS_ENTROPY = Objective("cross_entropy", lambda p, q, a: -p * a, lambda p, q, a: -a)

OBJECTIVES = {
    "importance_sampling": Objective("importance_sampling", _importance, _importance),
    "ppo": Objective("ppo", *_clipped(0.8, 1.2, _token_ratio)),
    "ppo, thresholds": Objective("ppo", *_clipped(0.5, 1.5, _token_ratio), _BOUNDS),
    "cispo": Objective("cispo", *_cispo(0.0, 4.0)),
    "cispo, thresholds": Objective("cispo", *_cispo(0.5, 1.5), _BOUNDS),
    "dro": Objective("dro", *_dro(0.05)),
    "dro, beta": Objective("dro", *_dro(0.5), {"beta": 0.5}),
    "gspo": Objective("gspo", *_clipped(0.8, 1.2, _sequence_ratio)),
    "gspo, thresholds": Objective("gspo", *_clipped(0.5, 1.5, _sequence_ratio), _BOUNDS),
}
"""Losses with q and A, by the name of their check."""
