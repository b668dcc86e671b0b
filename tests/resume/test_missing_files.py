"""Runs of which a file or a folder is gone or cut off: each goes on exactly, or refuses and changes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import rlkit
from rlkit.store import RunStore, table
from rlkit.store import history as histories
from rlkit.store.history import table_path
from rlkit.tools.audit import audit
from tests.marks import split_slow
from tests.simulation import Simulation, Talk

MODES: dict[str, dict[str, object]] = {"sync": {"mode": "sync"}, "async": {"mode": "async", "max_staleness": 2}}
STEPS = 5
STOPPED_S = {"sync": 54.0, "async": 26.0}
"""In the middle of the fourth step; the third was not saved."""

WHOLE = (
    "config.yaml",
    "run.json",
    "metrics.jsonl",
    "checkpoints.jsonl",
    "usage.json",
    "lock",
    "state",
    "journal",
    "episodes",
    "updates",
    "pieces.jsonl",
)
"""What a run leaves; each is removed as a whole."""

REFUSED = {"run.json", "state", "journal", "episodes"}
"""The run takes its last step again, from the episodes."""


def simulation(directory: Path, mode: str) -> Simulation:
    tasks = [Talk(number) for number in range(40)]
    return Simulation(directory, settings={"schedule": MODES[mode], "steps": STEPS}, tasks=tasks)


@pytest.fixture(scope="module", params=split_slow(MODES, lambda name: name == "sync"))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulation, Simulation]:
    """A run that was stopped in the middle, and the same that was not."""
    folder = tmp_path_factory.mktemp("runs")
    stopped, uninterrupted = simulation(folder / "stopped", request.param), simulation(folder / "whole", request.param)
    uninterrupted.train()
    stopped.train_until(STOPPED_S[request.param])
    assert [line["step"] for line in stopped.lines()] == [1, 2, 3]
    assert sorted(path.name for path in stopped.directory.iterdir()) == sorted(WHOLE)
    assert json.loads((stopped.directory / "checkpoints.jsonl").read_text().splitlines()[-1])["step"] == 2
    return stopped, uninterrupted


def read_files(directory: Path) -> dict[str, bytes]:
    """All files but the lock, which holds the number of the last process that took it."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def read_trained_groups(directory: Path) -> list[tuple[int, int, str]]:
    """Step, draw and task of all groups of which there is a table that can be read."""
    groups = list[tuple[int, int, str]]()
    for step in range(1, STEPS + 1):
        with suppress(OSError, ValueError):
            groups += [
                (step, record.group.draw, record.group.task) for record in table.read_table(table_path(directory, step))
            ]
    return groups


def resume_harmed(
    stopped: Simulation, uninterrupted: Simulation, folder: Path, harm: Callable[[Path], None]
) -> str | None:
    """Harm a copy of a run and resume it; what it says if it refuses."""
    run = simulation(folder / "run", "sync")
    run.settings, run.world = stopped.settings, deepcopy(stopped.world)
    shutil.copytree(stopped.directory, run.directory)
    harm(run.directory)
    files_before = read_files(run.directory)
    try:
        result = run.train(resume=True)
    except rlkit.UsageError as error:
        assert "\n" not in str(error)
        assert read_files(run.directory) == files_before
        return str(error)
    assert (result.status, result.steps) == ("completed", STEPS)
    trained = read_trained_groups(run.directory)
    assert len({draw for _, draw, _ in trained}) == len(trained)
    assert {step for step, *_ in trained} >= {4, 5}
    if stopped.settings["schedule"] == MODES["sync"]:
        assert set(trained) <= set(read_trained_groups(uninterrupted.directory))
        assert run.weights() == uninterrupted.weights()
    return None


@pytest.mark.parametrize("name", WHOLE)
def test_run_without_one_file_resumes_exactly_or_is_rejected(
    name: str, runs: tuple[Simulation, Simulation], tmp_path: Path
) -> None:
    def remove(directory: Path) -> None:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    message = resume_harmed(*runs, tmp_path, remove)
    assert (message is not None) == (name in REFUSED), message
    assert message is None or name in message


@pytest.mark.parametrize("journal", [True, False])
def test_run_without_its_finished_work_is_not_restarted(
    runs: tuple[Simulation, Simulation], tmp_path: Path, journal: bool
) -> None:
    stopped, uninterrupted = runs

    def harm(directory: Path) -> None:
        for name in ("state", "episodes", *(["journal"] if journal else [])):
            shutil.rmtree(directory / name)
        for name in ("metrics.jsonl", "checkpoints.jsonl"):
            (directory / name).unlink()

    assert resume_harmed(stopped, uninterrupted, tmp_path, harm) is not None


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.9])
def test_run_with_a_missing_or_truncated_file_resumes_exactly_or_is_rejected(
    share: float | None, runs: tuple[Simulation, Simulation], tmp_path: Path
) -> None:
    stopped, uninterrupted = runs
    files = [path.relative_to(stopped.directory) for path in stopped.directory.rglob("*") if path.is_file()]
    assert len(files) >= len(WHOLE)
    for number, file in enumerate(files):

        def cut(directory: Path, path: Path = file) -> None:
            if share is None:
                return (directory / path).unlink()
            data = (directory / path).read_bytes()
            (directory / path).write_bytes(data[: int(share * len(data))])
            return None

        message = resume_harmed(stopped, uninterrupted, tmp_path / str(number), cut)
        assert message is None or file.name in message, (file, message)


