"""The process beside a run, with services that answer, are silent, or are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.config.schema.track import track_config
from rlkit.errors import MissingError
from rlkit.trackers import Broadcast, Progress, RunInfo, RunResult
from rlkit.trackers.console import ConsoleTracker
from rlkit.trackers.docent import DocentSettings, DocentTracker
from rlkit.trackers.from_config import make_trackers
from rlkit.trackers.service import NotSent
from rlkit.trackers.sync import read_progress
from rlkit.trackers.tensorboard import TensorboardSettings, TensorboardTracker
from tests.limits import wait_until
from tests.trackers.folders import write_run, write_step
from tests.trackers.stubs import docent_stub, silent_server


def info(directory: Path) -> RunInfo:
    return RunInfo(directory.name, directory, "acme/tiny", ("sums",), "the engine", Progress)


def over(directory: Path) -> RunResult:
    return RunResult(directory.name, directory, "completed", 3)


def wait_for(directory: Path, name: str, step: int) -> None:
    wait_until(lambda: read_progress(directory, name).step >= step, why=lambda: f"step {step} was not sent")


def test_a_run_is_sent_while_it_goes_on_and_to_its_end(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, status="running", settings={"track": {"tensorboard": {}}})
    tracker = TensorboardTracker(TensorboardSettings())
    tracker.on_start(info(directory))
    wait_for(directory, "tensorboard", 1)
    write_step(directory, 2)
    tracker.on_step(2, {})
    wait_for(directory, "tensorboard", 2)
    write_step(directory, 3)
    tracker.on_step(3, {})
    tracker.on_finish(over(directory))
    assert read_progress(directory, "tensorboard").step == 3


def test_a_service_that_never_answers_keeps_the_end_of_a_run_for_as_long_as_is_said_and_misses_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("docent")
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    monkeypatch.setenv("DOCENT_API_KEY", "the-key")
    with silent_server() as url:
        directory = write_run(tmp_path / "run", settings={"track": {"docent": {"url": url}}})
        tracker = DocentTracker(DocentSettings(url=url), last_s=0.5)
        tracker.on_start(info(directory))
        for step in range(100):
            tracker.on_step(step, {})
        with pytest.raises(NotSent, match=r"0\.5 s after the run's end; `rlkit sync run --to docent` sends the rest"):
            tracker.on_finish(over(directory))
    with docent_stub() as stub:
        result = CliRunner().invoke(app, ["sync", str(directory), "--to", "docent", f"url={stub.url}", "--json"])
        assert json.loads(result.stdout) == {"run": "run", "to": "docent", "steps": 4}
        assert len(stub.runs) == 12


@pytest.mark.slow
def test_a_process_that_gives_up_is_told_of_once(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, settings={"track": {"tensorboard": {"directory": "/dev/null/x"}}})
    notes = list[str]()
    both = Broadcast([TensorboardTracker(TensorboardSettings()), ConsoleTracker(notes.append)])
    both.on_start(info(directory))
    del notes[:]

    def step_again() -> bool:
        both.on_step(1, {})
        return any("failed" in note for note in notes)

    wait_until(step_again)
    both.on_step(2, {})
    both.on_finish(None)
    (note,) = (note for note in notes if "failed" in note)
    assert note.startswith(
        "the tracker TensorboardTracker failed and may be incomplete: NotSent: tensorboard: opening a run"
    )
    assert "NotADirectoryError" in note
    assert "rlkit sync run" in note


@pytest.mark.slow
def test_steps_are_sent_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.trackers.service._RESTART_S", 0.0)
    events = tmp_path / "events"
    events.write_text("a file in the way")
    track = {"track": {"tensorboard": {"directory": str(events)}}}
    directory = write_run(tmp_path / "run", steps=1, status="running", settings=track)
    tracker = TensorboardTracker(TensorboardSettings())
    tracker.on_start(info(directory))

    def has_failed() -> bool:
        try:
            tracker.on_step(1, {})
        except NotSent:
            return True
        return False

    wait_until(has_failed)
    events.unlink()
    wait_for(directory, "tensorboard", 1)
    tracker.on_finish(over(directory))


def test_what_is_missing_for_a_service_is_told_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCENT_API_KEY", raising=False)
    with pytest.raises(MissingError, match="docent"):
        make_trackers(track_config({"tensorboard": {}, "docent": {}}))
    assert len(make_trackers(track_config({"tensorboard": {}}))) == 1
    assert make_trackers(track_config()) == []
