from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlkit.trackers import Progress, RunInfo, Tracker
from rlkit.trackers.console import ConsoleTracker, Heartbeat, JsonTracker, render_progress
from tests.limits import HANG_S, wait_until


@pytest.fixture
def others() -> set[threading.Thread]:
    """Threads of tests before this one."""
    return set(threading.enumerate())


def heartbeats(others: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlkit-heartbeat" and thread not in others]


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress(steps=20, phase="sampling"), "step 1/20: sampling"),
        (
            Progress(
                step=2,
                steps=20,
                phase="sampling",
                queued=1,
                running=29,
                finished=2,
                activity="replies in progress: 29, programs: 1",
            ),
            "step 3/20: sampling, 2 of 32 rollouts done; replies in progress: 29, programs: 1",
        ),
        (
            Progress(step=20, steps=20, phase="evaluating", running=3, finished=1, failed=2),
            "step 20/20: evaluating, 1 of 4 rollouts done, 2 failed",
        ),
        (
            Progress(step=3, steps=4, phase="training", activity="training sequences to go: 16"),
            "step 4/4: training; training sequences to go: 16",
        ),
    ],
)
def test_a_line_says_where_the_step_stands_and_what_is_under_way(progress: Progress, line: str) -> None:
    assert render_progress(progress) == line


def test_a_silent_run_is_told_of_again_and_again_until_it_ends(others: set[threading.Thread]) -> None:
    lines = list[str]()
    heartbeat = Heartbeat(lines.append, quiet_s=0.001, quiet_max_s=0.002)
    heartbeat.start(lambda: Progress(steps=len(lines) + 1))
    wait_until(lambda: len(lines) >= 5)
    heartbeat.stop()
    count = len(lines)
    assert lines[:3] == ["step 1/1: preparing", "step 1/2: preparing", "step 1/3: preparing"]
    assert not heartbeats(others)
    assert len(lines) == count


def test_lines_that_nobody_can_read_end_quietly(others: set[threading.Thread]) -> None:
    for error in (BrokenPipeError(), ValueError("I/O operation on closed file")):
        tried = list[str]()

        def say(line: str, error: Exception = error, tried: list[str] = tried) -> None:
            tried.append(line)
            raise error

        heartbeat = Heartbeat(say, quiet_s=0.01)
        heartbeat.start(Progress)
        for thread in heartbeats(others):  # none, where it has ended already
            thread.join(HANG_S)
        assert len(tried) == 1
        heartbeat.stop()


def test_a_line_postpones_the_next() -> None:
    lines = list[str]()
    heartbeat = Heartbeat(lines.append, quiet_s=1e6)
    heartbeat.start(Progress)
    heartbeat.postpone()
    heartbeat.stop()  # ends a wait of days at once
    assert not lines


@pytest.mark.parametrize("as_json", [False, True])
def test_a_tracker_says_where_a_silent_step_stands(
    as_json: bool, others: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.trackers.console.QUIET_S", 0.001)
    lines = list[str]()
    tracker: Tracker = JsonTracker(lambda _: None, note=lines.append) if as_json else ConsoleTracker(lines.append)
    run = RunInfo(
        "first",
        Path("/runs/first"),
        "acme/tiny",
        ("words",),
        "the engine",
        lambda: Progress(steps=3, activity="programs: 4"),
    )
    tracker.on_start(run)
    wait_until(lambda: "step 1/3: preparing; programs: 4" in lines)
    tracker.on_finish(None)
    assert not heartbeats(others)


def test_a_run_that_never_started_ends_without_a_line() -> None:
    lines = list[str]()
    ConsoleTracker(lines.append).on_finish(None)
    assert not lines
