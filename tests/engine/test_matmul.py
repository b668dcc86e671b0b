"""Products with packed weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engine.kernels.llvm import COLUMNS, TILE_ROWS
from rlkit.engine.model import matrices
from rlkit.engine.model.matrices import (
    PackedMatrix,
    add_low_rank,
    matmul,
    multiply_rows,
    multiply_transposed,
    pack,
)
from rlkit.engine.model.ops import ROWS
from tests.limits import HANG_S


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 40), st.integers(1, 200), st.integers(1, 3 * COLUMNS + 1), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_a_packed_product_equals_the_plain_product(rows: int, inner: int, columns: int, seed: int) -> None:
    x, weight = random(rows, inner, seed=seed), random(columns, inner, seed=seed + 1)
    packed = pack(weight)
    assert isinstance(packed, PackedMatrix)
    exact = x.double() @ weight.double().t()
    # The error of a sum of n products, each rounded (Higham 2002, §3.1).
    bound = inner * 2.0**-24 * (x.abs().double() @ weight.abs().double().t())
    assert ((matmul(x, packed).double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_with_any_neighbours(threads: int) -> None:
    packed = pack(random(1000, 96, seed=0))
    x = random(600, 96, seed=1)  # more rows than pass at once
    torch.set_num_threads(threads)
    try:
        together = matmul(x, packed)
    finally:
        torch.set_num_threads(1)
    for start, count in ((0, 1), (1, 8), (250, 16), (599, 1)):
        assert torch.equal(matmul(x[start : start + count], packed), together[start : start + count])


def test_a_result_may_be_written_to_a_given_tensor() -> None:
    packed = pack(random(50, 32, seed=0))
    x, room = random(13, 32, seed=1), torch.full((16, 50), torch.nan)
    product = matmul(x, packed, out=room)
    assert product.data_ptr() == room.data_ptr()
    assert torch.equal(product, matmul(x, packed))
    plain_weight = random(32, 50, seed=2)
    assert torch.equal(matmul(x, plain_weight, out=room), x @ plain_weight)


def test_wrong_shapes_are_rejected_before_an_address_is_used() -> None:
    packed, x = pack(random(50, 64, seed=0)), random(8, 64, seed=1)
    for wrong in (x[:, :32], x.double(), random(8, 65, seed=1)):
        with pytest.raises(ValueError, match=r"^x is "):
            matmul(wrong, packed)
    for out in (
        torch.empty(7, 50),
        torch.empty(8, 51),
        torch.empty(8, 50, dtype=torch.float64),
        torch.empty(50, 8).t(),
    ):
        with pytest.raises(ValueError, match=r"^out is "):
            matmul(x, packed, out=out)
    assert ROWS % TILE_ROWS == 0


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_has_no_effect(default: torch.dtype) -> None:
    weight, x = random(50, 64, seed=0), random(8, 64, seed=1)
    expected = matmul(x, pack(weight))
    torch.set_default_dtype(default)
    try:
        assert torch.equal(matmul(x, pack(weight)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_bfloat16_numbers_give_the_bits_of_the_same_float32_numbers(rows: int) -> None:
    weight, x = random(131, 77, seed=0).bfloat16(), random(rows, 77, seed=1)
    halves, wide = pack(weight), pack(weight.float())
    assert isinstance(halves, PackedMatrix)
    assert isinstance(wide, PackedMatrix)
    assert 2 * halves.nbytes == wide.nbytes == -(-131 // COLUMNS) * COLUMNS * 77 * 4
    assert torch.equal(matmul(x, halves), matmul(x, wide))
    assert torch.equal(halves.unpack(), weight.float().t())
    assert torch.equal(halves.unpack(1, 2), weight.float().t()[:, COLUMNS : 2 * COLUMNS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(131,), (70, 30, 31), (COLUMNS, COLUMNS), (5, 1, 3)])
def test_a_low_rank_term_is_added_to_its_part_of_the_columns(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    rank, columns = 3, sum(widths)
    weight, a = random(columns, 77, seed=0).to(dtype), random(rank * len(widths), 77, seed=1)
    bs = [random(rank, width, seed=2 + i) for i, width in enumerate(widths)]
    packed = pack(weight)
    assert isinstance(packed, PackedMatrix)
    served, x = add_low_rank(packed, a, bs, 0.5), random(9, 77, seed=9)
    parts = [x.double() @ a[i * rank : (i + 1) * rank].t().double() @ b.double() for i, b in enumerate(bs)]
    together = matmul(x, served)
    expected = x.double() @ weight.t().double() + 0.5 * torch.cat(parts, 1)
    torch.testing.assert_close(together.double(), expected, rtol=1e-4, atol=1e-4)
    for start, count in ((0, 1), (4, 2), (8, 1)):
        assert torch.equal(matmul(x[start : start + count], served), together[start : start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_many_rows_equal_torch_and_have_its_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_SLAB", 2 * 77 * COLUMNS)  # two panels
    weight, x, grad_y = random(131, 77, seed=0).to(dtype), random(30, 77, seed=1), random(30, 131, seed=2)
    packed = pack(weight)
    x.requires_grad_()
    y = multiply_rows(x, packed)
    torch.testing.assert_close(y, x @ weight.float().t(), rtol=1e-5, atol=1e-4)
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    torch.testing.assert_close(grad_x, grad_y @ weight.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(multiply_transposed(grad_y, packed), grad_x, rtol=0, atol=0)


def test_other_types_are_not_packed() -> None:
    weight = random(50, 32, seed=0).double()
    plain = pack(weight)
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, weight.t())


# A query, a key and a value; the keys and values before them.
SHAPES = ((3, 80), (1, 32, 80), (1, 32, 80))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "columns"), [(("avx512", "amx"), 24), (("avx", "amx", "fma", "f16c", "vaes", "vpclmul"), 16)]
)
def test_a_processor_with_narrower_registers_gets_the_same_numbers(
    missing: tuple[str, ...], columns: int, tmp_path: Path
) -> None:
    program = f"""
import llvmlite.binding, numpy as np
features = llvmlite.binding.get_host_cpu_features()
features.update({{name: False for name in features if name.startswith({missing!r})}})
llvmlite.binding.get_host_cpu_features = lambda: features
import torch
from rlkit.engine.model.matrices import matmul, pack
from rlkit.engine.kernels.llvm import TILE_ROWS, COLUMNS
x = torch.randn(24, 77, generator=torch.Generator().manual_seed(0))
w = torch.randn(131, 77, generator=torch.Generator().manual_seed(1))
print(TILE_ROWS, COLUMNS)
np.save({str(tmp_path / "found.npy")!r}, matmul(x, pack(w)).numpy())
from rlkit.engine.kernels.decode_attention import attend
row, keys, values = (np.random.default_rng(i).standard_normal(n).astype(np.float32) for i, n in enumerate({SHAPES}))
out = np.empty(80, np.float32)
attend(row, keys, values, 21, 32, np.empty(32, np.float32), out)
np.save({str(tmp_path / "mixed.npy")!r}, out)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert list(map(int, done.stdout.split())) == [4, columns]
    exact = random(24, 77, seed=0).double() @ random(131, 77, seed=1).double().t()
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), exact, atol=2e-5)
    row, keys, values = (np.random.default_rng(i).standard_normal(n) for i, n in enumerate(SHAPES))
    keys[0, 21], values[0, 21] = row[1:]
    weights = torch.softmax(torch.from_numpy(keys[0, :22] @ row[0]) / 80**0.5, 0).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "mixed.npy"), weights @ values[0, :22], atol=2e-5)
