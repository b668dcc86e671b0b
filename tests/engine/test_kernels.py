"""The compiled functions themselves; what they compute is seen through `ops`, `products`, `draw` and `steps`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkit.engine.model.ops import exponentiate_rows, glu


def test_the_exponential_is_right_to_two_units_in_the_last_place() -> None:
    # silu(g) · u = g / (1 + e^−g) · u, which for large −g is g · e^g · u: the exponential alone.
    exponents = torch.linspace(20, 87, 200_001)
    outputs = glu(torch.stack([-exponents, -1 / exponents], 1))[:, 0].double()
    exact = 1 / (1 + torch.exp(exponents.double()))
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    assert float(((outputs - exact).abs() / unit).max()) < 5  # two of the exponential, and three roundings


@pytest.mark.parametrize("exponent", [-104.0, -88.0, 88.5, 700.0])
def test_the_exponential_ends_where_float32_does(exponent: float) -> None:
    output = glu(torch.tensor([[-exponent, 1.0]]))
    assert float(output) == pytest.approx(-exponent / (1 + np.exp(np.float64(exponent))), abs=1e-35)


@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 63, 64, 65, 200])
def test_the_maximum_of_a_row_is_found_at_any_position(count: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0))
    for place in range(count):
        rows = numbers.repeat(3, 1)  # what stands before and behind a row has no part in it
        rows[0], rows[2], rows[1, place] = 100, 100, 10
        rows[1, (place + 1) % count] = 10 if count == 1 else torch.nan
        assert float(exponentiate_rows(rows)[0][1]) == 10


def test_exponentials_reject_tensors_of_another_layout() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        exponentiate_rows(torch.randn(4, 80)[:, ::2])
