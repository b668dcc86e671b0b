"""Checks of Adam's step, by pairs of training that its formula makes equal.

The first step of Adam with a small `eps` is −rate · sign(g). One of an adapter's two matrices is zero at first, so only
this matrix moves.
"""

from __future__ import annotations

import numpy as np
import tinker

from rlkit.conformance.objectives import Values
from rlkit.conformance.probe import ServiceProbe, expect, expect_close, make_datum

_CLIP_NORM = 1e-3
_CLIP_RATE_MAX = 100.0


def check_scale(probe: ServiceProbe) -> str:
    """Multiply the gradient by 3: the first step is the same."""
    scaled = make_datum(probe.text, weights=[3.0] * (len(probe.text) - 1))
    return expect_close(
        probe.change(lambda trainer: probe.step(trainer, scaled, rate=probe.adam_rate)), _step_once(probe)
    )


def check_momentum(probe: ServiceProbe) -> str:
    """Take a second step without a gradient, for two pairs of β: momentum alone moves the weights.

    With bias correction the second step is the first times [β₁/(1 + β₁)] / √[β₂/(1 + β₂)].
    """
    details = list[str]()
    for beta1, beta2 in ((0.9, 0.95), (0.5, 0.8)):

        def train(trainer: tinker.TrainingClient, beta1: float = beta1, beta2: float = beta2) -> None:
            for datum in (probe.datum, probe.zero_datum):
                probe.step(trainer, datum, rate=probe.adam_rate, beta1=beta1, beta2=beta2)

        ratio = beta1 / (1 + beta1) / np.sqrt(beta2 / (1 + beta2))
        details.append(expect_close(probe.change(train), _step_once(probe, 1 + ratio)))
    return "; ".join(details)


def check_decay(probe: ServiceProbe) -> str:
    """Take a second step without gradient and momentum: both matrices become smaller by 1 − rate · decay."""

    def train(trainer: tinker.TrainingClient) -> None:
        probe.step(trainer, rate=probe.adam_rate, beta1=0.0)
        probe.step(trainer, probe.zero_datum, rate=1.0, beta1=0.0, weight_decay=0.2)

    return expect_close(probe.change(train), _step_once(probe, (1 - 0.2) ** 2))


def check_clipping(probe: ServiceProbe) -> str:
    """Limit the norm of the gradient to a small c, and to 2c at half the rate: the gradient steps are equal."""

    def clip(norm: float, rate: float) -> Values:
        # Beside a gradient of this norm, an eps of 1 is huge.
        return probe.change(lambda trainer: probe.step(trainer, rate=rate, eps=1.0, grad_clip_norm=norm))

    rate = probe.adam_rate
    goal = np.abs(_step_once(probe)).max()
    change = clip(_CLIP_NORM, rate)
    expect(np.abs(change).max() < goal / 4, f"a norm of {_CLIP_NORM} does not limit the step")
    while np.abs(change).max() < goal / 2 and rate < _CLIP_RATE_MAX:
        rate *= 8
        change = clip(_CLIP_NORM, rate)
    return expect_close(clip(2 * _CLIP_NORM, rate / 2), change)


def check_layers(probe: ServiceProbe) -> str:
    """Train attention only, MLP only and the output layer only: each has another effect, with one seed the same."""
    changes = list[Values]()
    for layer in ("attn", "mlp", "unembed", "attn"):
        future = probe.client.create_lora_training_client(
            base_model=probe.model,
            rank=4,
            seed=3,
            train_attn=layer == "attn",
            train_mlp=layer == "mlp",
            train_unembed=layer == "unembed",
        )
        trainer = probe.wait(future)
        probe.step(trainer, rate=probe.adam_rate)
        changes.append(probe.logprobs(trainer) - probe.start_logprobs)
    expect(len({tuple(change.round(6)) for change in changes[:3]}) == 3, "two of the three have equal effects")
    return expect_close(changes[3], changes[0])


def _step_once(probe: ServiceProbe, share: float = 1.0) -> Values:
    return probe.change(lambda trainer: probe.step(trainer, rate=share * probe.adam_rate))
