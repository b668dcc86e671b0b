"""Low-rank adapters: what they add, and its gradient."""

from __future__ import annotations

import pytest
import torch

from rlkit.engine.lora import Lora


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("widths", [(6,), (6, 2, 2), (5, 7)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_the_low_rank_term_has_the_gradient_that_autograd_gives_its_formula(
    rank: int, widths: tuple[int, ...], rows: int
) -> None:
    generator = torch.Generator().manual_seed(rank * 100 + rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight = random(rows, 4).requires_grad_(), random(4, sum(widths))
    lora = Lora(
        random(4, rank * len(widths)).requires_grad_(), tuple(random(rank, w).requires_grad_() for w in widths), 0.5
    )
    upstream, learned = random(rows, sum(widths)), [x, lora.a, *lora.bs]
    found, expected = lora.added(x, weight), x @ weight + lora.delta(x)  # the formula, by autograd alone
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, plain in zip(
        torch.autograd.grad(found, learned, upstream), torch.autograd.grad(expected, learned, upstream), strict=True
    ):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
