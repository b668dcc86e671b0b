"""Memory in large pages."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from rlkit.engine.decode.kv_cache import make_zeros


@pytest.mark.parametrize("count", [0, 1000, 3 << 20])
def test_it_is_zero_and_can_be_written(count: int) -> None:
    found = make_zeros(count)
    assert found.dtype == np.float32
    assert len(found) == count
    assert not found.any()
    found += 1
    assert found.sum() == count


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system knows no large pages")
def test_where_there_are_no_large_pages_it_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLargePages(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutLargePages)
    assert not make_zeros(2 << 20).any()
