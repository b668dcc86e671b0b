"""Checks of losses and gradients.

A gradient is tested without access to weights. Adam with a huge `eps` takes a gradient step, −rate/eps · g. A step of
cross-entropy changes the log-probability of token t by s_t = −rate/eps · ∇p_t · ∇CE. A step of another loss, whose
gradient is Σ c_t ∇p_t, changes the cross-entropy by −rate/eps · Σ c_t ∇p_t · ∇CE = Σ c_t s_t. Each change is a slope at
0, extrapolated from a step and half a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tinker
from tinker import types

from rlkit.conformance.objectives import Objective, Values
from rlkit.conformance.probe import SGD_EPS, ServiceProbe, expect, expect_close, make_datum, read_logprobs


def check_cross_entropy(probe: ServiceProbe) -> str:
    """Compare the loss with −Σ w · p of the returned log-probabilities, for weights between −0.5 and 2."""
    weights = np.linspace(-0.5, 2.0, len(probe.text) - 1)
    output = probe.forward(probe.trainer, make_datum(probe.text, weights=weights.tolist()))
    (p,) = read_logprobs(output)
    expect(p.shape == weights.shape, f"{len(p)} log-probabilities of {len(weights)} targets")
    expect((p < 0).all(), "a log-probability is not negative")
    return expect_close(output.metrics["loss:sum"], -(weights * p).sum(), tolerance=1e-3)


def check_loss(probe: ServiceProbe, *, objective: Objective) -> str:
    """Compare the sum over two data with the formula."""
    datum, q, advantages = _draw_datum(probe, objective)
    output = probe.forward(probe.trainer, datum, datum, objective=objective)
    expected = 2 * objective.value(read_logprobs(output)[0], q, advantages).sum()
    return expect_close(output.metrics["loss:sum"], expected, tolerance=1e-3)


def check_optional_weights(probe: ServiceProbe) -> str:
    """Leave the weights out of one of two data: they are 1."""
    half = make_datum(probe.text, weights=[0.5] * (len(probe.text) - 1))
    output = probe.forward(probe.trainer, make_datum(probe.text), half)
    return expect_close(output.metrics["loss:sum"], -1.5 * probe.start_logprobs.sum(), tolerance=1e-3)


def check_soft_targets(probe: ServiceProbe) -> str:
    """Give one position a second target; the weights are 0.75 and 0.25."""
    targets, weights = np.zeros((len(probe.text) - 1, 2), np.int64), np.zeros((len(probe.text) - 1, 2), np.float32)
    targets[:, 0], weights[:, 0] = probe.text[1:], 0.75
    targets[2, 1], weights[2, 1] = 40, 0.25
    inputs = {"target_tokens": types.TensorData.from_numpy(targets), "weights": types.TensorData.from_numpy(weights)}
    soft = types.Datum(model_input=types.ModelInput.from_ints(probe.text[:-1]), loss_fn_inputs=inputs)
    other = probe.logprobs(probe.trainer, [*probe.text[:3], 40])[2]
    loss = probe.forward(probe.trainer, soft).metrics["loss:sum"]
    return expect_close(loss, -0.75 * probe.start_logprobs.sum() - 0.25 * other, tolerance=1e-3)


def check_custom_loss(probe: ServiceProbe) -> str:
    """Compare a step of Σ v · p²/2 as a custom loss, with v of both signs, with the steps of its tokens."""
    p = probe.start_logprobs
    v = np.where(np.arange(len(p)) % 3, 1.0, -1 / 3) / np.abs(p).mean()

    def backward(trainer: tinker.TrainingClient) -> None:
        probe.usage.add_training(2 * len(probe.text))
        trainer.forward_backward_custom([probe.datum], lambda _, q: ((q[0].new_tensor(v) * q[0] ** 2).sum() / 2, {}))

    return _compare_gradient(probe, backward, v * p)


def check_large_batch(probe: ServiceProbe) -> str:
    """Send 1,100 data, which the SDK splits into two requests; their answers are joined in order."""
    data = [make_datum([32 + i % 90, 32 + i // 90, 32 + i % 7]) for i in range(1100)]
    output = probe.forward(probe.trainer, *data)
    rows = read_logprobs(output)
    expect(len(rows) == len(data), f"{len(rows)} answers of {len(data)} data")
    for index in (0, 1023, 1024, 1099):
        expect_close(rows[index], read_logprobs(probe.forward(probe.trainer, data[index]))[0])
    return expect_close(output.metrics["loss:sum"], -np.concatenate(rows).sum(), tolerance=1e-3)


def check_forward(probe: ServiceProbe) -> str:
    """Take a step after a forward pass only: nothing changes."""

    def train(trainer: tinker.TrainingClient) -> None:
        probe.forward(trainer, probe.datum)
        probe.wait(trainer.optim_step(types.AdamParams(learning_rate=probe.adam_rate)))

    change = float(np.abs(probe.change(train)).max())
    expect(change < 0.02, f"log-probabilities change by {change:.2g}")
    return f"largest change {change:.1g}"


def check_size(probe: ServiceProbe) -> str:
    """Take a gradient step: the loss falls by rate/eps · ‖g‖², where the service reports the norm."""
    metrics = probe.step(probe.fork(), rate=probe.sgd_rate, eps=SGD_EPS)
    fall = float(probe.text_slopes.sum())
    expect(fall > 0, f"a step along the gradient raises the loss by {-fall:.3g}")
    if "unclipped_grad_l2:mean" not in metrics:
        return f"falls by {fall:.3g} nats; no norm reported"
    difference = expect_close(metrics["unclipped_grad_l2:mean"] ** 2 * probe.sgd_rate / SGD_EPS, fall)
    return f"falls by {fall:.3g} nats, as the reported norm says: {difference}"


def check_weighted_gradient(probe: ServiceProbe) -> str:
    """Compare a step of weighted cross-entropy with the steps of its tokens."""
    weights = np.linspace(0.0, 2.0, len(probe.text) - 1)
    datum = make_datum(probe.text, weights=weights.tolist())
    return _compare_gradient(probe, lambda trainer: probe.backward(trainer, datum), -weights)


def check_gradient(probe: ServiceProbe, *, objective: Objective) -> str:
    """Compare a step of a loss with the steps of its tokens."""
    datum, q, advantages = _draw_datum(probe, objective)
    coefficients = objective.coefficient(probe.start_logprobs, q, advantages)
    return _compare_gradient(probe, lambda trainer: probe.backward(trainer, datum, objective=objective), coefficients)


def check_accumulation(probe: ServiceProbe) -> str:
    """Take a step of two equal data at half the rate, in one request and in two, and one of one at the whole rate."""

    def train(trainer: tinker.TrainingClient) -> None:
        probe.backward(trainer, probe.datum)
        probe.descend(trainer, share=0.5)

    whole = probe.change(probe.descend)
    expect_close(probe.change(lambda trainer: probe.descend(trainer, probe.datum, probe.datum, share=0.5)), whole)
    return expect_close(probe.change(train), whole)


def _compare_gradient(probe: ServiceProbe, backward: Callable[[tinker.TrainingClient], object], c: Values) -> str:
    """Compare the slope of the cross-entropy along a gradient with the sum of its tokens' slopes, weighted by `c`."""

    def descend(trainer: tinker.TrainingClient, share: float) -> None:
        backward(trainer)
        probe.take_sgd_step(trainer, share)

    return expect_close(-probe.measure_slopes(descend).sum(), (c * probe.text_slopes).sum())


def _draw_datum(probe: ServiceProbe, objective: Objective) -> tuple[types.Datum, Values, Values]:
    """Return a datum with its q and A: ratios on both sides of the bounds, and advantages of both signs.

    The ratio of a sequence is 1.1, or 1.35 if the thresholds are set: between the default and the set bound. Its
    advantages are equal, since the variants of GSPO agree then.
    """
    p, count = probe.start_logprobs, len(probe.text) - 1
    q, advantages = p - np.linspace(-1.0, 1.0, count), np.where(np.arange(count) % 3, 1.2, -0.4)
    inputs = dict[str, list[float]]()
    if objective.has_sequence_ratio:
        q = p - np.log(1.35 if objective.settings else 1.1) + np.linspace(-0.02, 0.02, count)
        advantages, inputs["sequence_ratio_mask"] = np.full(count, 1.2), [1.0] * count
    return make_datum(probe.text, logprobs=q.tolist(), advantages=advantages.tolist(), **inputs), q, advantages
