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
from rlkit.engine.model.ops import ROWS, PackedMatrix, matmul, matrix_bytes, pack, require_tensor
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


def test_only_float32_on_the_cpu_is_packed() -> None:
    weight = random(50, 32, seed=0)
    assert matrix_bytes(pack(weight)) == -(-50 // COLUMNS) * COLUMNS * 32 * 4
    for other in (weight.double(), weight.bfloat16()):
        assert torch.equal(require_tensor(pack(other)), other.t())
        assert matrix_bytes(pack(other)) == other.nbytes


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
from rlkit.engine.model.ops import matmul, pack
from rlkit.engine.kernels.llvm import TILE_ROWS, COLUMNS
x = torch.randn(24, 77, generator=torch.Generator().manual_seed(0))
w = torch.randn(131, 77, generator=torch.Generator().manual_seed(1))
print(TILE_ROWS, COLUMNS)
np.save({str(tmp_path / "found.npy")!r}, matmul(x, pack(w)).numpy())
from rlkit.engine.kernels.decode_attention import attend
row, keys, values = (np.random.default_rng(i).standard_normal(n).astype(np.float32) for i, n in enumerate({SHAPES}))
out = np.empty(80, np.float32)
attend(row, keys, values, 21, np.empty(32, np.float32), out)
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
