"""Gated delta nets (Yang et al. 2024): linear attention with a state of fixed size.

Invariant: no number passes from one sequence to another. On the CPU in float32 without a gradient, a compiled kernel
computes the tokens one after another, and a sequence's result depends only on its own rows, bit for bit. Otherwise
torch computes the same formula by chunks.

For each value head, with a key k and a query q of length 1, a value v, and sigmoids and exponentials of projections as
factors a (decay) and b: S ← a S, S ← S + b k (v − Sᵀ k)ᵀ, and the output is Sᵀ q / √K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels import delta_rule
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.attention import Span
from rlkit.engine.model.config import DeltaConfig
from rlkit.engine.model.ops import glu, has_kernels, rms_norm

CHUNK_TOKENS = 64
"""Tokens that torch computes at a time; the work inside a chunk grows with its square."""

_SHARED_OPERATIONS = 1_000_000  # minimum work of a thread, about a tenth of a millisecond


@dataclass(slots=True, eq=False)
class DeltaState:
    """State of a sequence in one layer."""

    tail: Tensor  # [kernel - 1, C], the last inputs of the convolution
    memory: Tensor  # [H, K, V]

    def copy(self) -> DeltaState:
        """Return a copy that shares no memory."""
        return DeltaState(self.tail.clone(), self.memory.clone())


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """Weights of a delta net, without its projections; C channels, H value heads."""

    config: DeltaConfig
    conv: Tensor  # [kernel, C]; states have its type and device
    decay: Tensor  # [H], negative: ln a is decay · softplus(projection + bias)
    bias: Tensor  # [H]
    norm: Tensor  # [V]
    norm_eps: float

    def make_state(self) -> DeltaState:
        """Return the state before the first token."""
        c, zeros = self.config, self.conv.new_zeros
        return DeltaState(zeros(c.kernel - 1, c.channels), zeros(c.value_heads, c.key_dim, c.value_dim))

    def __call__(self, rows: Tensor, spans: Sequence[Span], states: Sequence[DeltaState] = ()) -> Tensor:
        """Return the gated outputs [N, H · V] of projected `rows [N, …]`; rows of no span are last, and get zeros.

        Args:
            states: state of each span, changed in place; by default each span starts after its prefix in `rows`.
        """
        c, width = self.config, self.config.value_heads * self.config.value_dim
        by_span = dict(zip(spans, states or [self.make_state() for _ in spans], strict=True))
        parts: list[tuple[Tensor, Tensor, DeltaState, DeltaState]] = []
        for span, state in by_span.items():
            start = by_span[span.prefix] if span.prefix else state
            x = torch.cat([start.tail, rows[span.rows, : c.channels]])
            state.tail = x[span.length :].clone()
            parts.append((x, rows[span.rows, -2 * c.value_heads :], start, state))
        has_kernel = has_kernels(rows) and not rows.requires_grad
        outputs = self._run_kernel(parts) if has_kernel else [self._run_with_torch(*part) for part in parts]
        mixed = torch.cat([*outputs, rows.new_zeros(len(rows) - sum(map(len, outputs)), width)]).to(rows.dtype)
        normed = rms_norm(mixed.view(-1, c.value_dim), self.norm, self.norm_eps).view(mixed.shape)
        return glu(torch.cat([rows[:, c.channels : c.channels + width], normed], 1))

    def _run_kernel(self, parts: Sequence[tuple[Tensor, Tensor, DeltaState, DeltaState]]) -> list[Tensor]:
        """Run all sequences, each thread a share of the heads."""
        c, group = self.config, self.config.value_heads // self.config.key_heads
        outputs = [x.new_empty(len(gates), c.value_heads * c.value_dim) for x, gates, *_ in parts]
        vectors = self.conv.numpy(), self.decay.numpy(), self.bias.numpy()
        arrays = [
            # Of one layout: the kernel would be compiled for each.
            (x.numpy(), gates.contiguous().numpy(), start.memory.numpy(), end.memory.numpy(), out.numpy())
            for (x, gates, start, end), out in zip(parts, outputs, strict=True)
        ]

        def run_heads(first: int, last: int) -> None:
            heads = slice(first * group, last * group)
            for x, gates, start, memory, out in arrays:
                if not np.may_share_memory(start, memory):
                    memory[heads] = start[heads]
                delta_rule.apply_delta_rule(x, gates, memory, *vectors, first, last, out)

        operations = sum(8 * len(out) * memory.size for *_, memory, out in arrays)
        parallel_for(run_heads, c.key_heads, min_per_thread=-(-_SHARED_OPERATIONS * c.key_heads // max(operations, 1)))
        return outputs

    def _run_with_torch(self, x: Tensor, gates: Tensor, start: DeltaState, end: DeltaState) -> Tensor:
        """Return the outputs [n, H · V] of a sequence's tokens; arguments as in `delta_rule.apply_delta_rule`."""
        c, count, keys = self.config, len(gates), 2 * self.config.key_heads * self.config.key_dim
        mixed = functional.silu((x.unfold(0, c.kernel, 1) * self.conv.t()).sum(-1))
        v = mixed[:, keys:].reshape(count, c.value_heads, c.value_dim).transpose(0, 1)  # [heads, n, dimensions]
        qk = mixed[:, :keys].reshape(count, 2 * c.key_heads, c.key_dim).transpose(0, 1)
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + delta_rule.NORM_EPS)
        q, k = qk.repeat_interleave(c.value_heads // c.key_heads, 0).chunk(2)
        gates = gates.to(x.dtype).t()
        strengths = torch.sigmoid(gates[: c.value_heads, :, None])
        decays = self.decay[:, None] * functional.softplus(gates[c.value_heads :] + self.bias[:, None])
        outputs: list[Tensor] = []
        memory = start.memory
        for first in range(0, count, CHUNK_TOKENS):
            chunk = (part[:, first : first + CHUNK_TOKENS] for part in (q * c.key_dim**-0.5, k, v, strengths, decays))
            out, memory = _run_chunk(*chunk, memory=memory)
            outputs.append(out)
        end.memory = memory
        return torch.cat(outputs, 1).transpose(0, 1).flatten(1)


def _run_chunk(
    q: Tensor, k: Tensor, v: Tensor, strengths: Tensor, decays: Tensor, *, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [H, n, V] of a chunk of n tokens, and the memory after it (Yang et al. 2024, section 3)."""
    total = decays.cumsum(1)
    is_later = torch.ones(decays.shape[1], decays.shape[1], dtype=torch.bool, device=q.device).triu(1)
    # The decay from each token of the chunk to each that is not before it; −∞ keeps the gradient finite.
    ratios = (total[:, :, None] - total[:, None, :]).masked_fill(is_later, -torch.inf).exp()
    from_start, to_end = total.exp()[:, :, None], (total[:, -1:] - total).exp()[:, :, None]
    transposed = k.transpose(1, 2)
    system = strengths * (k @ transposed) * ratios
    solve = cast("Callable[..., Tensor]", torch.linalg.solve_triangular)
    # What a token writes depends on what those before it write.
    written = solve(system, strengths * (v - (k * from_start) @ memory), upper=False, unitriangular=True)
    out = (q * from_start) @ memory + (q @ transposed * ratios) @ written
    return out, memory * from_start[:, -1:] + (k * to_end).transpose(1, 2) @ written
