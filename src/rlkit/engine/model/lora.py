"""Low-rank adapters (Hu et al. 2021): y = x W + (α / r) x A B.

Invariant: all parameters of an adapter live in one flat float32 vector in a fixed order, so that the optimiser, a
snapshot and a checkpoint each are one operation on one tensor; `views` are windows into it.

α is 32 whatever the rank. Hosted Tinker does the same as far as can be seen from outside: the cookbook's
`get_lora_lr_over_full_finetune_lr` takes `lora_alpha=32` for every rank, and its learning rates do not depend on it.
A starts uniform in ±1/√fan_in (the default of the `peft` package, Kaiming with a = √5) and B at zero, so that a new
adapter changes nothing. Query, key and value read the same input and share one A matrix, a third each; so do gate and
up. A is kept the other way round, [parts · r, in]: with that, the products of its gradient take half as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.engine.kernels.matmul import Matrix, matrix_bytes, pack
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.ops import gate_gradient, gated
from rlkit.engine.model.weights import Layer, Weights

ALPHA = 32.0


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What a client asks for when it makes a model."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """The adapter of one fused matrix: `a [parts · r, in]`, one `b [r, out]` for each part."""

    a: Tensor
    bs: tuple[Tensor, ...]
    scale: float

    def delta(self, x: Tensor) -> Tensor:
        """The low-rank term of `x [N, in]`, [N, out of all parts]."""
        rank = self.bs[0].shape[0]
        inner = (x @ self.a.t().to(x.dtype)) * self.scale
        parts = [inner[:, i * rank : (i + 1) * rank] @ b.to(x.dtype) for i, b in enumerate(self.bs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def added(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [N, in] @ weight [in, out]` and the low-rank term, [N, out]; it may be differentiated once.

        The gradients of the adapter itself are added to its `grad` in the course of that.
        """
        return cast("Tensor", _Added.apply(x, weight, self.scale, self.a, *self.bs))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped

    def added_gated(self, both: Tensor, weight: Tensor) -> Tensor:
        """As `added` for x = `ops.gated(both)`, `both [N, 2 · in]`, which alone is kept for the way back."""
        return cast("Tensor", _AddedGated.apply(both, weight, self.scale, self.a, *self.bs))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped

    def merged(self, transposed: Tensor) -> Tensor:
        """A weight given as [out, in] plus the adapter's own matrix, [out, in]."""
        out = torch.empty(transposed.shape, dtype=torch.float32, device=transposed.device)
        rank, row = self.bs[0].shape[0], 0
        for i, b in enumerate(self.bs):
            rows, part = slice(row, row + b.shape[1]), slice(i * rank, (i + 1) * rank)
            torch.addmm(transposed[rows].float(), b.t(), self.a[part], alpha=self.scale, out=out[rows])
            row = rows.stop
        return out.to(transposed.dtype)


class _Added(torch.autograd.Function):
    """A product and its low-rank term, each part of which is added where it belongs.

    Autograd alone would make a matrix of all parts first, one for each sum on the way back, and one for each gradient
    before it is added to those of other micro-batches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float, a: Tensor, *bs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        y, inner = _sum(x, weight, scale, a, bs)
        ctx.save_for_backward(x, weight, inner)
        ctx.parameters = scale, a, bs  # their `grad` is wanted, which a saved tensor has not
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        x, weight, inner = ctx.saved_tensors
        scale, a, bs = ctx.parameters
        by_inner = _by_inner(by_y, inner, scale, bs)
        _accumulate(a, by_inner.t(), x)
        by_x = _by_x(by_y, by_inner, weight, a) if ctx.needs_input_grad[0] else None
        return by_x, *[None] * (3 + len(bs))


class _AddedGated(torch.autograd.Function):
    """`_Added` of what passes a gate."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, scale: float, a: Tensor, *bs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        y, inner = _sum(gated(both), weight, scale, a, bs)
        ctx.save_for_backward(both, weight, inner)
        ctx.parameters = scale, a, bs
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        both, weight, inner = ctx.saved_tensors
        scale, a, bs = ctx.parameters
        by_inner = _by_inner(by_y, inner, scale, bs)
        by_both, x = gate_gradient(both, _by_x(by_y, by_inner, weight, a))
        _accumulate(a, by_inner.t(), x)
        return by_both, *[None] * (3 + len(bs))


