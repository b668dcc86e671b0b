"""Packed sequences, and causal attention inside them, with rotary embedding.

Invariant: every token of a sequence is in exactly one span. A span attends causally to itself and to its whole prefix,
so sequences with a common prefix share its rows. On the CPU in float32, attention is a compiled kernel, and a
sequence's result depends only on its own rows, bit for bit. Otherwise torch computes the same formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.nn import functional

from rlkit.engine.kernels import causal_attention
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.ops import Rope, apply_rope, apply_rope_in_place, has_kernels, split_heads
from rlkit.engine.model.rotary import ALL_POSITIONS

# Minimum work of a thread, about a tenth of a millisecond.
_SHARED_OPERATIONS = 10_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """Successive rows: a whole sequence, or the tokens after a `prefix` that other sequences may share."""

    start: int
    length: int
    prefix: Span | None = None

    @property
    def rows(self) -> slice:
        """Rows of the batch."""
        return slice(self.start, self.start + self.length)

    @property
    def position(self) -> int:
        """Position of the first token in the sequence."""
        return 0 if self.prefix is None else self.prefix.length


def lay_out(lengths: Sequence[int], prefix_lengths: Sequence[int] = ()) -> list[Span]:
    """Return the spans of consecutive sequences, whole or after consecutive prefixes in other memory."""
    prefixes = lay_out(prefix_lengths) if prefix_lengths else [None] * len(lengths)
    places = zip(accumulate(lengths, initial=0), lengths, prefixes, strict=False)
    return [Span(start, length, prefix if prefix and prefix.length else None) for start, length, prefix in places]


def positions(spans: Sequence[Span], rows: int) -> Tensor:
    """Return the position of each row in its sequence, [rows] int64; zero for rows of no span."""
    result = torch.zeros(rows, dtype=torch.int64)
    for span in spans:
        result[span.rows] = torch.arange(span.position, span.position + span.length)
    return result


class Attention:
    """Attention inside the sequences of one batch, for every layer; a prefix comes before its continuations."""

    def __init__(self, spans: Sequence[Span], rope: Rope, kv_heads: int, window: int = ALL_POSITIONS) -> None:
        self.kv_heads = kv_heads
        self.end = max((span.rows.stop for span in spans), default=0)
        """First row after all sequences."""
        self._spans = spans
        self._rope = rope
        self._window = window
        places = [(s.start, s.length, *((s.prefix.start, s.prefix.length) if s.prefix else (0, 0))) for s in spans]
        self._places = np.array(places, np.int64).reshape(-1, 4)

    def __call__(self, rows: Tensor, *, prefix_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return attention's output, [N, H · D], zeros for rows of no sequence, and the rotated `rows`.

        Only the output may be differentiated.

        Args:
            rows: [N, H + 2K, D], queries, keys and values; they may be overwritten.
            prefix_rows: [M, 2K, D], keys (rotated) and values of all prefixes, without a gradient; by default those
                in `rows`.
        """
        if has_kernels(rows):
            rows = rows.contiguous()
            mixed = cast("Tensor", _AttentionFunction.apply(rows, self, prefix_rows))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped
            return mixed, rows.detach()
        rows = apply_rope(rows, rows.shape[1] - self.kv_heads, self._rope)
        mixed = _attend_with_torch(rows, self.kv_heads, self._spans, self._window, prefix_rows)
        return mixed, rows.detach()

    def rotate(self, rows: Tensor, *, inverse: bool = False) -> None:
        """Rotate queries and keys of `rows [N, H + 2K, D]` in place."""
        apply_rope_in_place(rows, rows.shape[1] - self.kv_heads, self._rope, inverse=inverse)

    def compute(self, kernel: Any, rows: Tensor, *others: Tensor) -> None:
        """Call a kernel of `causal_attention` for all key heads, on several threads if there is enough work."""
        kv_heads, places = self.kv_heads, self._places
        values, *arrays = (tensor.detach().contiguous().numpy() for tensor in (rows, *others))
        pairs = int((places[:, 1] * (places[:, 1] + places[:, 3])).sum())
        operations = 2 * pairs * rows.shape[2] * (rows.shape[1] // kv_heads - 2)

        def run_heads(first: int, last: int) -> None:
            kernel(values, places, kv_heads, self._window, first, last, *arrays)

        parallel_for(run_heads, kv_heads, min_per_thread=-(-_SHARED_OPERATIONS // max(operations, 1)))


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, attention: Attention, prefix_rows: Tensor | None) -> Tensor:
        attention.rotate(rows)
        increment_version(rows)  # so that autograd detects a stale copy of them
        count, all_heads, size = rows.shape
        heads = all_heads - 2 * attention.kv_heads
        out, stats = torch.empty(count, heads, size), torch.empty(count, heads, 2)
        out[attention.end :] = 0
        attention.compute(causal_attention.attention, rows, rows if prefix_rows is None else prefix_rows, out, stats)
        ctx.save_for_backward(rows, out, stats)
        ctx.attention = attention
        return out.view(count, heads * size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        rows, out, stats = ctx.saved_tensors
        grad_rows = torch.empty_like(rows)
        grad_rows[ctx.attention.end :] = 0
        ctx.attention.compute(
            causal_attention.attention_gradient, rows, out, stats, grad_out.reshape(out.shape), grad_rows
        )
        ctx.attention.rotate(grad_rows, inverse=True)
        return grad_rows, None, None


def _attend_with_torch(
    rows: Tensor, kv_heads: int, spans: Sequence[Span], window: int, prefix_rows: Tensor | None
) -> Tensor:
    q, k, v = split_heads(rows, kv_heads)
    _, prefix_k, prefix_v = (q, k, v) if prefix_rows is None else split_heads(prefix_rows, kv_heads)
    outputs: list[Tensor] = []
    end = 0
    # One call computes all adjacent spans with the same length and prefix, as [count, heads, length, D].
    for (length, prefix), group in groupby(spans, key=lambda span: (span.length, span.prefix)):
        places = [span.rows for span in group]
        count, start, end = len(places), places[0].start, places[-1].stop
        qs, ks, vs = (x[start:end].reshape(count, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        if prefix is not None:
            shared = (x[prefix.rows].transpose(0, 1).expand(count, -1, -1, -1) for x in (prefix_k, prefix_v))
            ks, vs = (torch.cat(pair, 2) for pair in zip(shared, (ks, vs), strict=True))
        before = ks.shape[2] - length
        if not before and window >= length:
            mixed = functional.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
        else:
            mask = torch.ones(length, ks.shape[2], dtype=torch.bool, device=qs.device).tril(before)
            mask = mask.triu(before - min(window, ks.shape[2]) + 1)
            mixed = functional.scaled_dot_product_attention(qs, ks, vs, mask, enable_gqa=True)
        outputs.append(mixed.transpose(1, 2).reshape(end - start, -1))
    if end < len(q):
        outputs.append(q.new_zeros(len(q) - end, q.shape[1] * q.shape[2]))
    return torch.cat(outputs)
