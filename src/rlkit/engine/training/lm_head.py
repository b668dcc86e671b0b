"""The output layer in training: log-probabilities, losses, and the gradient of both.

Invariant: logits exist for at most `_HEAD_ROWS` positions at a time. Every loss is a function of each token's own
log-probability, so its gradient is known as soon as the logits are, and the output layer's backward pass runs on the
spot, for the positions that have a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.engine.model.lora import Lora
from rlkit.engine.model.ops import Matrix, exponentiate_rows, matmul
from rlkit.engine.model.weights import Weights
from rlkit.engine.training.losses import Inputs, Loss

_HEAD_ROWS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What is asked of the output layer."""

    # [Q] int64, the hidden state that predicts each target; one may predict several. Ascending for `Head`.
    rows: Tensor
    tokens: Tensor  # [Q] int64
    inputs: Inputs  # the loss inputs, each [Q] float32

    def reordered(self, order: Tensor) -> Targets:
        """The targets in another order, [Q] int64."""
        inputs = {name: values[order] for name, values in self.inputs.items()}
        return Targets(self.rows[order], self.tokens[order], inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output layer: logits = h Wᵀ + the unembedding's adapter, [V] a row."""

    weight: Tensor  # [V, E]
    output: Matrix  # the same as it is multiplied with, [E, V]
    lora: Lora | None  # the unembedding's adapter
    # Where logits are put, by `head_scratch`: to have new memory for each piece would take as long as they
    scratch: Tensor

    def logprobs(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Log-probabilities [Q] float32 of the targets."""
        found = torch.empty(len(targets.rows), device=hidden.device)
        for rows, pairs in _chunks(targets.rows, len(hidden)):
            logits = self._logits(hidden[rows])
            found[pairs] = _chosen(logits, targets.rows[pairs] - rows.start, targets.tokens[pairs])[0]
        return found

    def backward(self, hidden: Tensor, targets: Targets, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities [Q], losses [Q] and the gradient of the summed loss at `hidden [N, E]`.

        The adapter's own gradient is added to its `grad`.
        """
        count = len(targets.rows)
        logprobs, losses = torch.empty(count, device=hidden.device), torch.empty(count, device=hidden.device)
        upstream = torch.zeros_like(hidden)
        for rows, pairs in _chunks(targets.rows, len(hidden)):
            owner, tokens = targets.rows[pairs] - rows.start, targets.tokens[pairs]
            h = hidden[rows]
            logits = self._logits(h)
            logprobs[pairs], masses, total_mass = _chosen(logits, owner, tokens)
            inputs = {name: values[pairs] for name, values in targets.inputs.items()}
            losses[pairs], slope = loss.gradient(logprobs[pairs], inputs)
            # ∂ logp / ∂ logits = onehot(target) − softmax
            total = torch.zeros(len(h), device=h.device).index_add_(0, owner, slope)
            touched = torch.zeros(len(h), dtype=torch.bool, device=h.device)
            touched[owner[slope != 0]] = True
            kept = touched.nonzero()[:, 0]
            if not len(kept):
                continue
            if len(kept) < len(h):
                masses = masses[kept]
            by_logits = masses.mul_((-total / total_mass)[kept, None])
            place = torch.cumsum(touched, 0) - 1
            there = touched[owner]
            by_logits.index_put_((place[owner[there]], tokens[there]), slope[there], accumulate=True)
            upstream[rows.start + kept] = self._upstream(h[kept], by_logits.to(h.dtype))
        return logprobs, losses, upstream

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = matmul(hidden, self.output, out=self.scratch)
        if self.lora is not None:
            logits += self.lora.delta(hidden)
        return logits.float()

    def _upstream(self, hidden: Tensor, by_logits: Tensor) -> Tensor:
        """The gradient at `hidden [n, E]` for one at the logits, `by_logits [n, V]`."""
        upstream = by_logits @ self.weight
        if self.lora is not None:
            a, (b,) = self.lora.a, self.lora.bs
            by_inner = (by_logits @ b.t().to(by_logits.dtype)) * self.lora.scale
            upstream += by_inner @ a.to(by_inner.dtype)
            assert a.grad is not None  # the learner gives every parameter its window of the flat gradient
            assert b.grad is not None
            a.grad += by_inner.t() @ hidden
            b.grad += ((hidden @ a.t().to(hidden.dtype)) * self.lora.scale).t() @ by_logits
        return upstream


def head_scratch(weights: Weights) -> Tensor:
    """Memory for the logits of one piece, which is not taken up before it is used."""
    return weights.head.new_empty(_HEAD_ROWS, len(weights.head))


def _chunks(rows: Tensor, count: int) -> list[tuple[slice, slice]]:
    """Runs of at most 128 hidden states, and of the targets that belong to each."""
    edges = [*range(0, count, _HEAD_ROWS), count]
    pairs = [int(place) for place in torch.searchsorted(rows.cpu(), torch.tensor(edges))]
    chunks = zip(edges, edges[1:], pairs, pairs[1:], strict=False)
    return [(slice(start, end), slice(first, last)) for start, end, first, last in chunks if last > first]


def _chosen(logits: Tensor, owner: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each token [Q]; of each row its weights [n, V], which `logits` become, and their sum [n].

    Divided by their sum the weights are probabilities.
    """
    chosen = logits[owner, tokens]
    peaks, total = exponentiate_rows(logits)
    return chosen - peaks[owner] - total.log()[owner], logits, total
