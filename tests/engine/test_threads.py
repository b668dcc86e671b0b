"""Sharing work among threads, and threads that wait for each other in compiled code."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit

from rlkit.engine.kernels import threads
from rlkit.engine.kernels.threads import OPEN_BARRIER, Lanes, parallel_for, wait_at_barrier
from tests.limits import HANG_S


@pytest.fixture
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("count", "min_per_thread", "ranges"), [(0, 1, 1), (2, 5, 1), (9, 5, 1), (10, 5, 2), (100, 5, 3)]
)
def test_the_ranges_cover_the_work_once(count: int, min_per_thread: int, ranges: int, three_threads: None) -> None:
    done: list[tuple[int, int]] = []
    parallel_for(lambda first, last: done.append((first, last)), count, min_per_thread=min_per_thread)
    assert len(done) == ranges
    assert [i for first, last in sorted(done) for i in range(first, last)] == list(range(count))


def test_the_ranges_run_concurrently(three_threads: None) -> None:
    meeting = threading.Barrier(3, timeout=HANG_S)
    parallel_for(lambda _first, _last: meeting.wait() and None, 3, min_per_thread=1)


def test_an_error_in_any_range_is_raised(three_threads: None) -> None:
    def task(first: int, last: int) -> None:
        if last == 3:
            raise ValueError("the last one")

    with pytest.raises(ValueError, match="the last one"):
        parallel_for(task, 3, min_per_thread=1)


@pytest.mark.parametrize(("tasks", "threads"), [(1, 4), (2, 2), (3, 2)])
def test_tasks_fewer_than_lanes_share_all_cores(tasks: int, threads: int) -> None:
    lanes = Lanes(4)
    assert lanes.run([torch.get_num_threads] * tasks) == [threads] * tasks
    lanes.close()


def test_one_thread_runs_all_ranges() -> None:
    threads: list[threading.Thread] = []
    parallel_for(lambda _first, _last: threads.append(threading.current_thread()), 1000, min_per_thread=1)
    assert threads == [threading.current_thread()]


def test_an_error_is_raised_after_all_ranges_have_ended(three_threads: None) -> None:
    done: list[int] = []
    barrier = threading.Barrier(3)

    def task(first: int, last: int) -> None:
        barrier.wait(HANG_S)
        if first == 0:
            raise ValueError("the first one")
        time.sleep(0.2)
        done.append(first)

    with pytest.raises(ValueError, match="the first one"):
        parallel_for(task, 3, min_per_thread=1)
    assert sorted(done) == [1, 2]


def test_a_range_without_a_thread_is_not_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    members: list[int] = []
    given_up = threading.Event()
    start, left = threading.Thread.start, iter([True, False])

    def refused(thread: threading.Thread) -> None:
        if not next(left):
            raise RuntimeError("can't start new thread")
        start(thread)

    def task(member: int) -> None:
        members.append(member)
        given_up.wait(HANG_S)

    threads._pool.cache_clear()  # pyright: ignore[reportPrivateUsage]  none is idle
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads.run_team(task, 3, on_failure=given_up.set)
    time.sleep(0.2)  # the thread there is has taken what is in the queue by now
    assert set(members) <= {1}


def test_a_fork_starts_its_own_threads() -> None:
    program = """
import os, torch
from rlkit.engine.kernels.threads import parallel_for
torch.set_num_threads(3)
parallel_for(lambda first, last: None, 3, min_per_thread=1)
child = os.fork()
if not child:
    parallel_for(lambda first, last: None, 3, min_per_thread=1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout == "7\n"


@njit(nogil=True)
def pass_on(counter: int, members: int, member: int, rounds: int, seen_counts: np.ndarray, notes: np.ndarray) -> None:
    """In each round write a note, meet, and count how many notes of this round are seen; meet again."""
    met = 0
    for turn in range(rounds):
        notes[member, 0] = turn + 1
        met += members
        wait_at_barrier(counter, met)
        for other in range(members):
            seen_counts[member] += notes[other, 0] == turn + 1
        met += members
        wait_at_barrier(counter, met)


def run(members: int, rounds: int, start: int = 0, present: int | None = None) -> np.ndarray:
    counter, seen_counts, notes = np.full(8, start), np.zeros(members, np.int64), np.zeros((members, 8), np.int64)
    threads = [
        threading.Thread(
            target=pass_on, args=(counter.ctypes.data, members, member, rounds, seen_counts, notes), daemon=True
        )
        for member in range(members if present is None else present)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_S)
        assert not thread.is_alive()
    return seen_counts


def test_after_a_barrier_all_members_see_all_writes() -> None:
    for members in (1, 2, 5):  # also more than there are cores
        assert run(members, 300).tolist() == [300 * members] * members


def test_members_do_not_wait_for_a_failed_member() -> None:
    assert run(3, 50, start=OPEN_BARRIER, present=2)[:2].min() >= 50
