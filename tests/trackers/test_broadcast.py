from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar

import pytest

from rlkit.trackers import CALL_S, Broadcast, RunResult, Tracker
from rlkit.types import Checkpoint
from tests.limits import wait_until


class Told(Tracker):
    """Remembers the steps and notes that it is told."""

    def __init__(self) -> None:
        self.steps = list[int]()
        self.notes = list[str]()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def on_note(self, message: str) -> None:
        self.notes.append(message)


class Slow(Told):
    """Takes no step before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.go.wait()
        super().on_step(step, metrics)


class Broken(Told):
    """Raises on every call."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route")

    def on_note(self, message: str) -> None:
        raise ConnectionError("no route")

    def on_finish(self, result: RunResult | None) -> None:
        raise ConnectionError("no route")


def test_hanging_tracker_delays_the_run_once_and_gets_all_calls_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, wait, here = list[float](), threading.Event.wait, threading.get_ident()

    def counted(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and threading.get_ident() == here:  # threads of other tests may still wait, too
            waits.append(timeout)
        return wait(event, timeout)

    slow = Slow()
    alone = Broadcast([slow])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", counted)
        for step in range(1000):
            alone.on_step(step, {})
    assert waits == [CALL_S]
    assert slow.steps == []
    slow.go.set()
    alone.on_finish(None)
    assert slow.steps == list(range(1000))


def test_hanging_tracker_does_not_delay_others() -> None:
    slow, quick = Slow(), Told()
    both = Broadcast([slow, quick])
    for step in range(1000):
        both.on_step(step, {})
    wait_until(lambda: quick.steps == list(range(1000)))
    assert slow.steps == []
    slow.go.set()
    both.on_finish(None)


def test_endless_tracker_does_not_block_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.trackers.CALL_S", 0.02)
    monkeypatch.setattr("rlkit.trackers._BEHIND_S", 0.1)
    slow, quick = Slow(), Told()
    both = Broadcast([slow, quick])
    both.on_step(1, {})
    both.on_finish(None)
    assert quick.notes == [
        "the tracker Slow failed and may be incomplete: TooSlow: it had not finished when the run ended"
    ]
    slow.go.set()


def test_failing_tracker_is_noted_once_and_others_get_all_calls() -> None:
    quick = Told()
    both = Broadcast([Broken(), quick])
    for step in range(100):
        both.on_step(step, {})
    both.on_finish(None)
    assert quick.steps == list(range(100))
    assert quick.notes == ["the tracker Broken failed and may be incomplete: ConnectionError: no route"]


def test_queue_of_a_slow_tracker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.trackers.MAX_WAITING_CALLS", 3)
    monkeypatch.setattr("rlkit.trackers.CALL_S", 0.02)
    slow, quick = Slow(), Told()
    both = Broadcast([slow, quick])
    for step in range(10):
        both.on_step(step, {})
    slow.go.set()
    both.on_finish(None)
    assert slow.steps == [0, 1, 2, 3]
    assert quick.steps == list(range(10))
    assert quick.notes == [
        "the tracker Slow failed and may be incomplete: TooSlow: it is too slow, so further events are dropped"
    ]


def test_tracker_is_called_in_the_context_of_the_caller() -> None:
    variable = ContextVar("variable", default="none")

    class Listener(Tracker):
        heard = ""

        def on_note(self, message: str) -> None:
            self.heard = variable.get()

    listener = Listener()
    variable.set("mine")
    Broadcast([listener]).on_note("now")
    assert listener.heard == "mine"


def test_tracker_gets_only_the_hooks_that_it_defines() -> None:
    quick = Told()
    both = Broadcast([Tracker(), quick])
    both.on_checkpoint(Checkpoint(1, "a", "b"))
    both.on_step(1, {})
    both.on_finish(None)
    assert (quick.steps, quick.notes) == ([1], [])


def test_threads_end_with_the_run_and_later_notes_still_arrive() -> None:
    def list_tracker_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("rlkit-Told")]

    quick = Told()
    both = Broadcast([quick])
    both.on_note("one")
    assert len(list_tracker_threads()) == 1
    both.on_finish(None)
    assert list_tracker_threads() == []
    both.on_note("two")
    assert quick.notes == ["one", "two"]
    both.on_finish(None)
    assert list_tracker_threads() == []
