"""The worker's invariant, with a clock of its own."""

from __future__ import annotations

import threading
from itertools import groupby

import pytest

from rlkit.engine.server.worker import Worker
from tests.limits import HANG_S

JOBS = 20


@pytest.mark.parametrize("job_s", [0.01, 1.0])
def test_running_samples_advance_between_jobs_for_any_queue_length(job_s: float) -> None:
    now, events, finished = 0.0, list[str](), threading.Event()

    def job() -> None:
        nonlocal now
        now += job_s
        events.append("job")
        if events.count("job") < 10 * JOBS:
            worker.submit(job)  # another one waits already: there is never none
        else:
            finished.set()

    def token() -> bool:
        nonlocal now
        now += 0.02
        events.append("token")
        return True

    worker = Worker(token, clock=lambda: now)
    worker.submit(job)
    worker.submit(job)
    worker.start()
    assert finished.wait(HANG_S)
    worker.stop()
    runs = [(name, len(list(run))) for name, run in groupby(events)]
    jobs = [count for name, count in runs if name == "job"]
    tokens = [count for name, count in runs if name == "token"]
    assert max(jobs) <= max(0.25 / job_s + 1, 1)
    assert min(tokens[1:-1]) >= min(0.25, job_s) / 0.02
    assert max(tokens[:-1]) <= 0.25 / 0.02 + 1


def test_jobs_run_in_submission_order_and_a_failed_job_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, finished = list[int](), threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    worker = Worker(lambda: False)
    for number in range(JOBS):
        worker.submit(lambda number=number: events.append(number))
    worker.submit(fail)
    worker.submit(finished.set)
    worker.start()
    assert finished.wait(HANG_S)
    worker.stop()
    assert events == list(range(JOBS))
    assert "on purpose" in caplog.text


def test_urgent_jobs_run_before_earlier_jobs() -> None:
    events, finished = list[str](), threading.Event()
    worker = Worker(lambda: False)
    for name in ("first", "second"):
        worker.submit(lambda name=name: events.append(name))
    worker.submit(lambda: events.append("soon"), urgent=True)
    worker.submit(finished.set)
    worker.start()
    assert finished.wait(HANG_S)
    worker.stop()
    assert events == ["soon", "first", "second"]


def test_samples_start_and_advance_inside_a_long_job_that_yields() -> None:
    now, tokens, events, finished = 0.0, 0, list[tuple[str, float]](), threading.Event()

    def begin() -> None:
        nonlocal tokens
        tokens = 30

    def token() -> bool:
        nonlocal now, tokens
        now += 0.02
        tokens = max(tokens - 1, 0)
        events.append(("token", now))
        return tokens > 0

    def long_job() -> None:
        nonlocal now
        for part in range(JOBS):
            now += 0.1
            events.append(("part", now))
            if part == 0:
                worker.submit(begin, urgent=True)
            if worker.should_yield:
                worker.let_others_run()

    worker = Worker(token, clock=lambda: now)
    worker.submit(long_job)
    worker.submit(finished.set)
    worker.start()
    assert finished.wait(HANG_S)
    worker.stop()
    runs = [(name, len(list(run))) for name, run in groupby(events, key=lambda entry: entry[0])]
    assert runs[:6] == [("part", 3), ("token", 13), ("part", 3), ("token", 13), ("part", 3), ("token", 4)]
    assert runs[6] == ("part", JOBS - 9)


def test_urgent_jobs_submitted_during_a_job_run_before_the_next() -> None:
    now, events, finished = 0.0, list[str](), threading.Event()

    def job(name: str) -> None:
        nonlocal now
        now += 1.0
        events.append(name)
        if name == "first":
            worker.submit(lambda: events.append("soon"), urgent=True)

    def token() -> bool:
        nonlocal now
        now += 0.2
        events.append("token")
        return False

    worker = Worker(token, clock=lambda: now)
    for name in ("first", "second"):
        worker.submit(lambda name=name: job(name))
    worker.submit(finished.set)
    worker.start()
    assert finished.wait(HANG_S)
    worker.stop()
    assert events[:4] == ["first", "soon", "token", "second"]
