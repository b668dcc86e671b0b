from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlkit._util.sections import Section
from rlkit.errors import UsageError
from rlkit.trackers.recorded_run import RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.trackers.sync import SendingFailed, read_progress, send
from rlkit.types import Json
from tests.trackers.folders import write_run, write_step


class NoSettings(Section):
    """A service without settings."""


class Memory(ServiceTracker[NoSettings]):
    """A service that remembers, and fails where it is told to."""

    name = "memory"
    settings_type = NoSettings

    def __init__(self, faults: list[str] | None = None) -> None:
        super().__init__(NoSettings())
        self.faults = faults or []
        self.opened: list[Mapping[str, Json]] = []
        self.steps: list[int] = []
        self.closed: list[str] = []

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:
        self._fail("open")
        self.opened.append(state)
        return {"id": state.get("id", f"new {len(self.opened)}")}

    def show(self, step: RecordedStep) -> None:
        self._fail(f"step {step.number}")
        self.steps.append(step.number)

    def close(self, status: str) -> None:
        self._fail("close")
        self.closed.append(status)

    def _fail(self, place: str) -> None:
        if place in self.faults:
            self.faults.remove(place)
            raise ConnectionError(f"no {place}")


class Other(Memory):
    name = "another"


def no_sleep(seconds: float) -> None:
    assert seconds > 0


def test_steps_are_sent_once_and_later_steps_to_the_same_run(tmp_path: Path) -> None:
    directory, service = write_run(tmp_path / "run"), Memory()
    assert send(directory, service) == 4
    assert (service.steps, service.closed) == ([0, 1, 2, 3], ["completed"])
    assert send(directory, service) == 0
    write_step(directory, 4)
    assert send(directory, service) == 1
    assert service.steps == [0, 1, 2, 3, 4]
    assert service.opened == [{}, {"id": "new 1"}, {"id": "new 1"}]


def test_all_steps_can_be_sent_again_to_a_new_run(tmp_path: Path) -> None:
    directory, service = write_run(tmp_path / "run"), Memory()
    send(directory, service)
    assert send(directory, service, is_new_run=True) == 4
    assert service.opened == [{}, {}]
    assert read_progress(directory, "memory").state == {"id": "new 2"}


def test_services_have_separate_progress(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    assert send(directory, Memory()) == send(directory, Other()) == 4


def test_service_that_fails_temporarily_gets_all_steps(tmp_path: Path) -> None:
    service = Memory(faults=["open", "step 1", "step 1", "step 3", "close"])
    assert send(write_run(tmp_path / "run"), service, sleep=no_sleep) == 4
    assert service.steps == [0, 1, 2, 3]


def test_service_that_keeps_failing_gets_the_remaining_steps_later(tmp_path: Path) -> None:
    directory, service = write_run(tmp_path / "run"), Memory(faults=["step 2"] * 4)
    with pytest.raises(
        SendingFailed, match=r"memory: sending step 2 failed: ConnectionError: no step 2; to retry: `rlkit sync"
    ):
        send(directory, service, sleep=no_sleep)
    assert send(directory, service) == 2
    assert service.steps == [0, 1, 2, 3]


def test_failure_message_of_a_service_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "step 2")
    with pytest.raises(SendingFailed) as raised:
        send(write_run(tmp_path / "run"), Memory(faults=["open"] * 9), sleep=no_sleep)
    assert "no open" in str(raised.value)
    with pytest.raises(SendingFailed) as raised:
        send(tmp_path / "run", Memory(faults=["step 2"] * 9), sleep=no_sleep)
    assert "no ***" in str(raised.value)


def test_sync_waits_for_a_running_run(tmp_path: Path) -> None:
    directory, service = write_run(tmp_path / "run", steps=1, status="running"), Memory()

    def sleep(seconds: float) -> None:
        if len(service.steps) < 4:
            write_step(directory, len(service.steps))

    assert send(directory, service, has_ended=lambda: len(service.steps) == 4, sleep=sleep) == 4
    assert service.steps == [0, 1, 2, 3]


def test_only_one_process_sends_a_run_to_a_service(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")

    class Twice(Memory):
        def show(self, step: RecordedStep) -> None:
            with pytest.raises(UsageError, match="run is being sent to memory by another process"):
                send(directory, Memory())
            send(directory, Other())

    send(directory, Twice())


def test_damaged_progress_file_is_ignored(tmp_path: Path) -> None:
    directory, service = write_run(tmp_path / "run"), Memory()
    (directory / "trackers").mkdir()
    (directory / "trackers" / "memory.json").write_text("{")
    assert send(directory, service) == 4