def _sum(x: Tensor, weight: Tensor, scale: float, a: Tensor, bs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A product and its low-rank term, [N, out], and what is between A and B, [N, parts · r]."""
    inner = (x @ a.t().to(x.dtype)).mul_(scale)
    y = x @ weight
    for part, columns, b in _parts(bs):
        y[:, columns].addmm_(inner[:, part], b.to(x.dtype))
    return y, inner


def _by_inner(by_y: Tensor, inner: Tensor, scale: float, bs: Sequence[Tensor]) -> Tensor:
    """The gradient between x A and what it is scaled to; that of each B is added to its own."""
    by_inner = torch.empty_like(inner)
    for part, columns, b in _parts(bs):
        torch.mm(by_y[:, columns], b.t().to(by_y.dtype), out=by_inner[:, part])
        _accumulate(b, inner[:, part].t(), by_y[:, columns])
    return by_inner.mul_(scale)


def _by_x(by_y: Tensor, by_inner: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    return (by_y @ weight.t()).addmm_(by_inner, a.to(by_y.dtype))


def _accumulate(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to the gradient of a parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if left.dtype == parameter.dtype:
        parameter.grad.addmm_(left, right)
    else:
        parameter.grad += left @ right


def _parts(bs: Sequence[Tensor]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each B with its columns of the inner matrix and of the outer one."""
    inner = outer = 0
    for b in bs:
        rank, width = b.shape
        yield slice(inner, inner + rank), slice(outer, outer + width), b
        inner, outer = inner + rank, outer + width


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapter:
    """The adapters of one layer; None where nothing is trained."""

    qkv: Lora | None
    o: Lora | None
    gate_up: Lora | None
    down: Lora | None

    @staticmethod
    def none() -> LayerAdapter:
        """The adapter that changes nothing."""
        return _NO_ADAPTER


_NO_ADAPTER = LayerAdapter(None, None, None, None)


class Adapter:
    """All LoRA parameters of one model.

    Args:
        flat: [P] float32; `views` are windows into it, each of them a leaf for autograd when `trainable`.
    """

    def __init__(self, config: ModelConfig, settings: LoraSettings, flat: Tensor, *, trainable: bool = False) -> None:
        self.config = config
        self.settings = settings
        self.flat = flat
        self.views = {name: flat[s].view(shape).requires_grad_(trainable) for name, s, shape in slots(config, settings)}
        self.scale = ALPHA / settings.rank

    def layer(self, index: int) -> LayerAdapter:
        """The adapters of layer `index`."""
        return LayerAdapter(
            *(self._lora(f"layers.{index}.{group}", parts) for group, parts in GROUPS.items() if group != "unembed")
        )

    def unembed(self) -> Lora | None:
        """The adapter of the output layer, which takes the hidden state to logits."""
        return self._lora("unembed", GROUPS["unembed"])

    def to(self, device: torch.device) -> Adapter:
        """The same adapter on a device; itself if it is there."""
        return (
            self if self.flat.device == device else Adapter(self.config, self.settings, self.flat.detach().to(device))
        )

    def snapshot(self) -> Adapter:
        """A frozen copy."""
        return Adapter(self.config, self.settings, self.flat.detach().clone())

    def _lora(self, group: str, parts: tuple[str, ...]) -> Lora | None:
        a = self.views.get(f"{group}.lora_A")
        if a is None:
            return None
        stem = group.rpartition(".")[0]
        bs = tuple(self.views[f"{stem}.{part}.lora_B" if stem else f"{part}.lora_B"] for part in parts)
        return Lora(a, bs, self.scale)


GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "unembed": ("unembed",),
}


_MATRICES = ("qkv", "o", "gate_up", "down")


def slots(config: ModelConfig, settings: LoraSettings) -> Iterator[tuple[str, slice, tuple[int, int]]]:
    """Name, place in the flat vector and shape of each parameter, in order."""
    start = 0
    for name, shape in _shapes(config, settings):
        size = shape[0] * shape[1]
        yield name, slice(start, start + size), shape
        start += size


def size(config: ModelConfig, settings: LoraSettings) -> int:
    """How many parameters the adapter has."""
    return sum(shape[0] * shape[1] for _, shape in _shapes(config, settings))


def new_adapter(config: ModelConfig, settings: LoraSettings, *, seed: int) -> Adapter:
    """A fresh trainable adapter on the CPU, the same for the same seed."""
    flat = torch.zeros(size(config, settings))
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, place, shape in slots(config, settings):
        if name.endswith("lora_A"):
            flat[place].uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    return Adapter(config, settings, flat)


def serve(
    weights: Weights, adapter: Adapter | None, run: Callable[[Sequence[Callable[[], Layer]]], list[Layer]]
) -> Weights:
    """Weights for sampling: the adapter, if any, added in, and every matrix packed for products that only read it.

    Args:
        run: calls the functions it is given, one for each layer, and returns what they return.
    """
    unembed = None if adapter is None else adapter.unembed()
    with torch.inference_mode():
        layers = run([partial(_served, layer, adapter and adapter.layer(i)) for i, layer in enumerate(weights.layers)])
        head = weights.output if unembed is None else pack(unembed.merged(weights.head))
        return replace(weights, layers=tuple(layers), merged_head=head)


def merged_bytes(served: Weights, base: Weights) -> int:
    """The memory of what `serve` made for itself of `base`."""
    matrices = [getattr(layer, name) for layer in served.layers for name in _MATRICES]
    heads = [] if served.output is base.output else [served.output]
    return sum(matrix_bytes(matrix) for matrix in (*matrices, *heads))


@torch.inference_mode()
def _served(layer: Layer, lora: LayerAdapter | None) -> Layer:
    def served(name: str) -> Matrix:
        transposed: Tensor = getattr(layer, name).t()
        part: Lora | None = getattr(lora, name, None)
        return pack(transposed if part is None else part.merged(transposed))

    return replace(layer, **{name: served(name) for name in _MATRICES})


def _shapes(config: ModelConfig, settings: LoraSettings) -> Iterator[tuple[str, tuple[int, int]]]:
    rank, hidden, inner = settings.rank, config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i in range(config.layers):
        stem = f"layers.{i}"
        if settings.train_attn:
            yield f"{stem}.qkv.lora_A", (3 * rank, hidden)
            for part, width in (("q", query), ("k", key), ("v", key)):
                yield f"{stem}.{part}.lora_B", (rank, width)
            yield f"{stem}.o.lora_A", (rank, query)
            yield f"{stem}.o.lora_B", (rank, hidden)
        if settings.train_mlp:
            yield f"{stem}.gate_up.lora_A", (2 * rank, hidden)
            for part in ("gate", "up"):
                yield f"{stem}.{part}.lora_B", (rank, inner)
            yield f"{stem}.down.lora_A", (rank, inner)
            yield f"{stem}.down.lora_B", (rank, hidden)
    if settings.train_unembed:
        yield "unembed.lora_A", (rank, hidden)
        yield "unembed.lora_B", (rank, config.vocab_size)
