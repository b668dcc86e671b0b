from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlkit.trackers import Progress, RunInfo, Tracker
from rlkit.trackers.console import ConsoleTracker, Heartbeat, JsonTracker, render_progress
from tests.limits import HANG_S, wait_until


@pytest.fixture
def other_threads() -> set[threading.Thread]:
    """Threads of tests before this one."""
    return set(threading.enumerate())


def running_heartbeats(other_threads: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name == "rlkit-heartbeat" and thread not in other_threads
    ]


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
def test_line_has_the_progress_and_the_activity_of_the_step(progress: Progress, line: str) -> None:
    assert render_progress(progress) == line


def test_silent_run_gets_lines_until_it_ends(
    other_threads: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.trackers.console.QUIET_S", 0.001)
    monkeypatch.setattr("rlkit.trackers.console.QUIET_MAX_S", 0.002)
    lines = list[str]()
    heartbeat = Heartbeat(lines.append)
    heartbeat.start(lambda: Progress(steps=len(lines) + 1))
    wait_until(lambda: len(lines) >= 5)
    heartbeat.stop()
    count = len(lines)
    assert lines[:3] == ["step 1/1: preparing", "step 1/2: preparing", "step 1/3: preparing"]
    assert not running_heartbeats(other_threads)
    assert len(lines) == count


def test_heartbeat_ends_quietly_if_its_output_is_closed(
    other_threads: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.trackers.console.QUIET_S", 0.01)
    for error in (BrokenPipeError(), ValueError("I/O operation on closed file")):
        written_lines = list[str]()

        def say(line: str, error: Exception = error, written_lines: list[str] = written_lines) -> None:
            written_lines.append(line)
            raise error

        heartbeat = Heartbeat(say)
        heartbeat.start(Progress)
        for thread in running_heartbeats(other_threads):  # none, where it has ended already
            thread.join(HANG_S)
        assert len(written_lines) == 1
        heartbeat.stop()


def test_a_line_postpones_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.trackers.console.QUIET_S", 1e6)
    lines = list[str]()
    heartbeat = Heartbeat(lines.append)
    heartbeat.start(Progress)
    heartbeat.postpone()
    heartbeat.stop()  # ends a wait of days at once
    assert not lines


@pytest.mark.parametrize("as_json", [False, True])
def test_tracker_prints_the_progress_of_a_silent_step(
    as_json: bool, other_threads: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
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
    assert not running_heartbeats(other_threads)


def test_run_that_never_started_prints_no_line() -> None:
    lines = list[str]()
    ConsoleTracker(lines.append).on_finish(None)
    assert not lines
