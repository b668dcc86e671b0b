"""Threads that wait for each other in compiled code."""

from __future__ import annotations

import threading

import numpy as np
from numba import njit

from rlkit.engine.kernels.barrier import GIVEN_UP, meet
from tests.limits import HANG_S


@njit(nogil=True)
def pass_on(counter: int, members: int, member: int, rounds: int, seen: np.ndarray, notes: np.ndarray) -> None:
    """In each round write a note, meet, and count how many notes of this round are seen; meet again."""
    met = 0
    for turn in range(rounds):
        notes[member, 0] = turn + 1
        met += members
        meet(counter, met)
        for other in range(members):
            seen[member] += notes[other, 0] == turn + 1
        met += members
        meet(counter, met)


def run(members: int, rounds: int, start: int = 0, present: int | None = None) -> np.ndarray:
    counter, seen, notes = np.full(8, start), np.zeros(members, np.int64), np.zeros((members, 8), np.int64)
    threads = [
        threading.Thread(target=pass_on, args=(counter.ctypes.data, members, member, rounds, seen, notes), daemon=True)
        for member in range(members if present is None else present)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_S)
        assert not thread.is_alive()
    return seen


def test_after_a_meeting_everybody_sees_what_each_wrote() -> None:
    for members in (1, 2, 5):  # also more than there are cores
        assert run(members, 300).tolist() == [300 * members] * members


def test_where_one_gave_up_nobody_waits_for_it() -> None:
    assert run(3, 50, start=GIVEN_UP, present=2)[:2].min() >= 50
