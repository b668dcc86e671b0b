"""Low-rank adapters: what they add, and its gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rlkit.engine.kernels.llvm import COLUMNS
from rlkit.engine.model.lora import Lora, LoraSettings, added_bytes, make_adapter, make_sampling_weights
from rlkit.engine.model.weights import load_weights

from .tiny_models import write_model


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("widths", [(6,), (6, 2, 2), (5, 7)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_low_rank_term_has_the_autograd_gradient_of_its_formula(
    rank: int, widths: tuple[int, ...], rows: int
) -> None:
    generator = torch.Generator().manual_seed(rank * 100 + rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight = random(rows, 4).requires_grad_(), random(4, sum(widths))
    lora = Lora(
        random(rank * len(widths), 4).requires_grad_(), tuple(random(rank, w).requires_grad_() for w in widths), 0.5
    )
    upstream = random(rows, sum(widths))
    both = random(rows, 8).requires_grad_()
    silu = functional.silu(both[:, :4]) * both[:, 4:]
    gelu = functional.gelu(both[:, :4], approximate="tanh") * both[:, 4:]
    for output, expected, entering in (
        (lora.multiply(x, weight), x @ weight + lora.delta(x), x),  # the formula, by autograd alone
        (lora.multiply(both, weight, gate="silu"), silu @ weight + lora.delta(silu), both),
        (lora.multiply(both, weight, gate="gelu"), gelu @ weight + lora.delta(gelu), both),
    ):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        learned = [entering, lora.a, *lora.bs]
        exact = torch.autograd.grad(expected, learned, upstream, retain_graph=True)
        for times in (1, 2):  # what a second micro-batch finds is added to
            output.backward(upstream, retain_graph=True)
            for parameter, plain in zip(learned, exact, strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, times * plain, rtol=1e-12, atol=1e-12)
        for parameter in learned:
            parameter.grad = None


def test_the_memory_of_served_weights_is_that_of_the_adapter(tmp_path: Path) -> None:
    weights = load_weights(write_model(tmp_path / "m"))
    config = weights.config

    def added(settings: LoraSettings) -> int:
        adapter = make_adapter(config, settings, seed=0)
        return added_bytes(make_sampling_weights(weights, adapter, lambda tasks: [task() for task in tasks]), weights)

    def packed(inner: int, columns: int) -> int:
        return 4 * inner * -(-columns // COLUMNS) * COLUMNS

    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = packed(hidden, 12) + packed(12, heads) + packed(hidden, 8) + packed(8, 2 * inner)
    layer += packed(config.heads * config.head_dim, 4) + packed(inner, 4) + 2 * packed(4, hidden)
    assert added(LoraSettings(4, train_unembed=False)) == config.layers * layer
    assert added(LoraSettings(4)) == config.layers * layer + packed(hidden, 4) + packed(4, config.vocab_size)
    assert make_sampling_weights(weights, None, lambda tasks: [task() for task in tasks]) is weights
