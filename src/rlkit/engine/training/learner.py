"""Gradients and optimiser steps of one LoRA model.

Invariant: the gradient accumulates over calls of `run` until `step`, which applies and clears it. The same
calls in the same order give the same bits, for any number of threads. After a failed call, whose gradient is partial,
`step` raises an error.

Memory is bounded for any batch: sequences are packed into micro-batches, of about 512 tokens on a CPU, and at most
`_SHARES` micro-batches are computed at a time, each from its forward pass to the end of its backward pass.
"""

from __future__ import annotations

import math
from collections import ChainMap, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit._util.activity import Activity
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.lora import Adapter
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights
from rlkit.engine.training.lm_head import Head, Targets, head_scratch
from rlkit.engine.training.losses import LOSSES, SEQUENCE, Loss, sequence_log_ratio
from rlkit.engine.training.packing import Example, MicroBatch, micro_batches
from rlkit.errors import UsageError

# Number of shares of the micro-batches, each with its own gradient. It is fixed: the bits of their sum depend on it.
_SHARES = 2
_TO_GO = "training sequences to go"


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """Summed loss, and log-probabilities: one float32 array per example, with the shape of its targets."""

    logprobs: list[NDArray[np.float32]]
    loss: float


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of an optimiser step; weight decay is decoupled, and `grad_clip_norm` 0 disables clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class Scheduler(Protocol):
    """Scheduler to which a long request yields between micro-batches."""

    @property
    def should_yield(self) -> bool:
        """True if other work is waiting; may be read from any thread."""
        ...

    def let_others_run(self) -> None:
        """Run other work for a limited time."""
        ...


