from __future__ import annotations

import gc

from rlkit._util.gc_tuning import rare_garbage_collection


def test_the_garbage_collector_is_restored_after_the_last_run() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    first, second = rare_garbage_collection(), rare_garbage_collection()
    first.__enter__()
    assert gc.get_freeze_count() > frozen
    second.__enter__()
    assert gc.get_threshold()[0] > before[0]
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > before[0], "one still runs"
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_disabled_garbage_collector_stays_disabled() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0, 10, 10)
    try:
        with rare_garbage_collection():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_new_garbage_is_still_collected() -> None:
    class Knot:
        freed = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Knot.freed += 1

    with rare_garbage_collection():
        for _ in range(30_000):
            Knot()
        assert Knot.freed > 10_000
