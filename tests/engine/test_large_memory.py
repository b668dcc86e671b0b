"""Memory in large pages."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from rlkit.engine.decode.kv_cache import make_zeros


@pytest.mark.parametrize("count", [0, 1000, 3 << 20])
def test_large_memory_is_zeroed_and_writable(count: int) -> None:
    zeros = make_zeros(count)
    assert zeros.dtype == np.float32
    assert len(zeros) == count
    assert not zeros.any()
    zeros += 1
    assert zeros.sum() == count


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system knows no large pages")
def test_small_pages_are_used_if_there_are_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLargePages(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutLargePages)
    assert not make_zeros(2 << 20).any()