class Learner:
    """A model in training.

    Args:
        moments: [2, P], Adam's running averages of the gradient and of its square; zeros by default.
        steps: number of optimiser steps that led to `adapter`.
    """

    def __init__(
        self,
        weights: Weights,
        adapter: Adapter,
        lanes: Lanes,
        *,
        moments: Tensor | None = None,
        steps: int = 0,
        activity: Activity | None = None,
    ) -> None:
        device = weights.norm.device
        self.weights = weights
        self.adapter = adapter.to(device)
        self.moments = torch.zeros(2, len(adapter.flat), device=device) if moments is None else moments.to(device)
        self.steps = steps
        self._activity = activity or Activity()
        self.gradients = torch.zeros(_SHARES, len(adapter.flat), device=device)
        self._gradient_is_partial = False
        self._lanes = lanes
        self._batch_tokens = batch_limits(device).train_tokens
        self._adapters = [self._make_share_adapter(gradient) for gradient in self.gradients]

    def _make_share_adapter(self, gradient: Tensor) -> Adapter:
        """Make an adapter on the same memory whose matrices are autograd leaves with gradients in `gradient [P]`."""
        config, settings = self.adapter.config, self.adapter.settings
        share = Adapter(config, settings, self.adapter.flat, trainable=True)
        for name, view in Adapter(config, settings, gradient).views.items():
            share.views[name].grad = view
        return share

    def step(self, settings: AdamSettings) -> float:
        """Take a step of AdamW (Loshchilov and Hutter 2019); return the gradient's norm before clipping.

        Raises:
            UsageError: the gradient is partial or not finite, or the new weights are not; the weights do not change.
        """
        gradient, is_partial = self.gradients.sum(0), self._gradient_is_partial
        self.gradients.zero_()
        self._gradient_is_partial = False
        if is_partial:
            raise UsageError(
                "optim_step: a forward_backward of this step failed, so the weights were not changed and the gradient "
                "was cleared; send all forward_backward requests of this step again"
            )
        norm = float(gradient.square().sum(dtype=torch.float64).sqrt())
        if not math.isfinite(norm):
            raise UsageError(
                "optim_step: the accumulated gradient is not finite, so the weights were not changed and the gradient "
                "was cleared; check advantages and log-probabilities for extreme values"
            )
        if 0 < settings.grad_clip_norm < norm:
            gradient.mul_(settings.grad_clip_norm / norm)
        steps = self.steps + 1
        mean = self.moments[0].lerp(gradient, 1 - settings.beta1)
        square = (self.moments[1] * settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        denominator = (square / (1 - settings.beta2**steps)).sqrt_().add_(settings.eps)
        flat = self.adapter.flat * (1 - settings.learning_rate * settings.weight_decay)
        flat.addcdiv_(mean, denominator, value=-settings.learning_rate / (1 - settings.beta1**steps))
        if not bool(torch.isfinite(flat).all()) or not bool(torch.isfinite(square).all()):
            raise UsageError(
                f"optim_step: with learning_rate {settings.learning_rate} and weight_decay {settings.weight_decay} the "
                "weights would not be finite, so they were not changed; use smaller values"
            )
        self.steps = steps
        self.adapter.flat.copy_(flat)
        self.moments[0], self.moments[1] = mean, square
        return norm

    def run(
        self, examples: Sequence[Example], loss: Loss, *, backward: bool = True, scheduler: Scheduler | None = None
    ) -> LossOutput:
        """Compute the loss and log-probabilities.

        Args:
            backward: add the gradient of the summed loss to the accumulated one.
        """
        examples = _complete_inputs(examples, loss)
        _check_examples(examples, loss.name, self.weights.config)
        packed = micro_batches([example.tokens for example in examples], self._batch_tokens, _SHARES)
        shares = [
            _Share(adapter, deque(batches), head_scratch(self.weights))
            for adapter, batches in zip(self._adapters, packed, strict=True)
        ]
        run_share = partial(self._run_share, examples=examples, loss=loss, scheduler=scheduler, backward=backward)
        self._activity.add(_TO_GO, len(examples))
        try:
            while any(share.waiting for share in shares):
                if scheduler is not None and scheduler.should_yield:
                    scheduler.let_others_run()
                self._lanes.run([partial(run_share, share) for share in shares if share.waiting])
        except Exception:
            self._gradient_is_partial |= backward
            raise
        finally:
            self._activity.add(_TO_GO, sum(len(share.logprobs) for share in shares) - len(examples))  # not run
        logprobs = ChainMap(*(share.logprobs for share in shares))
        total = math.fsum(loss for share in shares for loss in share.losses)
        return LossOutput([logprobs[i] for i in range(len(examples))], total)

    def _run_share(
        self, share: _Share, *, examples: Sequence[Example], loss: Loss, scheduler: Scheduler | None, backward: bool
    ) -> None:
        """Run the share's waiting micro-batches until all are done, or until the scheduler has other work."""
        while share.waiting:
            self._lanes.raise_if_halted()
            batch = share.waiting.popleft()
            logp, losses = self._run_micro_batch(share, batch, examples, loss, backward=backward)
            share.losses.append(float(losses.sum(dtype=torch.float64)))
            values, start = logp.cpu().numpy(), 0
            for index in batch.examples:
                shape = examples[index].targets.shape
                end = start + math.prod(shape)
                share.logprobs[index] = values[start:end].reshape(shape)
                start = end
            self._activity.add(_TO_GO, -len(batch.examples))
            if scheduler is not None and scheduler.should_yield:
                return

    def _run_micro_batch(
        self, share: _Share, batch: MicroBatch, examples: Sequence[Example], loss: Loss, *, backward: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and losses, [Q] each, of the targets of the micro-batch's examples in order."""
        device = self.weights.norm.device
        targets = _concatenate_targets(batch, examples, device)
        # Skip the backward pass if all advantages are 0, as in a group of equal rewards.
        backward = backward and _may_have_gradient(loss, targets)
        with torch.set_grad_enabled(backward):
            tokens = torch.from_numpy(batch.tokens).to(device)
            hidden = compute_hidden(self.weights, tokens, batch.spans, adapter=share.adapter)
        with torch.no_grad():
            head = Head(self.weights.output, share.adapter.unembed(), share.scratch)
            # The output layer needs the targets of a row next to each other.
            order = torch.argsort(targets.rows, stable=True)
            if loss.by_sequence:
                sorted_logp = head.logprobs(hidden, targets.reorder(order))
                unsorted_logp = torch.empty_like(sorted_logp).index_copy_(0, order, sorted_logp)
                targets = _with_sequence_ratio(targets, batch, examples, unsorted_logp)
            sorted_targets = targets.reorder(order)
            if backward:
                logp, losses, upstream = head.backward(hidden.detach(), sorted_targets, loss)
            else:
                logp, upstream = head.logprobs(hidden, sorted_targets), None
                losses = loss(logp, sorted_targets.inputs)
            inverse_order = torch.argsort(order)
        if upstream is not None and hidden.requires_grad:
            # The same gradient as `hidden.backward(upstream)`, for which torch would import sympy, which takes seconds.
            (hidden * upstream).sum().backward()
        return logp[inverse_order], losses[inverse_order]


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """A share of a request's micro-batches, computed one at a time, and the results so far."""

    adapter: Adapter
    waiting: deque[MicroBatch]
    scratch: Tensor
    logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])
    losses: list[float] = field(default_factory=list[float])


