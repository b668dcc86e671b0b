"""Resuming runs, and their side effects, on virtual time."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pytest

import rlkit
from rlkit.algorithms.datums import PreparedGroup
from rlkit.store import table
from rlkit.store.history import load_resume_history, table_path
from rlkit.store.journal import Journal, RecordKind, list_segments
from rlkit.testing import Fault, Latency, World
from rlkit.training import StopSignal
from rlkit.training.step import StepUpdate
from tests.simulation import Ears, Simulation, Talk, Word


def train_whole(directory: Path, **settings: object) -> Simulation:
    run = Simulation(directory, World(), settings=settings)
    run.train()
    return run


def test_a_run_can_be_trained_for_longer(tmp_path: Path) -> None:
    expected = train_whole(tmp_path / "whole", steps=5)
    run = train_whole(tmp_path / "run", steps=3)
    run.settings = {"steps": 5}
    assert run.train(resume=True).steps == 5
    assert run.weights() == expected.weights()
    assert json.loads((run.directory / "run.json").read_text())["status"] == "completed"


def test_completed_run_has_nothing_to_do(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run")
    samples = run.world.calls["samples"]
    assert run.train(resume=True).steps == 3
    assert run.world.calls["samples"] == samples
    assert len(run.lines()) == 3


SHAPED = {
    "kl_penalty": {"coefficient": 0.3, "discount": 0.9},
    "length_penalty": {"coefficient": 0.5},
    "batch": {"groups": 2, "group_size": 3, "normalize": "token", "clip_advantages": 0.7, "substeps": 2},
    "optimizer": {"schedule": "cosine", "warmup_steps": 2},
}


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
def test_replayed_steps_have_the_same_penalties_and_learning_rates(mode: str, tmp_path: Path) -> None:
    schedule = {"mode": "async", "staleness": "strict"} if mode == "async" else {"mode": mode}
    settings = {**SHAPED, "steps": 5, "schedule": schedule, "checkpoint": {"every": 0}}
    expected = train_whole(tmp_path / "whole", **settings)
    again = make_stopped_run(tmp_path / "run", at_s=expected.virtual_s * 0.6, tasks=expected.tasks, **settings)
    assert 0 < len(again.lines()) < 5
    again.train(resume=True)
    assert any("replaying step 1 from its recorded groups" in note for note in again.ears.notes)
    assert again.weights() == expected.weights()
    for name in ("kl_reference/v1", "batch/length_penalty", "optim/learning_rate"):
        assert [line[name] for line in again.lines()] == [line[name] for line in expected.lines()]


def test_failing_reference_is_retried(tmp_path: Path) -> None:
    settings = {**SHAPED, "steps": 4}
    expected = train_whole(tmp_path / "whole", **settings)
    troubled = Simulation(tmp_path / "run", World(faults=[Fault("500", call="score", share=0.3)]), settings=settings)
    troubled.train()
    assert troubled.weights() == expected.weights()
    assert any("asking for log-probabilities" in note for note in troubled.ears.notes)


def test_expired_or_missing_checkpoint_is_skipped(tmp_path: Path) -> None:
    expected = train_whole(tmp_path / "whole", steps=6, checkpoint={"every": 2})
    run = train_whole(tmp_path / "run", steps=5, checkpoint={"every": 2})
    path = run.directory / "checkpoints.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    lines[-1]["expires"] = time.time() - 1
    del run.world.checkpoints[lines[-2]["state"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.settings = {"steps": 6, "checkpoint": {"every": 2}}
    run.train(resume=True)
    assert "the checkpoint of step 5 has expired" in run.ears.notes
    assert any(note.startswith("the checkpoint of step 4 cannot be used") for note in run.ears.notes)
    assert [note for note in run.ears.notes if "replaying" in note] == [
        f"replaying step {step} from its recorded groups, without sampling" for step in (3, 4, 5)
    ]
    assert run.weights() == expected.weights()


def test_completed_run_replaces_an_expired_checkpoint(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=3)
    path = run.directory / "checkpoints.jsonl"
    lines = [{**json.loads(line), "expires": 0.0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run.train(resume=True)
    assert result.checkpoint is not None
    assert result.checkpoint.step == 3
    assert result.checkpoint.state != lines[-1]["state"]
    assert (result.checkpoint.expires or 0) > time.time()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("run.json", "[]"),
        ("run.json", '{"format": 2}'),
        ("checkpoints.jsonl", "nonsense\n"),
        ("metrics.jsonl", "1\n"),
        ("state/step=000003.json", "{"),
    ],
)
def test_damaged_file_is_reported_by_name(name: str, content: str, tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=3)
    (run.directory / name).write_text(content)
    with pytest.raises(rlkit.UsageError, match=r"damaged|was started with None"):
        run.train(resume=True)


def test_damaged_table_is_reported_if_it_is_needed(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=3)
    (run.directory / "checkpoints.jsonl").unlink()
    table_path(run.directory, 2).write_bytes(b"PAR1nonsense")
    with pytest.raises(rlkit.UsageError, match="is damaged"):
        run.train(resume=True)


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
def test_run_can_be_stopped_and_resumed_while_it_replays_steps(mode: str, tmp_path: Path) -> None:
    class Impatient(Ears):
        def on_note(self, message: str) -> None:
            super().on_note(message)
            if message.startswith("replaying step 2"):
                stop.request()

    stop = StopSignal()
    settings = {"steps": 5, "schedule": {"mode": mode}, "checkpoint": {"every": 0}}
    run = Simulation(tmp_path / "run", World(), settings=settings)
    run.train()
    expected, samples = run.weights(), run.world.calls["samples"]
    run.world.checkpoints.clear()
    (run.directory / "metrics.jsonl").unlink()
    run.ears = Impatient()
    result = run.train(resume=True, stop=stop)
    assert (result.status, result.steps) == ("interrupted", 2)
    assert result.checkpoint is not None
    assert result.checkpoint.step == 2
    run.ears = Ears()
    assert run.train(resume=True).status == "completed"
    assert next(note for note in run.ears.notes if "replaying" in note).startswith("replaying step 3")
    assert run.weights() == expected
    assert run.world.calls["samples"] == samples


def test_all_steps_are_replayed_without_a_checkpoint(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=2)
    samples = run.world.calls["samples"]
    run.world.checkpoints.clear()
    (run.directory / "metrics.jsonl").unlink()
    run.train(resume=True)
    assert run.world.calls["samples"] == samples
    assert [line["step"] for line in run.lines()] == [1, 2]


@pytest.mark.parametrize("listed", [False, True])
def test_replayed_steps_are_saved_as_checkpoints(listed: bool, tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=7, checkpoint={"every": 3})
    expected = run.weights()
    run.world.checkpoints.clear()
    if not listed:
        (run.directory / "checkpoints.jsonl").unlink()
    run.world.faults = [Fault("500", call="*", after_s=20.0)]
    run.settings = {"steps": 7, "checkpoint": {"every": 3}, "service": {"timeout_s": 60.0}}
    run.ears.saved.clear()
    with pytest.raises(rlkit.ServiceError):
        run.train(resume=True)
    assert run.ears.saved in ([3], [3, 6])
    last = run.ears.saved[-1]
    run.world.faults = []
    gradients = run.world.calls["gradient"]
    run.train(resume=True)
    assert run.world.calls["gradient"] - gradients == 7 - last
    assert run.weights() == expected


def test_run_resumes_from_its_last_step_if_it_was_saved(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=7, checkpoint={"every": 3})
    path = run.directory / "checkpoints.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    gradients = run.world.calls["gradient"]
    run.train(resume=True)
    assert run.world.calls["gradient"] == gradients


def test_missing_checkpoints_do_not_count_towards_those_to_keep(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=7, checkpoint={"every": 3})
    run.world.checkpoints.clear()
    run.settings = {"steps": 8, "checkpoint": {"every": 3, "keep_last": 2}}
    run.train(resume=True)
    assert [path.partition("step-")[2] for path in run.world.checkpoints] == ["000006", "000008"]


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_line_of_metrics_is_rewritten(missing: int, tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=3)
    path, expected = run.directory / "metrics.jsonl", run.weights()
    lines = path.read_text().splitlines(keepends=True)
    del lines[missing]
    path.write_text("".join(lines))
    run.train(resume=True)
    weights = {line["step"]: line.get("service/weights") for line in run.lines()}
    assert [weights[step] for step in (1, 2, 3)] == expected


def make_stopped_run(directory: Path, *, at_s: float, tasks: Sequence[rlkit.Env], **settings: object) -> Simulation:
    """Return a run that was cancelled at a given time."""
    run = Simulation(directory, World(), settings=settings, tasks=tasks)
    run.train_until(at_s)
    return run


def list_finished_attempts(run: Simulation) -> dict[int, list[tuple[int, int]]]:
    """Map each outstanding draw to the members and attempts of its finished episodes."""
    history = load_resume_history(run.directory)
    return {draw: [(e.member, e.attempt) for e in history.attempts.get(draw, [])] for draw in history.outstanding}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("remainder", ["its table", "half its table"])
def test_step_with_an_incomplete_record_is_restored_or_played_again(
    remainder: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The table is written beside the journal: a run may die with the one on the disk, and not the other.
    schedule = {"mode": "async", "staleness": "strict"} if mode == "async" else {}
    expected = train_whole(tmp_path / "whole", steps=4, schedule=schedule)
    with monkeypatch.context() as dying:
        dying.setattr("rlkit.store.RunStore._delete_before", lambda store, segment: None)  # that is not reached
        run = train_whole(tmp_path / "run", steps=3, schedule=schedule)
    (path,) = [path for number, path in list_segments(run.directory / "journal") if number == 3]
    os.truncate(path, path.stat().st_size - 1)
    (run.directory / "state" / "step=000003.json").unlink()
    for name in ("metrics.jsonl", "checkpoints.jsonl"):
        lines = (run.directory / name).read_text().splitlines(keepends=True)
        (run.directory / name).write_text("".join(line for line in lines if json.loads(line)["step"] < 3))
    if remainder == "half its table":
        table_path(run.directory, 3).rename(table_path(run.directory, 3).with_name(".episodes.parquet.1.tmp"))
    run.settings = {"steps": 4, "schedule": schedule}
    run.train(resume=True)
    assert run.weights() == expected.weights()
    assert run.world.calls["samples"] == expected.world.calls["samples"]
    assert not list(run.directory.rglob("*.tmp"))


def test_resuming_with_other_tasks_is_an_error(tmp_path: Path) -> None:
    run = make_stopped_run(tmp_path / "run", at_s=12, tasks=[Slow(number) for number in range(9)], steps=2)
    run.tasks = run.tasks[:0]
    with pytest.raises(rlkit.UsageError, match="a collection without tasks"):
        run.train(resume=True)
    run.tasks = [Slow(number) for number in range(100, 109)]
    with pytest.raises(rlkit.UsageError, match=r"draw 0 was task-\d of words and is task-10\d of words now"):
        run.train(resume=True)


class Uneven(Word):
    """Takes as long as its reply; what a class variable says breaks."""

    broken = False

    async def rollout(self, policy: rlkit.Policy) -> float:
        text = (await policy.chat([{"role": "user", "content": self.task_id}])).text
        await asyncio.sleep(5 * len(text))
        if self.broken and len(text) % 4 == 0:
            raise RuntimeError("the sandbox is down")
        return float(text.count("e"))


class Broken(Uneven):
    broken = True


class Down(Word):
    """Breaks every time while a class variable says so."""

    down = True

    async def rollout(self, policy: rlkit.Policy) -> float:
        if self.down:
            raise RuntimeError("the sandbox is down")
        return await super().rollout(policy)  # type: ignore[return-value]  an Outcome


def test_resume_retries_the_rollouts_that_ended_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulation(tmp_path / "run", World(), tasks=[Down(number) for number in range(9)])
    for _ in range(2):  # the second time nothing is mended yet
        with pytest.raises(rlkit.RunFailed, match="the sandbox is down"):
            run.train(resume=(run.directory / "run.json").exists() and bool(list_finished_attempts(run)))
    monkeypatch.setattr(Down, "down", False)
    assert run.train(resume=True).status == "completed"
    episodes = pd.read_parquet(run.directory / "episodes")
    assert not episodes.duplicated(["draw", "member", "attempt"]).any()


def test_failed_rollouts_are_retried_only_after_they_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retries() -> bool:
        return json.loads((run.directory / "run.json").read_text()).get("retry_failed_rollouts", False)

    run = Simulation(tmp_path / "run", World(), tasks=[Down(number) for number in range(9)], settings={"steps": 5})
    run.world.faults = [Fault("hang", after_s=1e-3)]
    run.settings = {"steps": 5, "service": {"timeout_s": 50.0}}
    monkeypatch.setattr(Down, "down", False)
    with pytest.raises(rlkit.ServiceError):
        run.train()
    assert not retries()
    run.world.faults = []
    monkeypatch.setattr(Down, "down", True)
    with pytest.raises(rlkit.RunFailed, match="the sandbox is down"):
        run.train()
    assert retries()
    run.world.faults = [Fault("hang", after_s=1e-3)]
    monkeypatch.setattr(Down, "down", False)
    with pytest.raises(rlkit.ServiceError):  # nothing was played again yet
        run.train(resume=True)
    assert retries()
    run.world.faults = []
    run.train(resume=True)
    assert not retries()


@pytest.mark.parametrize("size", [2, 6])
def test_replayed_step_keeps_the_group_size_it_was_trained_with(size: int, tmp_path: Path) -> None:
    tasks = [Uneven(number) for number in range(9)]
    run = make_stopped_run(tmp_path / "run", at_s=90, tasks=tasks, batch={"groups": 2, "group_size": 4})
    assert max(map(len, list_finished_attempts(run).values())) > 2
    run.settings = {"batch": {"groups": 2, "group_size": size}}
    run.train(resume=True)
    first = run.lines()
    assert {line["env/all/episodes"] for line in first} == {2.0 * size}
    run.world.checkpoints.clear()
    (run.directory / "metrics.jsonl").unlink()
    run.train(resume=True)
    trained = ("env/all/reward/mean", "service/weights")
    assert [[line.get(name) for name in trained] for line in run.lines()] == [
        [line.get(name) for name in trained] for line in first
    ]


def test_groups_too_stale_for_a_new_schedule_are_played_again_as_new_attempts(tmp_path: Path) -> None:
    tasks = [Broken(number) for number in range(9)]
    ahead = {"mode": "async", "max_staleness": 3}
    run = make_stopped_run(
        tmp_path / "run", at_s=190, tasks=tasks, schedule=ahead, steps=4, batch={"groups": 2, "group_size": 4}
    )
    run.tasks = [Uneven(number) for number in range(9)]
    run.settings = {"steps": 4, "batch": {"groups": 2, "group_size": 4}}
    run.train(resume=True)
    first = run.weights()
    episodes = pd.read_parquet(run.directory / "episodes")
    assert not episodes.duplicated(["draw", "member", "attempt"]).any()
    assert episodes.attempt.max() > 1
    assert max(line["batch/staleness/max"] for line in run.lines()[-1:]) == 0
    run.world.checkpoints.clear()
    (run.directory / "metrics.jsonl").unlink()
    run.train(resume=True)
    assert run.weights() == first


def test_new_evaluation_does_not_restart_the_run(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=6)
    gradients = run.world.calls["gradient"]
    run.settings = {"steps": 7, "eval": {"envs": {"held_out": {"env": f"{__file__}:SLOW", "tasks": 2}}}}
    run.train(resume=True)
    assert run.world.calls["gradient"] == gradients + 1
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5, 6, 7]


def test_episode_of_a_damaged_record_is_played_again(tmp_path: Path) -> None:
    tasks = [Uneven(number) for number in range(9)]
    run = make_stopped_run(tmp_path / "run", at_s=90, tasks=tasks, batch={"groups": 2, "group_size": 8})
    finished_count, samples = sum(map(len, list_finished_attempts(run).values())), run.world.calls["samples"]
    path = run.directory / "journal" / "000001.log"
    data = bytearray(path.read_bytes())
    starts = [0]
    while starts[-1] < len(data):
        starts.append(starts[-1] + 8 + int.from_bytes(data[starts[-1] : starts[-1] + 4], "little"))
    data[starts[-4] + 20] ^= 1
    path.write_bytes(data)
    assert sum(map(len, list_finished_attempts(run).values())) == finished_count - 1
    run.settings = {"batch": {"groups": 2, "group_size": 8}, "steps": 1}
    run.train(resume=True)
    assert any("000001.log is damaged" in note for note in run.ears.notes)
    assert run.world.calls["samples"] - samples == 2 * 8 - finished_count + 1


def find_draw_records(directory: Path) -> list[tuple[Path, int]]:
    """Find the file and offset of each draw in the journal."""
    records = list[tuple[Path, int]]()
    for _, path in list_segments(directory / "journal"):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            size = int.from_bytes(data[offset : offset + 4], "little")
            if data[offset + 12] == RecordKind.DRAW:
                records.append((path, offset))
            offset += 8 + size
    return records


@pytest.mark.parametrize("at_s", [5, 20])
@pytest.mark.parametrize("draw_index", [0, -2])
def test_draw_with_a_damaged_record_is_repeated(draw_index: int, at_s: float, tmp_path: Path) -> None:
    settings = {"schedule": {"mode": "async", "max_staleness": 2}, "steps": 6}
    tasks = [Talk(number) for number in range(40)]
    expected = Simulation(tmp_path / "whole", tasks=tasks, settings=settings)
    expected.train()
    run = make_stopped_run(tmp_path / "run", at_s=at_s, tasks=tasks, **settings)
    samples, finished_count = run.world.calls["samples"], sum(map(len, list_finished_attempts(run).values()))
    path, offset = find_draw_records(run.directory)[draw_index]
    data = bytearray(path.read_bytes())
    data[offset + 20] ^= 1
    path.write_bytes(data)
    run.settings = settings
    assert run.train(resume=True).steps == 6
    assert any(f"{path.name} is damaged" in note for note in run.ears.notes)
    columns = ["draw", "task", "member", "attempt"]
    tables = [pd.read_parquet(directory / "episodes")[columns] for directory in (run.directory, expected.directory)]
    assert sorted(map(tuple, tables[0].values)) == sorted(map(tuple, tables[1].values))
    assert run.world.calls["samples"] - samples <= expected.world.calls["samples"] - 4 * finished_count


class Ever(rlkit.TaskSource):
    """Source whose next task depends on the groups it has observed."""

    def __init__(self) -> None:
        self.draw_count = self.observed_count = 0

    def next(self) -> rlkit.Env:
        self.draw_count += 1
        return Talk(self.draw_count * 100 + self.observed_count)

    def observe(self, group: rlkit.Group) -> None:
        self.observed_count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.draw_count, "seen": self.observed_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.draw_count, self.observed_count = state["drawn"], state["seen"]


def test_episodes_of_a_lost_draw_are_not_assigned_to_another_task(tmp_path: Path) -> None:
    settings = {"schedule": {"mode": "async", "max_staleness": 2}, "steps": 6}
    run = Simulation(tmp_path / "run", settings=settings, tasks=Ever())  # type: ignore[arg-type]  a source is one too
    run.train_until(29)
    path, at = find_draw_records(run.directory)[-3]
    data = bytearray(path.read_bytes())
    data[at + 20] ^= 1
    path.write_bytes(data)
    run.tasks = Ever()  # type: ignore[assignment]  likewise
    run.train(resume=True)
    for row in pd.read_parquet(run.directory / "episodes").itertuples():
        assert row.task in bytes(row.turns[0]["prompt"].astype("uint8")).decode(errors="replace")  # type: ignore[operator]


class EverWithFolder(Ever):
    """Record each draw in its folder."""

    folder: Path | None = None

    def set_folder(self, folder: Path) -> None:
        self.folder = folder

    def next(self) -> rlkit.Env:
        task = super().next()
        assert self.folder is not None, f"task {self.draw_count} is drawn before the folder is known"
        return task


def test_source_has_its_folder_when_draws_are_repeated(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", settings={"steps": 6}, tasks=EverWithFolder())  # type: ignore[arg-type]  a source
    run.train_until(10)
    assert load_resume_history(run.directory).outstanding
    source = EverWithFolder()
    run.tasks = source  # type: ignore[assignment]  likewise
    assert run.train(resume=True).steps == 6
    assert source.folder == run.directory / "artefacts" / "words"


@pytest.mark.parametrize("remainder", ["nothing", "no file"])
def test_empty_or_missing_segment_is_reported(remainder: str, tmp_path: Path) -> None:
    ahead = {"mode": "async", "max_staleness": 3}
    run = make_stopped_run(
        tmp_path / "run", at_s=20, tasks=[Talk(number) for number in range(40)], schedule=ahead, steps=20
    )
    (number, path), *later = list_segments(run.directory / "journal")
    assert later and table_path(run.directory, number).exists()
    if remainder == "nothing":
        path.write_bytes(b"")
    else:
        path.unlink()
    run.settings = {"schedule": ahead, "steps": 6}
    assert run.train(resume=True).steps == 6
    assert any(f"{path.name} is damaged" in note for note in run.ears.notes)


def test_intact_run_reports_no_damage(tmp_path: Path) -> None:
    ahead = {"mode": "async", "max_staleness": 3}
    for at_s in (5, 15, 25, 35, 1e6):
        tasks = [Talk(number) for number in range(40)]
        run = make_stopped_run(tmp_path / f"{at_s}", at_s=at_s, tasks=tasks, schedule=ahead, steps=4)
        assert not load_resume_history(run.directory).damaged


def test_segment_after_an_incomplete_one_is_ignored(tmp_path: Path) -> None:
    expected = train_whole(tmp_path / "whole", steps=3)
    run = make_stopped_run(tmp_path / "run", at_s=1e6, tasks=expected.tasks, steps=1)
    (end,) = [path for number, path in list_segments(run.directory / "journal") if number == 2]
    end.with_name("000003.log").write_bytes(b"")  # a power cut: the record that ends the second never got there
    run.settings = {"steps": 3}
    run.train(resume=True)
    assert run.weights() == expected.weights()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "seed: .* was started with 0; it cannot be resumed with 1"),
        ({"lora": {"rank": 4}}, "lora: .* was started with"),
        (
            {"envs": {"words": {}, "others": {"env": "arithmetic"}}},
            r"envs: .* cannot be resumed with \['others', 'words'\]",
        ),
    ],
)
def test_resuming_with_incompatible_settings_is_an_error(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    run = train_whole(tmp_path / "run", steps=2)
    run.settings = settings
    with pytest.raises(rlkit.UsageError, match=message):
        run.train(resume=True)


def test_finished_rollouts_in_flight_are_not_played_again(tmp_path: Path) -> None:
    schedule = {"mode": "async", "max_staleness": 3, "staleness": "strict"}
    expected = train_whole(tmp_path / "whole", steps=8, schedule=schedule)
    stop = rlkit.StopSignal()
    run = Simulation(tmp_path / "run", World(), settings={"steps": 8, "schedule": schedule})
    heard = run.ears.on_step

    def listen(step: int, metrics: object) -> None:
        heard(step, metrics)  # type: ignore[arg-type]  passed on
        stop.request()

    run.ears.on_step = listen  # type: ignore[method-assign]  a test listens in
    assert run.train(stop=stop).status == "interrupted"
    assert run.train(resume=True).status == "completed"
    assert run.weights() == expected.weights()
    assert run.world.calls["samples"] - expected.world.calls["samples"] <= 18  # at most what was in play


def test_next_rollouts_do_not_wait_for_a_checkpoint_or_evaluation(tmp_path: Path) -> None:
    slow = Latency(save_s=0.5)
    plain = Simulation(tmp_path / "plain", World(), latency=slow, settings={"checkpoint": {"every": 0}, "steps": 6})
    plain.train()
    evaluation = {"every": 1, "envs": {"held_out": {"env": f"{__file__}:SLOW", "tasks": 2}}}
    busy = Simulation(
        tmp_path / "busy",
        World(),
        latency=slow,
        settings={"checkpoint": {"every": 0}, "steps": 6, "eval": evaluation},
    )
    busy.train()
    last_evaluation_s = 30.0
    assert busy.virtual_s <= plain.virtual_s + 2 * last_evaluation_s
    assert busy.weights() == plain.weights()
    assert [step for step, _ in busy.ears.steps] == list(range(7))
    assert all("eval/held_out/reward/mean" in line for line in busy.lines())


class Slow(Word):
    async def rollout(self, policy: rlkit.Policy) -> float:
        await asyncio.sleep(25)
        return await super().rollout(policy)  # type: ignore[return-value]  an Outcome


SLOW = [Slow(number) for number in range(1000, 1002)]


def test_substeps_take_real_optimiser_steps(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", batch={"groups": 4, "group_size": 3, "substeps": 2})
    assert (run.world.calls["gradient"], run.world.calls["step"]) == (6, 6)
    together = train_whole(tmp_path / "one", batch={"groups": 4, "group_size": 3})
    assert (together.world.calls["gradient"], together.world.calls["step"]) == (3, 3)
    first, second = run.world.step_digests[:2]
    assert (*first, *second) == together.world.step_digests[0]


def test_stream_requests_a_gradient_per_group_and_a_step_per_batch(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", schedule={"mode": "stream"}, batch={"groups": 4, "group_size": 3})
    sync = train_whole(tmp_path / "sync", batch={"groups": 4, "group_size": 3})
    assert run.world.calls["step"] == 3
    assert run.world.calls["gradient"] > 3
    assert run.world.step_digests == sync.world.step_digests


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_concurrent_rollouts_stay_below_the_limit(mode: str, tmp_path: Path) -> None:
    settings = {"schedule": {"mode": mode}, "rollouts": {"max_concurrent": 4}, "batch": {"groups": 4, "group_size": 4}}
    evaluation = {"every": 1, "envs": {"held_out": {"env": f"{__file__}:SLOW", "tasks": 2, "attempts": 4}}}
    run = train_whole(tmp_path / "run", **settings, eval=evaluation)
    assert run.world.max_concurrent_samples <= 4


def test_tables_of_a_run_agree_with_its_metrics(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", batch={"groups": 3, "group_size": 4, "replace_uninformative": True})
    episodes = pd.read_parquet(run.directory / "episodes")
    for line in run.lines():
        rows = episodes[episodes.step == line["step"]]
        assert rows.reward.mean() == pytest.approx(line["env/all/reward/mean"])
        assert rows[rows.counts].draw.nunique() == line["batch/groups"] == 3
        assert rows[~rows.counts].draw.nunique() == line["batch/replaced"]
        informative = rows[rows.counts].groupby("draw").reward.nunique()
        assert (informative > 1).all()


def test_old_segments_and_states_are_deleted(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", steps=12, schedule={"mode": "async", "max_staleness": 2})
    assert len(list((run.directory / "journal").iterdir())) <= 4
    assert len(list((run.directory / "state").iterdir())) <= 4
    assert all(table_path(run.directory, step).exists() for step in range(1, 13))


def test_unknown_format_is_an_error(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run")
    about = json.loads((run.directory / "run.json").read_text())
    (run.directory / "run.json").write_text(json.dumps({**about, "format": 1}))
    with pytest.raises(rlkit.UsageError, match="was written in format 1, but this rlkit reads format 2"):
        run.train(resume=True)


def test_a_run_of_another_format_is_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "journal").mkdir(parents=True)
    (run / "run.json").write_text('{"format": 1}')
    (run / "journal" / "000001.log").write_bytes(b"what cannot be read here")
    with pytest.raises(rlkit.UsageError, match="already holds a run"):
        Simulation(run).train()
    assert (run / "journal" / "000001.log").read_bytes() == b"what cannot be read here"


def test_a_run_is_not_started_over(tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run")
    with pytest.raises(rlkit.UsageError, match="already holds a run: resume it"):
        replace(run).train()


def test_rollouts_may_keep_the_weights_that_they_began_with(tmp_path: Path) -> None:
    def versions(newest: bool) -> list[int]:
        name = f"run-{newest}"
        settings = {
            "envs": {"words": {"newest_weights": newest}},
            "schedule": {"mode": "async", "max_staleness": 2},
            "steps": 6,
        }
        run = Simulation(tmp_path / name, World(), settings=settings, tasks=[Talk(number) for number in range(40)])
        run.train()
        episodes = pd.read_parquet(run.directory / "episodes")
        return [len({turn["version"] for turn in turns}) for turns in episodes.turns]

    assert max(versions(newest=False)) == 1
    assert max(versions(newest=True)) > 1


def test_a_table_that_cannot_be_written_ends_the_run_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, groups: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Simulation(tmp_path / "run", World(), settings={"steps": 30})
    with monkeypatch.context() as patched:
        patched.setattr(table, "write", full)
        with pytest.raises(rlkit.RunFailed, match="No space left on device; make room, then resume the run"):
            run.train()
    assert 1 <= run.world.calls["step"] <= 3
    assert run.train(resume=True).steps == 30


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_step_without_record_and_table_is_reported(cut: int, tmp_path: Path) -> None:
    ahead = {"mode": "async", "max_staleness": 3}
    run = make_stopped_run(
        tmp_path / "run", at_s=20, tasks=[Talk(number) for number in range(40)], schedule=ahead, steps=20
    )
    (number, path), *later = list_segments(run.directory / "journal")
    assert later
    table_path(run.directory, number).unlink()
    data = bytearray(path.read_bytes())
    data[:2] = b"\xff\xff" if cut == 2 else data[:2]  # the length of its first record
    path.write_bytes(data[:-cut])
    with pytest.raises(rlkit.UsageError, match=f"{path.name} is damaged: the groups of step {number} are unreadable"):
        run.train(resume=True)


@pytest.mark.parametrize("substeps", [1, 2])
@pytest.mark.parametrize("schedule", [{"mode": "sync"}, {"mode": "stream"}, {"mode": "async", "max_staleness": 2}])
def test_gradients_are_requested_only_for_episodes_on_the_disk(
    schedule: Mapping[str, object], substeps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended, on_disk = set[int](), set[int]()  # draws of which there are records, and those all of which are there
    draws_by_update, written_first = dict[int, list[int]](), list[bool]()
    append, add, request = Journal.append, StepUpdate.add, StepUpdate._request_gradient

    def appending(self: Journal, kind: RecordKind, content: bytes) -> None:
        append(self, kind, content)
        if kind is RecordKind.EPISODE:
            draw = int.from_bytes(content[:8], "little")
            appended.add(draw)
            on_disk.discard(draw)

    def flushed(files: Sequence[BinaryIO], folder: Path | None) -> None:
        on_disk.update(appended)

    def adding(self: StepUpdate, prepared: PreparedGroup, *, is_trained: bool) -> None:
        draws_by_update.setdefault(id(self), []).append(prepared.group.draw)
        add(self, prepared, is_trained=is_trained)

    def requesting(self: StepUpdate) -> None:
        written_first.append(on_disk.issuperset(draws_by_update[id(self)]))
        request(self)

    monkeypatch.setattr(Journal, "append", appending)
    monkeypatch.setattr("rlkit.store.journal._sync", flushed)
    monkeypatch.setattr(StepUpdate, "add", adding)
    monkeypatch.setattr(StepUpdate, "_request_gradient", requesting)
    settings = {"schedule": schedule, "batch": {"groups": 4, "group_size": 3, "substeps": substeps}, "steps": 3}
    Simulation(tmp_path / "run", settings=settings).train()
    assert len(written_first) >= 3 * substeps
    assert all(written_first)
