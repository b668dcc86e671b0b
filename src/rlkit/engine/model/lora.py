"""Low-rank adapters (Hu et al. 2021): y = x W + (α / r) x A B.

Invariant: all parameters of an adapter are in one flat float32 vector in a fixed order, so an optimiser step, a
snapshot and a checkpoint are each one operation on one tensor. `views` are views of that vector.

α is 32 for every rank. Hosted Tinker seems to do the same: the cookbook's `get_lora_lr_over_full_finetune_lr` uses
`lora_alpha=32` for every rank, and its learning rates do not depend on the rank.
A is initialised uniformly in ±1/√fan_in (the default of the `peft` package, Kaiming with a = √5) and B with zeros, so a
new adapter does not change the model. Query, key and value have the same input and share one A matrix, a third each; so
do gate and up. A is stored transposed, [parts · r, in], which halves the time of its gradient's products.
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

from rlkit.engine.model.config import Activation, ModelConfig
from rlkit.engine.model.matrices import Matrix, PackedMatrix, add_low_rank, multiply_rows, multiply_transposed
from rlkit.engine.model.ops import glu, glu_gradient
from rlkit.engine.model.weights import Expert, Layer, Weights

ALPHA = 32.0


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """A client's settings of a new model."""

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
        """Return the low-rank term of `x [N, in]`, [N, out of all parts]."""
        inner = (x @ self.a.t().to(x.dtype)) * self.scale
        parts = [inner[:, part] @ b.to(x.dtype) for part, _, b in _parts(self.bs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def multiply(self, x: Tensor, weight: Matrix, *, gate: Activation | None = None) -> Tensor:
        """Return `x [N, in] @ weight [in, out]` plus the low-rank term, [N, out]; differentiable once.

        The backward pass adds the gradients of the adapter's matrices to their `grad`.

        Args:
            gate: multiply `ops.glu(x, gate)`, x [N, 2 · in]; only x is kept for the backward pass.
        """
        return cast("Tensor", _LoraProduct.apply(x, weight, self, gate, self.a, *self.bs))  # pyright: ignore[reportUnknownMemberType]  torch leaves it untyped

    def add_to(self, weight: Matrix) -> Matrix:
        """Return a weight for `matmul` with the low-rank term, beside a packed matrix or merged into another."""
        if isinstance(weight, PackedMatrix):
            return add_low_rank(weight, self.a, self.bs, self.scale)
        out = weight.float()
        for part, columns, b in _parts(self.bs):
            out[:, columns].addmm_(self.a[part].t(), b, alpha=self.scale)
        return out.to(weight.dtype)


class _LoraProduct(torch.autograd.Function):
    """A product plus its low-rank term, with gradients accumulated in place.

    Autograd alone would allocate a matrix of all parts, one for each sum of the backward pass, and one for each
    gradient before it is added to the gradients of other micro-batches.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  torch's takes anything
        ctx: Any, x: Tensor, weight: Matrix, lora: Lora, gate: Activation | None, *_parameters: Tensor
    ) -> Tensor:
        factor = x if gate is None else glu(x, gate)
        inner = (factor @ lora.a.t().to(x.dtype)).mul_(lora.scale)
        y = multiply_rows(factor, weight)
        for part, columns, b in _parts(lora.bs):
            y[:, columns].addmm_(inner[:, part], b.to(x.dtype))
        ctx.save_for_backward(x, inner)
        # Not in save_for_backward: saved parameters have no `grad`.
        ctx.weight, ctx.lora, ctx.gate = weight, lora, gate
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  likewise
        x, inner = ctx.saved_tensors
        lora: Lora = ctx.lora
        grad_inner = torch.empty_like(inner)
        for part, columns, b in _parts(lora.bs):
            torch.mm(grad_y[:, columns], b.t().to(grad_y.dtype), out=grad_inner[:, part])
            _accumulate(b, inner[:, part].t(), grad_y[:, columns])
        grad_inner.mul_(lora.scale)
        grad_x = None
        if ctx.gate is not None or ctx.needs_input_grad[0]:
            grad_x = multiply_transposed(grad_y, ctx.weight).addmm_(grad_inner, lora.a.to(grad_y.dtype))
        if ctx.gate is not None:
            grad_x, x = glu_gradient(x, cast("Tensor", grad_x), ctx.gate)
        _accumulate(lora.a, grad_inner.t(), x)
        return grad_x, *[None] * (4 + len(lora.bs))


def _accumulate(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if left.dtype == parameter.dtype:
        parameter.grad.addmm_(left, right)
    else:
        parameter.grad += left @ right


def _parts(bs: Sequence[Tensor]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield columns of x A, columns of the result, and B, for each part."""
    inner = outer = 0
    for b in bs:
        rank, width = b.shape
        yield slice(inner, inner + rank), slice(outer, outer + width), b
        inner, outer = inner + rank, outer + width


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapter:
    """The adapters of one layer; None for matrices that are not trained."""

    qkv: Lora | None  # of attention or of a delta net, as `o`
    o: Lora | None
    gate_up: Lora | None
    down: Lora | None
    experts: tuple[LayerAdapter, ...] = ()  # of each expert, with `gate_up` and `down` only


NO_ADAPTER = LayerAdapter(None, None, None, None)


class Adapter:
    """All LoRA parameters of one model.

    Args:
        flat: [P] float32, all parameters; `views` are views of it, and autograd leaves if `trainable`.
    """

    def __init__(self, config: ModelConfig, settings: LoraSettings, flat: Tensor, *, trainable: bool = False) -> None:
        self.config = config
        self.settings = settings
        self.flat = flat
        self.views = {
            name: flat[s].view(shape).requires_grad_(trainable) for name, s, shape in parameter_slots(config, settings)
        }
        self.scale = ALPHA / settings.rank

    def layer(self, index: int) -> LayerAdapter:
        """Return the adapters of layer `index`."""
        prefix, experts = f"layers.{index}.", self.config.find_experts(index) if self.settings.train_mlp else None
        count = experts.count if experts else 0
        return replace(self._part(prefix), experts=tuple(self._part(f"{prefix}experts.{i}.") for i in range(count)))

    def unembed(self) -> Lora | None:
        """Return the adapter of the output layer."""
        return self._lora("", "unembed")

    def to(self, device: torch.device) -> Adapter:
        """Return the adapter on a device; the adapter itself if it is on that device."""
        if self.flat.device == device:
            return self
        return Adapter(self.config, self.settings, self.flat.detach().to(device))

    def snapshot(self) -> Adapter:
        """Return a frozen copy."""
        return Adapter(self.config, self.settings, self.flat.detach().clone())

    def _part(self, prefix: str) -> LayerAdapter:
        qkv, o, gate_up, down = (self._lora(prefix, group) for group in _MATRICES)
        qkv, o = qkv or self._lora(prefix, "delta_in"), o or self._lora(prefix, "delta_out")
        return LayerAdapter(qkv, o, gate_up, down)

    def _lora(self, prefix: str, group: str) -> Lora | None:
        a = self.views.get(f"{prefix}{group}.lora_A")
        if a is None:
            return None
        return Lora(a, tuple(self.views[f"{prefix}{part}.lora_B"] for part in GROUPS[group]), self.scale)


GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "delta_in": ("delta_qkv", "delta_z", "delta_b", "delta_a"),
    "delta_out": ("delta_out",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "unembed": ("unembed",),
}
_MATRICES = ("qkv", "o", "gate_up", "down")


def parameter_slots(config: ModelConfig, settings: LoraSettings) -> Iterator[tuple[str, slice, tuple[int, int]]]:
    """Yield name, slice of the flat vector and shape of each parameter, in order."""
    start = 0
    for name, shape in _shapes(config, settings):
        size = shape[0] * shape[1]
        yield name, slice(start, start + size), shape
        start += size


def make_adapter(config: ModelConfig, settings: LoraSettings, *, seed: int) -> Adapter:
    """Initialise an adapter on the CPU from a seed."""
    flat = torch.zeros(sum(rows * columns for _, (rows, columns) in _shapes(config, settings)))
    generator = torch.Generator().manual_seed(seed % 2**63)
    for name, place, shape in parameter_slots(config, settings):
        if name.endswith("lora_A"):
            flat[place].uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    return Adapter(config, settings, flat)


@torch.inference_mode()
def make_sampling_weights(
    weights: Weights, adapter: Adapter | None, run: Callable[[Sequence[Callable[[], Layer]]], list[Layer]]
) -> Weights:
    """Make weights for sampling: add the adapter, if any, to every matrix.

    Args:
        run: function that calls the functions, one per layer, and returns their results.
    """
    if adapter is None:
        return weights
    unembed = adapter.unembed()
    layers = run([partial(_add_layer_adapter, layer, adapter.layer(i)) for i, layer in enumerate(weights.layers)])
    output = weights.output if unembed is None else unembed.add_to(weights.output)
    return replace(weights, layers=tuple(layers), output=output)


def added_bytes(served: Weights, base: Weights) -> int:
    """Return the memory of the matrices that `make_sampling_weights` added to `base`."""
    return sum(_added_bytes(new, old) for new, old in zip(_matrices(served), _matrices(base), strict=True))


def _matrices(weights: Weights) -> Iterator[Matrix]:
    """Yield the matrices that may have an adapter."""
    for part in (part for layer in weights.layers for part in (layer, *layer.experts)):
        yield from (matrix for name in _MATRICES if (matrix := getattr(part, name, None)) is not None)
    yield weights.output


def _added_bytes(new: Matrix, old: Matrix) -> int:
    if isinstance(new, PackedMatrix):
        return 0 if new.low_rank is None else new.low_rank.a.nbytes + new.low_rank.b.nbytes
    return 0 if new is old else new.nbytes


@torch.inference_mode()
def _add_layer_adapter(layer: Layer, adapter: LayerAdapter) -> Layer:
    experts = map(_add_adapter, layer.experts, adapter.experts) if adapter.experts else layer.experts
    return replace(_add_adapter(layer, adapter), experts=tuple(experts))


def _add_adapter[Part: (Layer, Expert)](part: Part, adapter: LayerAdapter) -> Part:
    loras: dict[str, Lora | None] = {name: getattr(adapter, name) for name in _MATRICES}
    return replace(part, **{name: lora.add_to(getattr(part, name)) for name, lora in loras.items() if lora})


def _shapes(config: ModelConfig, settings: LoraSettings) -> Iterator[tuple[str, tuple[int, int]]]:
    rank, hidden, delta = settings.rank, config.hidden_size, config.delta
    widths_in = {"qkv": hidden, "o": config.heads * config.head_dim, "gate_up": hidden, "delta_in": hidden}
    widths_out = config.qkv_widths | {"o": hidden, "down": hidden, "delta_out": hidden}
    if delta is not None:
        widths_in["delta_out"] = delta.value_heads * delta.value_dim
        widths_out |= {f"delta_{name}": width for name, width in delta.widths.items()}

    def part_shapes(prefix: str, groups: Sequence[str], inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
        widths_in["down"] = widths_out["gate"] = widths_out["up"] = inner
        for group in groups:
            yield f"{prefix}{group}.lora_A", (len(GROUPS[group]) * rank, widths_in[group])
            for part in GROUPS[group]:
                yield f"{prefix}{part}.lora_B", (rank, widths_out[part])

    mlp = ("gate_up", "down") if settings.train_mlp else ()
    for i in range(config.layers):
        attention = ("delta_in", "delta_out") if config.find_delta_net(i) else ("qkv", "o")
        groups = attention if settings.train_attn else ()
        experts = config.find_experts(i)
        yield from part_shapes(f"layers.{i}.", groups if experts else (*groups, *mlp), config.intermediate_size)
        if experts:
            for expert in range(experts.count):
                yield from part_shapes(f"layers.{i}.experts.{expert}.", mlp, experts.intermediate_size)
    if settings.train_unembed:
        yield "unembed.lora_A", (rank, hidden)
        yield "unembed.lora_B", (rank, config.vocab_size)