def _concatenate_targets(batch: MicroBatch, examples: Sequence[Example], device: torch.device) -> Targets:
    pairs = [(rows, examples[index]) for index, rows in batch.examples.items()]

    def concatenate(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])).to(device)

    rows = [np.repeat(rows, example.targets.size // len(rows)) for rows, example in pairs]
    inputs = {name: concatenate([example.inputs[name] for _, example in pairs]) for name in pairs[0][1].inputs}
    return Targets(concatenate(rows), concatenate([example.targets for _, example in pairs]), inputs)


def _with_sequence_ratio(targets: Targets, batch: MicroBatch, examples: Sequence[Example], logp: Tensor) -> Targets:
    """Add to each target the log-ratio of its sequence."""
    sizes = [examples[index].targets.size for index in batch.examples]
    ends = np.cumsum(sizes).tolist()
    ratios: list[Tensor] = []
    for end, size in zip(ends, sizes, strict=True):
        span = slice(end - size, end)
        ratios.append(sequence_log_ratio(logp[span], {name: values[span] for name, values in targets.inputs.items()}))
    return replace(targets, inputs={**targets.inputs, SEQUENCE: torch.cat(ratios)})


def _complete_inputs(examples: Sequence[Example], loss: Loss) -> Sequence[Example]:
    """Return examples with the defaults of the optional inputs that only some of them have."""
    names = {name for example in examples for name in example.inputs} & {*LOSSES[loss.name].optional}
    defaults = {name: np.float32(loss.settings.get(name, 1.0)) for name in names}  # a weight is 1

    def complete(example: Example) -> Example:
        rows = {name: np.full(example.targets.shape, defaults[name]) for name in names - example.inputs.keys()}
        return replace(example, inputs={**example.inputs, **rows}) if rows else example

    return [complete(example) for example in examples]


def _check_examples(examples: Sequence[Example], loss: str, config: ModelConfig) -> None:
    """Raise `UsageError`, with example and field, for invalid input, which could otherwise give wrong results."""
    spec = LOSSES[loss]
    for i, example in enumerate(examples):
        length = len(example.tokens)
        if not length:
            raise UsageError(f"data[{i}]: model_input is empty")
        if length > config.max_positions:
            raise UsageError(f"data[{i}]: {length} tokens exceed the context of {config.max_positions}")
        for name, values in (("model_input", example.tokens), ("target_tokens", example.targets)):
            if values.size and (values.min() < 0 or values.max() >= config.vocab_size):
                raise UsageError(f"data[{i}]: {name} has a token outside 0 … {config.vocab_size - 1}")
        for name in spec.required:
            if name not in example.inputs:
                raise UsageError(f"data[{i}]: {loss} needs loss_fn_inputs[{name!r}]")
        shape = (length, *example.targets.shape[1:2])
        for name, values in {"target_tokens": example.targets, **example.inputs}.items():
            if name not in ("target_tokens", *spec.required, *spec.optional):
                raise UsageError(f"data[{i}]: {loss} takes no loss_fn_inputs[{name!r}]")
            if values.shape != shape or not values.size:
                raise UsageError(
                    f"data[{i}]: {name} has shape {list(values.shape)}, but model_input has {length} tokens"
                    + (f" and target_tokens has shape {list(example.targets.shape)}" if len(shape) == 2 else "")
                )
            if not np.isfinite(values).all():
                raise UsageError(f"data[{i}]: {name} has a value that is not finite")


def _may_have_gradient(loss: Loss, targets: Targets) -> bool:
    factor = targets.inputs.get("weights" if loss.name == "cross_entropy" else "advantages")
    return loss.name == "dro" or factor is None or bool(factor.any())  # dro has a quadratic term, too
