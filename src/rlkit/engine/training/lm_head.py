"""Output layer in training: log-probabilities, losses and their gradients.

Invariant: logits exist for at most `_HEAD_ROWS` positions at a time. Every loss is a function of each token's own
log-probability, so its gradient can be computed directly from the logits. The output layer's backward pass therefore
runs together with the forward pass, for positions with a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.engine.model.lora import Lora
from rlkit.engine.model.matrices import Matrix, matmul, multiply_transposed
from rlkit.engine.model.ops import exponentiate_rows
from rlkit.engine.model.weights import Weights
from rlkit.engine.training.losses import Inputs, Loss

_HEAD_ROWS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Target tokens of a micro-batch."""

    rows: Tensor  # [Q] int64, the hidden state that predicts each target, ascending for `Head`; targets may share rows
    tokens: Tensor  # [Q] int64
    inputs: Inputs  # loss inputs, each [Q] float32

    def reorder(self, order: Tensor) -> Targets:
        """Return the targets in the order of the indices `order [Q] int64`."""
        inputs = {name: values[order] for name, values in self.inputs.items()}
        return Targets(self.rows[order], self.tokens[order], inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Output layer: logits = h W + the unembedding's adapter, [V] per row."""

    weight: Matrix  # [E, V]
    lora: Lora | None  # the unembedding's adapter
    scratch: Tensor  # of `head_scratch`, for logits: allocating memory per chunk would take as long as the logits

    def logprobs(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Return the log-probabilities [Q] float32 of the targets."""
        logprobs = torch.empty(len(targets.rows), device=hidden.device)
        for rows, pairs in _chunks(targets.rows, len(hidden)):
            logits = self._logits(hidden[rows])
            logprobs[pairs] = _target_logprobs(logits, targets.rows[pairs] - rows.start, targets.tokens[pairs])[0]
        return logprobs

    def backward(self, hidden: Tensor, targets: Targets, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities [Q], losses [Q] and the gradient of the summed loss at `hidden [N, E]`.

        The gradient of the adapter is added to its `grad`.
        """
        count = len(targets.rows)
        logprobs, losses = torch.empty(count, device=hidden.device), torch.empty(count, device=hidden.device)
        upstream = torch.zeros_like(hidden)
        for rows, pairs in _chunks(targets.rows, len(hidden)):
            row, tokens = targets.rows[pairs] - rows.start, targets.tokens[pairs]
            h = hidden[rows]
            logits = self._logits(h)
            logprobs[pairs], masses, total_mass = _target_logprobs(logits, row, tokens)
            inputs = {name: values[pairs] for name, values in targets.inputs.items()}
            losses[pairs], slope = loss.gradient(logprobs[pairs], inputs)
            # ∂ logp / ∂ logits = onehot(target) − softmax
            total_slope = torch.zeros(len(h), device=h.device).index_add_(0, row, slope)
            has_gradient = torch.zeros(len(h), dtype=torch.bool, device=h.device)
            has_gradient[row[slope != 0]] = True
            active = has_gradient.nonzero()[:, 0]
            if not len(active):
                continue
            if len(active) < len(h):
                masses = masses[active]
            by_logits = masses.mul_((-total_slope / total_mass)[active, None])
            active_row = torch.cumsum(has_gradient, 0) - 1
            in_active = has_gradient[row]
            by_logits.index_put_((active_row[row[in_active]], tokens[in_active]), slope[in_active], accumulate=True)
            upstream[rows.start + active] = self._upstream(h[active], by_logits.to(h.dtype))
        return logprobs, losses, upstream

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = matmul(hidden, self.weight, out=self.scratch)
        if self.lora is not None:
            logits += self.lora.delta(hidden)
        return logits.float()

    def _upstream(self, hidden: Tensor, by_logits: Tensor) -> Tensor:
        """Return the gradient at `hidden [n, E]` from the gradient at the logits, `by_logits [n, V]`."""
        upstream = multiply_transposed(by_logits, self.weight)
        if self.lora is not None:
            a, (b,) = self.lora.a, self.lora.bs
            by_inner = (by_logits @ b.t().to(by_logits.dtype)) * self.lora.scale
            upstream += by_inner @ a.to(by_inner.dtype)
            assert a.grad is not None  # the learner makes it a view of the flat gradient
            assert b.grad is not None
            a.grad += by_inner.t() @ hidden
            b.grad += ((hidden @ a.t().to(hidden.dtype)) * self.lora.scale).t() @ by_logits
        return upstream


def head_scratch(weights: Weights) -> Tensor:
    """Allocate memory for the logits of one chunk; pages take memory only after they are written."""
    return weights.norm.new_empty(_HEAD_ROWS, weights.config.vocab_size)


def _chunks(rows: Tensor, count: int) -> list[tuple[slice, slice]]:
    """Split `count` hidden states into chunks of at most 128, each with the slice of its targets."""
    edges = [*range(0, count, _HEAD_ROWS), count]
    pairs = [int(index) for index in torch.searchsorted(rows.cpu(), torch.tensor(edges))]
    chunks = zip(edges, edges[1:], pairs, pairs[1:], strict=False)
    return [(slice(start, end), slice(first, last)) for start, end, first, last in chunks if last > first]


def _target_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each token [Q], and each row's weights [n, V] and their sum [n].

    The weights overwrite `logits`; divided by their sum they are probabilities.
    """
    target_logits = logits[rows, tokens]
    peaks, total = exponentiate_rows(logits)
    return target_logits - peaks[rows] - total.log()[rows], logits, total
