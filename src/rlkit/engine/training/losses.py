"""Loss functions of the Tinker API; each is a sum over tokens, not a mean.

Invariant: for a fixed `sequence_log_ratio`, a loss is a function of each token's own log-probability. Its gradient is
therefore available before the output layer's backward pass, and no logits have to be stored.

logp: the trained model's log-probability of the target; q: the sampler's; A: the advantage; ratio = exp(logp − q).

    cross_entropy         −w · logp
    importance_sampling   −ratio · A
    ppo                   −min(ratio · A, clip(ratio, low, high) · A)          low 0.8, high 1.2
    cispo                 −stop_gradient(clip(ratio, low, high)) · logp · A    low 0, high 4
    dro                   −(logp · A − ½ β (logp − q)²)                        β 0.05
    gspo                  −min(s · A, clip(s, low, high) · A)                  low 0.8, high 1.2

gspo is the token variant of GSPO: s = stop_gradient(r) · exp(logp − stop_gradient(logp)), where r is the ratio of the
token's sequence, exp(mean of logp − q over the tokens marked by `sequence_ratio_mask`).

(Schulman et al. 2017, eq. 7; MiniMax-M1 2025, eq. 4; Richemond et al. 2024; Zheng et al. 2025, eq. 14; sums as in
Tinker's documentation.)
Thresholds are ratios, not distances to 1. They can also be given per token, as loss inputs of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.errors import UsageError, did_you_mean

type Inputs = Mapping[str, Tensor]
"""The loss inputs of a batch by name, each [N] float32."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Inputs of a loss, required and optional, and its settings with their defaults."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    settings: Mapping[str, float]


SEQUENCE = "sequence_log_ratio"
_LOG_RATIO_MAX = 80.0  # maximum log-ratio; its exponential is finite in float32
_CLIPS = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec((), ("weights",), {}),
    "importance_sampling": LossSpec(("logprobs", "advantages"), (), {}),
    "ppo": LossSpec(("logprobs", "advantages"), _CLIPS, dict(zip(_CLIPS, (0.8, 1.2), strict=True))),
    "cispo": LossSpec(("logprobs", "advantages"), _CLIPS, dict(zip(_CLIPS, (0.0, 4.0), strict=True))),
    "dro": LossSpec(("logprobs", "advantages"), (), {"beta": 0.05}),
    "gspo": LossSpec(
        ("logprobs", "advantages", "sequence_ratio_mask"), _CLIPS, dict(zip(_CLIPS, (0.8, 1.2), strict=True))
    ),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function with its settings, from `make_loss`."""

    name: str
    settings: Mapping[str, float]

    @property
    def by_sequence(self) -> bool:
        """True if the inputs must hold `SEQUENCE`, the result of `sequence_log_ratio`."""
        return self.name == "gspo"

    def __call__(self, logp: Tensor, inputs: Inputs) -> Tensor:
        """Return each token's loss [N] for `logp [N]`."""
        if self.name == "cross_entropy":
            return -inputs["weights"] * logp if "weights" in inputs else -logp
        advantage, q = inputs["advantages"], inputs["logprobs"]
        if self.name == "dro":
            return -(logp * advantage - 0.5 * self.settings["beta"] * (logp - q).square())
        log_ratio = inputs[SEQUENCE] + logp - logp.detach() if self.by_sequence else logp - q
        clips_gradient = self.name in ("ppo", "gspo")
        if clips_gradient:  # the ratio is clipped anyway, and the derivative of an infinite ratio is NaN
            log_ratio = torch.where(advantage > 0, log_ratio.clamp(max=_LOG_RATIO_MAX), log_ratio)
        # A token that was not sampled may have any q. Its ratio may be infinite, and infinity times 0 is NaN.
        ratio = torch.exp(torch.where(advantage == 0, 0.0, log_ratio))
        if self.name == "importance_sampling":
            return -ratio * advantage
        low, high = (inputs[name] if name in inputs else logp.new_tensor(self.settings[name]) for name in _CLIPS)
        clipped = torch.minimum(torch.maximum(ratio, low), high)
        if clips_gradient:
            return -torch.minimum(ratio * advantage, clipped * advantage)
        return -clipped.detach() * logp * advantage

    def gradient(self, logp: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return each token's loss and its derivative with respect to `logp`, both [N]."""
        leaf = logp.detach().requires_grad_(True)
        with torch.enable_grad():
            losses = self(leaf, inputs)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient


def sequence_log_ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return the mean of logp − q over the marked tokens of a sequence, for each token: `logp` and the result [N]."""
    marked = inputs["sequence_ratio_mask"] != 0
    if not marked.any():
        return torch.zeros_like(logp)
    return (logp - inputs["logprobs"])[marked].mean().expand_as(logp)


def make_loss(name: str, settings: Mapping[str, float | str]) -> Loss:
    """Make the loss called `name`; `UsageError` if the name or one of `settings` is unknown or invalid."""
    if name not in LOSSES:
        raise UsageError(
            f"loss_fn {name!r} is not supported by the embedded engine; supported: {', '.join(LOSSES)}."
            f"{did_you_mean(name, LOSSES)}"
        )
    defaults = LOSSES[name].settings
    numbers = dict(defaults)
    for key, value in settings.items():
        if key not in defaults:
            names = ", ".join(defaults) or "none"
            raise UsageError(
                f"loss_fn_config: {name} has no setting {key!r}; its settings: {names}.{did_you_mean(key, defaults)}"
            )
        if isinstance(value, str):
            raise UsageError(f"loss_fn_config: {key} must be a number, not {value!r}")
        if math.isnan(value) or (math.isinf(value) and key != "clip_high_threshold") or value < 0:
            raise UsageError(f"loss_fn_config: {key} must be a number ≥ 0, not {value}")
        numbers[key] = value
    low, high = (numbers.get(name, 0.0) for name in _CLIPS)
    if low > high:
        raise UsageError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return Loss(name, numbers)
