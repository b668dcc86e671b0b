"""Packed sequences, and causal attention inside them, rotary embedding included.

Invariant: every token of a sequence is in exactly one span, and a span attends to itself, causally, and to all of its
prefix, so that sequences that begin alike share the rows of what they have in common. On the CPU in float32 attention
is a compiled kernel, and a sequence's result depends on its own rows only, bit for bit; elsewhere it is torch's, of the
same formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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

# Less than about a tenth of a millisecond of work is not worth a thread.
_SHARED_OPERATIONS = 10_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows: a whole sequence, or what follows a `prefix` that others may follow too."""

    start: int
    length: int
    prefix: Span | None = None

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.start, self.start + self.length)

    @property
    def position(self) -> int:
        """The position of its first token in the sequence."""
        return 0 if self.prefix is None else self.prefix.length


@dataclass(frozen=True, slots=True)
class Run:
    """Spans of one length behind one prefix, standing together: `count` times `length` rows from `start`."""

    start: int
    count: int
    length: int
    prefix: Span | None

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.start, self.start + self.count * self.length)


def lay_out(lengths: Sequence[int]) -> list[Span]:
    """Whole sequences, one behind the other."""
    spans: list[Span] = []
    start = 0
    for length in lengths:
        spans.append(Span(start, length))
        start += length
    return spans


def positions(spans: Sequence[Span], rows: int) -> Tensor:
    """The position of each row in its sequence, [rows] int64; zero for rows of no span."""
    found = torch.zeros(rows, dtype=torch.int64)
    for span in spans:
        found[span.rows] = torch.arange(span.position, span.position + span.length)
    return found


def runs(spans: Sequence[Span]) -> Iterator[Run]:
    """Neighbours that can be attended in one call."""
    for (length, prefix), same in groupby(spans, key=lambda span: (span.length, span.prefix)):
        members = list(same)
        yield Run(members[0].start, len(members), length, prefix)


class Attention:
    """Attention inside the sequences of one batch, alike for every layer; a prefix stands before what attends to it."""

    def __init__(self, spans: Sequence[Span], rope: Rope, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.end = max((span.rows.stop for span in spans), default=0)
        """Behind it are rows of no sequence."""
        self._spans = spans
        self._rope = rope
        places = [(s.start, s.length, *((s.prefix.start, s.prefix.length) if s.prefix else (0, 0))) for s in spans]
        self._places = np.array(places, np.int64).reshape(-1, 4)

    def __call__(self, rows: Tensor, *, rotary: bool) -> tuple[Tensor, Tensor]:
        """What the queries take from the values, [N, H · D], zeros where there is no sequence; and `rows`, rotated.

        Only the first may be differentiated.

        Args:
            rows: [N, H + 2K, D], queries, keys and values; not to be used afterwards, because they may be changed.
            rotary: whether queries and keys are rotated first.
        """
        if has_kernels(rows):
            rows = rows.contiguous()
            mixed = cast("Tensor", _Attended.apply(rows, self, rotary))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped
            return mixed, rows.detach()
        if rotary:
            rows = apply_rope(rows, rows.shape[1] - self.kv_heads, self._rope)
        return _by_torch(rows, self.kv_heads, self._spans), rows.detach()

    def rotate(self, rows: Tensor, *, back: bool = False) -> None:
        """Rotate queries and keys of `rows [N, H + 2K, D]` in place."""
        apply_rope_in_place(rows, rows.shape[1] - self.kv_heads, self._rope, back=back)

    def compute(self, kernel: Any, rows: Tensor, *others: Tensor) -> None:
        """Call a kernel of `causal` for all key heads, on several threads if that is worth it."""
        kv_heads, places = self.kv_heads, self._places
        values, *arrays = (tensor.detach().contiguous().numpy() for tensor in (rows, *others))
        held = int((places[:, 1] * (places[:, 1] + places[:, 3])).sum())
        operations = 2 * held * rows.shape[2] * (rows.shape[1] // kv_heads - 2)

        def part(first: int, last: int) -> None:
            kernel(values, places, kv_heads, first, last, *arrays)

        parallel_for(part, kv_heads, min_per_thread=-(-_SHARED_OPERATIONS // max(operations, 1)))


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, attention: Attention, rotary: bool) -> Tensor:
        if rotary:
            attention.rotate(rows)
            increment_version(rows)  # so that who has kept them for a gradient of its own is told
        count, all_heads, size = rows.shape
        heads = all_heads - 2 * attention.kv_heads
        out, shape = torch.empty(count, heads, size), torch.empty(count, heads, 2)
        out[attention.end :] = 0
        attention.compute(causal_attention.attention, rows, out, shape)
        ctx.save_for_backward(rows, out, shape)
        ctx.attention, ctx.rotary = attention, rotary
        return out.view(count, heads * size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        rows, out, shape = ctx.saved_tensors
        by_rows = torch.empty_like(rows)
        by_rows[ctx.attention.end :] = 0
        ctx.attention.compute(causal_attention.attention_gradient, rows, out, shape, by_out.reshape(out.shape), by_rows)
        if ctx.rotary:
            ctx.attention.rotate(by_rows, back=True)
        return by_rows, None, None


def _by_torch(rows: Tensor, kv_heads: int, spans: Sequence[Span]) -> Tensor:
    q, k, v = split_heads(rows, kv_heads)
    outputs: list[Tensor] = []
    done = 0
    for run in runs(spans):
        done = run.rows.stop
        qs = _by_head(q[run.rows], run)
        ks, vs = (_behind_prefix(t, run) for t in (k, v))
        if run.prefix is None:
            mixed = functional.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
        else:
            mask = torch.ones(run.length, ks.shape[2], dtype=torch.bool, device=qs.device).tril(run.prefix.length)
            mixed = functional.scaled_dot_product_attention(qs, ks, vs, mask, enable_gqa=True)
        outputs.append(mixed.transpose(1, 2).reshape(run.count * run.length, -1))
    if done < len(q):
        outputs.append(q.new_zeros(len(q) - done, q.shape[1] * q.shape[2]))
    return torch.cat(outputs)


def _by_head(rows: Tensor, run: Run) -> Tensor:
    """Rows [count · length, heads, D] as [count, heads, length, D]."""
    return rows.reshape(run.count, run.length, -1, rows.shape[-1]).transpose(1, 2)


def _behind_prefix(all_rows: Tensor, run: Run) -> Tensor:
    """The keys or values [N, K, D] that a run attends to, [count, K, prefix + length, D]."""
    own = _by_head(all_rows[run.rows], run)
    if run.prefix is None:
        return own
    shared = all_rows[run.prefix.rows].transpose(0, 1).expand(run.count, -1, -1, -1)
    return torch.cat([shared, own], 2)
