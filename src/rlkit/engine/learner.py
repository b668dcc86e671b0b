"""Gradients and optimiser steps of one LoRA model.

Invariant: the gradient accumulates over `forward_backward` calls until `step`, which applies and clears it; the same
calls in the same order give the same bits.

Memory stays bounded whatever the batch: sequences are packed into micro-batches of about 512 tokens, and logits exist
for `_HEAD_ROWS` positions at a time. Every loss is a function of one token's log-probability, so its gradient is known
as soon as the logits are, and the output layer's backward pass runs on the spot, for the positions that have a
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.lora import Adapter, Lora, slots
from rlkit.engine.losses import LOSSES, Loss
from rlkit.engine.model import trunk
from rlkit.engine.weights import Weights
from rlkit.errors import UsageError

_MICRO_BATCH_TOKENS = 512
_HEAD_ROWS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence: `tokens [N] int64`, `targets [N] int64`, loss inputs by name, each [N] float32."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """Log-probabilities of the targets, one float32 array [N] for each example, and the summed loss."""

    logprobs: list[NDArray[np.float32]]
    loss: float


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """One optimiser step; weight decay is decoupled, a `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class Learner:
    """A model in training.

    Args:
        weights: the frozen base model.
        adapter: trainable.
        moments: [2, P], Adam's running averages of the gradient and of its square; zeros for a new model.
        steps: optimiser steps taken.
    """

    def __init__(self, weights: Weights, adapter: Adapter, *, moments: Tensor | None = None, steps: int = 0) -> None:
        self.weights = weights
        self.adapter = adapter
        self.moments = torch.zeros(2, len(adapter.flat)) if moments is None else moments
        self.steps = steps
        self.gradient = torch.zeros_like(adapter.flat)
        for name, place, shape in slots(adapter.config, adapter.settings):
            adapter.views[name].grad = self.gradient[place].view(shape)

    def forward(self, examples: Sequence[Example], loss: Loss) -> LossOutput:
        """Losses and log-probabilities without a gradient."""
        return self._run(examples, loss, backward=False)

    def forward_backward(self, examples: Sequence[Example], loss: Loss) -> LossOutput:
        """As `forward`, and the gradient of the summed loss is added to what has accumulated."""
        return self._run(examples, loss, backward=True)

    def step(self, settings: AdamSettings) -> float:
        """One step of AdamW (Loshchilov and Hutter 2019); returns the gradient's norm before clipping."""
        norm = float(self.gradient.square().sum(dtype=torch.float64).sqrt())
        if not math.isfinite(norm):
            self.gradient.zero_()
            raise UsageError(
                "optim_step: the accumulated gradient is not finite, so the weights were left alone and the gradient "
                "was cleared; check advantages and log-probabilities for extreme values"
            )
        if 0 < settings.grad_clip_norm < norm:
            self.gradient.mul_(settings.grad_clip_norm / norm)
        self.steps += 1
        flat, (mean, square) = self.adapter.flat, self.moments
        mean.lerp_(self.gradient, 1 - settings.beta1)
        square.mul_(settings.beta2).addcmul_(self.gradient, self.gradient, value=1 - settings.beta2)
        unbiased_root = (square / (1 - settings.beta2**self.steps)).sqrt_().add_(settings.eps)
        if settings.weight_decay:
            flat.mul_(1 - settings.learning_rate * settings.weight_decay)
        flat.addcdiv_(mean, unbiased_root, value=-settings.learning_rate / (1 - settings.beta1**self.steps))
        self.gradient.zero_()
        return norm

    def _run(self, examples: Sequence[Example], loss: Loss, *, backward: bool) -> LossOutput:
        check_examples(examples, loss.name, vocab_size=self.weights.config.vocab_size)
        logprobs: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(examples)
        total = 0.0
        for chosen in micro_batches([len(example.tokens) for example in examples]):
            batch = [examples[i] for i in chosen]
            logp, losses = self._micro_batch(batch, loss, backward=backward)
            total += float(losses.sum(dtype=torch.float64))
            pieces = logp.numpy()
            starts = np.cumsum([0, *(len(example.tokens) for example in batch)])
            for i, start, end in zip(chosen, starts, starts[1:], strict=False):
                logprobs[i] = pieces[start:end].copy()
        return LossOutput(logprobs, total)

    def _micro_batch(self, batch: Sequence[Example], loss: Loss, *, backward: bool) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(np.concatenate([e.tokens for e in batch]))
        targets = torch.from_numpy(np.concatenate([e.targets for e in batch]))
        inputs = {name: torch.from_numpy(np.concatenate([e.inputs[name] for e in batch])) for name in batch[0].inputs}
        lengths = [len(example.tokens) for example in batch]
        # A group without contrast has advantage 0 everywhere: there is nothing to differentiate.
        backward = backward and _may_have_gradient(loss, inputs)
        with torch.set_grad_enabled(backward):
            hidden = trunk(self.weights, tokens, lengths, adapter=self.adapter)
        with torch.no_grad():
            head = _Head(self.weights.head, self.adapter.unembed())
            logp, losses, upstream = head.run(hidden.detach(), targets, loss, inputs, backward=backward)
        if upstream is not None and hidden.requires_grad:
            hidden.backward(upstream)
        return logp, losses


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The output layer: logits = h Wᵀ + the unembedding's adapter, [V] a row."""

    weight: Tensor
    lora: Lora | None

    def run(
        self, hidden: Tensor, targets: Tensor, loss: Loss, inputs: Mapping[str, Tensor], *, backward: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities [N], losses [N] and, with `backward`, the gradient of the summed loss at `hidden [N, E]`.

        The adapter's own gradient is added to its `grad`.
        """
        logprobs, losses = torch.empty(len(hidden)), torch.empty(len(hidden))
        upstream = torch.zeros_like(hidden) if backward else None
        for start in range(0, len(hidden), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            h, target = hidden[rows], targets[rows, None]
            logits = h @ self.weight.t()
            if self.lora is not None:
                logits += self.lora.delta(h)
            normaliser = torch.logsumexp(logits, -1, keepdim=True)
            logp = (logits.gather(1, target) - normaliser)[:, 0]
            logprobs[rows] = logp
            losses[rows], slope = loss.gradient(logp, {name: values[rows] for name, values in inputs.items()})
            chosen = slope.nonzero()[:, 0]
            if upstream is not None and len(chosen):
                # ∂ logp / ∂ logits = onehot(target) − softmax
                if len(chosen) < len(logits):
                    logits, normaliser = logits[chosen], normaliser[chosen]
                by_logits = logits.sub_(normaliser).exp_().mul_(-slope[chosen, None])
                by_logits.scatter_add_(1, target[chosen], slope[chosen, None])
                upstream[start + chosen] = self._backward(h[chosen], by_logits)
        return logprobs, losses, upstream

    def _backward(self, hidden: Tensor, by_logits: Tensor) -> Tensor:
        """The gradient at `hidden [n, E]` for one at the logits, `by_logits [n, V]`."""
        upstream = by_logits @ self.weight
        if self.lora is not None:
            a, (b,) = self.lora.a, self.lora.bs
            by_inner = (by_logits @ b.t()) * self.lora.scale
            upstream += by_inner @ a.t()
            assert a.grad is not None  # the learner gives every parameter its window of the flat gradient
            assert b.grad is not None
            a.grad += hidden.t() @ by_inner
            b.grad += ((hidden @ a) * self.lora.scale).t() @ by_logits
        return upstream


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices into `lengths`, sorted by length and cut into runs of at most 512 tokens (or one longer sequence)."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and tokens + lengths[index] > _MICRO_BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def check_examples(examples: Sequence[Example], loss: str, *, vocab_size: int) -> None:
    """Refuse what would give nonsense instead of an error.

    Raises:
        UsageError: names the example and the field.
    """
    spec = LOSSES[loss]
    names = examples[0].inputs.keys() if examples else ()
    for i, example in enumerate(examples):
        if not len(example.tokens):
            raise UsageError(f"data[{i}]: model_input is empty")
        for name, values in (("model_input", example.tokens), ("target_tokens", example.targets)):
            if values.min() < 0 or values.max() >= vocab_size:
                raise UsageError(f"data[{i}]: {name} holds a token outside 0 … {vocab_size - 1}")
        if example.inputs.keys() != names:
            raise UsageError(f"data[{i}]: loss_fn_inputs differ from those of data[0]")
        for name in spec.required:
            if name not in example.inputs:
                raise UsageError(f"data[{i}]: {loss} needs loss_fn_inputs[{name!r}]")
        for name, values in {"target_tokens": example.targets, **example.inputs}.items():
            if name not in ("target_tokens", *spec.required, *spec.optional):
                raise UsageError(f"data[{i}]: {loss} takes no loss_fn_inputs[{name!r}]")
            if values.shape != example.tokens.shape:
                raise UsageError(
                    f"data[{i}]: {name} has shape {list(values.shape)}, model_input has {len(example.tokens)} tokens"
                )
            if not np.isfinite(values).all():
                raise UsageError(f"data[{i}]: {name} holds a value that is not finite")


def _may_have_gradient(loss: Loss, inputs: Mapping[str, Tensor]) -> bool:
    factor = inputs.get("weights" if loss.name == "cross_entropy" else "advantages")
    return loss.name == "dro" or factor is None or bool(factor.any())