def test_completed_run_without_state_cannot_be_extended(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    run.train()
    shutil.rmtree(run.directory / "state")
    run.settings = {"steps": 6}
    files_before = read_files(run.directory)
    with pytest.raises(rlkit.UsageError, match=r"state/step=000003.json, .* is missing; the run cannot be resumed"):
        run.train(resume=True)
    assert read_files(run.directory) == files_before


def test_run_killed_before_its_first_draw_starts(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    run.train()
    expected = run.weights()
    again = Simulation(tmp_path / "again")
    again.train_until(0.0)
    for name in ("state", "journal"):
        shutil.rmtree(again.directory / name, ignore_errors=True)
    again.train(resume=True)
    assert again.weights() == expected


def trained_twice(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """A run that an earlier release resumed without its state: its tasks were drawn anew from the first."""
    run = Simulation(directory)
    run.train()
    shutil.rmtree(run.directory / "state")
    run.settings = {"steps": 6}
    with monkeypatch.context() as earlier:
        earlier.setattr("rlkit.store.history.has_started", lambda directory: False)
        about = json.loads((directory / "run.json").read_text())
        del about["has_state"]
        (directory / "run.json").write_text(json.dumps(about))
        load = histories.load_resume_history

        def forgetful(directory: Path) -> histories.History:
            path = histories.state_path(directory, 0)
            state = json.loads(path.read_text())
            path.rename(histories.state_path(directory, 3))
            history = load(directory)
            histories.state_path(directory, 3).rename(path)
            history.state_step, history.state = 0, state
            return history

        earlier.setattr("rlkit.store.history.load_resume_history", forgetful)
        run.train(resume=True)
    return run


def test_audit_names_draws_trained_on_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained_twice(tmp_path / "run", monkeypatch)
    (report,) = asyncio.run(audit(run.directory)).values()
    assert report.groups == 12
    assert (report.mismatch or "").startswith("words: draws 0–5 were trained on in steps 1–3 and again in steps 4–6: ")


def test_an_audit_needs_no_state(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    run.train()
    shutil.rmtree(run.directory / "state")
    (report,) = asyncio.run(audit(run.directory)).values()
    assert (report.groups, report.mismatch) == (6, None)


def test_state_rejected_by_the_task_source_changes_no_file(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    run.train()
    (run.directory / "state" / "step=000003.json").write_text("{}")
    run.settings = {"steps": 6}
    files_before = read_files(run.directory)
    with pytest.raises(rlkit.UsageError, match="the task sources cannot load it"):
        run.train(resume=True)
    assert read_files(run.directory) == files_before


@pytest.mark.parametrize(
    ("remainder", "message"), [(None, "is missing"), ("", "is damaged"), ("steps: 9\n", "is damaged")]
)
def test_missing_or_damaged_configuration_is_an_error(
    remainder: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    monkeypatch.chdir(tmp_path)
    run = Simulation(tmp_path / "run")
    run.train()
    path = run.directory / "config.yaml"
    if remainder is None:
        path.unlink()
    else:
        path.write_text(remainder)
    files_before = read_files(run.directory)
    result: Any = CliRunner().invoke(app, ["resume", str(run.directory)], prog_name="rlkit")
    assert result.exit_code == 2
    assert f"config.yaml {message}" in result.stderr
    assert "rlkit train FILE --name NAME --resume" in result.stderr
    assert read_files(run.directory) == files_before


def test_run_without_run_json_is_neither_resumed_nor_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    run = Simulation(tmp_path / "run")
    run.train()
    (run.directory / "run.json").unlink()
    files_before = read_files(run.directory)
    result: Any = CliRunner().invoke(app, ["resume", str(run.directory)], prog_name="rlkit")
    assert (result.exit_code, "run.json is missing" in result.stderr) == (2, True)
    with pytest.raises(rlkit.UsageError, match=r"run\.json is missing"):
        run.train()
    assert read_files(run.directory) == files_before


def test_store_that_fails_to_open_releases_its_lock(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    run.train()
    (run.directory / "checkpoints.jsonl").write_text("nonsense\n")
    for _ in range(2):
        with pytest.raises(rlkit.UsageError, match=r"checkpoints\.jsonl is damaged"):
            RunStore(run.directory, resolved=run.trainer()._resolved, resume=True)  # pyright: ignore[reportPrivateUsage]
