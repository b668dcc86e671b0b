"""The compiled operations against torch's, and their gradients against autograd's of the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlkit.engine.model.ops import Rope, apply_rope, apply_rope_in_place, glu, rms_norm


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rope(rows: int, size: int) -> Rope:
    angles = torch.outer(torch.arange(rows), torch.logspace(0, -3, size // 2)).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


@pytest.fixture
def threads_of_torch(threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(1)


def turned(x: torch.Tensor, heads: int, by: Rope) -> torch.Tensor:
    """The rotation as a product of complex numbers."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[:, :heads, :half].double(), x[:, :heads, half:].double())
    numbers = numbers * torch.complex(by[0][..., :half].double(), by[1][..., :half].double())
    return torch.cat([torch.cat([numbers.real, numbers.imag], -1), x[:, heads:].double()], 1)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_operations_equal_their_formulas(rows: int, scale: float) -> None:
    x, weight = random(rows, 48, seed=0, scale=scale), random(48, seed=1)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-5, atol=1e-12)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(glu(x).double(), functional.silu(gate) * up, rtol=1e-5, atol=1e-20)
    exact = gate * torch.sigmoid(gate * (8 / torch.pi) ** 0.5 * (1 + 0.044715 * gate * gate)) * up
    torch.testing.assert_close(glu(x, "gelu").double(), exact, rtol=2e-5, atol=1e-20)
    heads = x.view(rows, 6, 8)
    exact = turned(heads, 4, rope(rows, 8))
    torch.testing.assert_close(apply_rope(heads, 4, rope(rows, 8)).double(), exact, rtol=1e-5, atol=1e-6 * scale)
    in_place = heads.clone()
    apply_rope_in_place(in_place, 4, rope(rows, 8))
    torch.testing.assert_close(in_place.double(), exact, rtol=1e-5, atol=1e-6 * scale)
    apply_rope_in_place(in_place, 4, rope(rows, 8), inverse=True)
    torch.testing.assert_close(in_place, heads, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["norm", "silu", "gelu"])
def test_a_gradient_equals_the_formula_in_float64(name: str, threads: int, threads_of_torch: None) -> None:
    rows = 40 if threads == 1 else 6000  # enough to be shared
    weight = random(48, seed=1)
    compiled: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "norm": lambda x: rms_norm(x, weight, 1e-5),
        "silu": glu,
        "gelu": lambda x: glu(x, "gelu"),
    }
    formula: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "norm": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double(),
        "silu": lambda x: functional.silu(x[:, :24]) * x[:, 24:],
        "gelu": lambda x: functional.gelu(x[:, :24], approximate="tanh") * x[:, 24:],
    }
    x = random(rows, 48, seed=0, scale=3.0).requires_grad_()
    exact = x.detach().double().requires_grad_()
    results = compiled[name](x), formula[name](exact)
    upstream = random(*results[0].shape, seed=2)
    results[0].backward(upstream)
    results[1].backward(upstream.double())
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad - exact.grad).norm() / exact.grad.norm() < 1e-6


def turned_in_place(x: torch.Tensor, by: Rope) -> torch.Tensor:
    heads = x.view(-1, 12, 8).clone()
    apply_rope_in_place(heads, 9, by)
    return heads


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_with_any_neighbours(threads: int) -> None:
    x, weight, by = random(4000, 96, seed=0), random(96, seed=1), rope(4000, 8)
    torch.set_num_threads(threads)
    try:
        together = rms_norm(x, weight, 1e-5), glu(x), turned_in_place(x, by)
    finally:
        torch.set_num_threads(1)
    for row in (0, 1777, 3999):
        row_slice = slice(row, row + 1)
        turn = by[0][row_slice], by[1][row_slice]
        alone = rms_norm(x[row_slice], weight, 1e-5), glu(x[row_slice]), turned_in_place(x[row_slice], turn)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b[row_slice])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_finite_and_non_finite_values_do_not_mix(value: float) -> None:
    x = torch.ones(2, 48)
    x[0, 0] = value
    by_formula = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rms_norm(x, torch.ones(48), 1e-5), by_formula, equal_nan=True)
    exact = functional.silu(x[:, :24].double()) * x[:, 24:].double()
    torch.testing.assert_close(glu(x).double(), exact, equal_nan=True, rtol=1e-5, atol=1e-30)
