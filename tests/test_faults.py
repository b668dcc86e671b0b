"""The N-th operation fails, for every N: the run completes, or ends with a named error and can be resumed."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pytest
from tinker import types

import rlkit
from rlkit._util.files import json_lines
from rlkit.evaluation.evaluate import Evaluation
from rlkit.store import journal
from rlkit.testing import Fault, Latency, SimulatedTinker, World, simulated_service
from rlkit.testing.world import FaultKind
from tests.marks import split_slow
from tests.simulation import Simulation, Talk, Word

HELD_OUT = [Word(number) for number in range(100, 102)]
SCHEDULES = {
    "sync": {},
    "stream": {"mode": "stream"},
    "async": {"mode": "async", "max_staleness": 2, "staleness": "strict"},
}
EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"
KINDS: tuple[FaultKind, ...] = ("429", "500", "408", "broken", "hang", "cancel")


def simulation(directory: Path, schedule: str, **world: object) -> Simulation:
    settings = {
        "schedule": SCHEDULES[schedule],
        "service": {"timeout_s": 600.0},
        "rollouts": {"timeout_s": 1e6},  # a rollout waits for the service for as long as the run does
    }
    return Simulation(directory, World(**world), settings=settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=split_slow(SCHEDULES, lambda name: name == "async"))
def uninterrupted_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Simulation]:
    """A run without faults."""
    run = simulation(tmp_path_factory.mktemp("clean") / "run", request.param)
    run.train()
    return request.param, run


@pytest.mark.parametrize("kind", split_slow(KINDS, lambda kind: kind in ("500", "broken", "hang")))
def test_failure_of_any_service_call_does_not_change_training(
    uninterrupted_run: tuple[str, Simulation], kind: FaultKind, tmp_path: Path
) -> None:
    schedule, expected = uninterrupted_run
    calls = sum(expected.world.calls[call] for call in ("load", "sample", "gradient", "step", "save"))
    assert calls > 15
    # How a request fails matters less than which one does; a few kinds go through all of them.
    every = 1 if EXHAUSTIVE or kind in ("500", "hang") else 3
    for number in range(1 + KINDS.index(kind) % every, calls + 1, every):
        run = simulation(tmp_path / f"{number}", schedule, faults=[Fault(kind, call_number=number)])
        try:
            result = run.train()
        except rlkit.ServiceError as error:  # nothing had been answered before: there is nothing to go back to
            assert kind == "hang", error
            run.train(resume=True)
        else:
            assert result.status == "completed"
        assert run.weights() == expected.weights(), number
        assert run.world.calls["samples"] <= expected.world.calls["samples"] + 6  # none that was finished


@pytest.mark.parametrize("kind", ["500", "broken"])
@pytest.mark.parametrize("call", ["gradient", "step", "save", "load"])
def test_failure_of_any_call_during_replay_does_not_change_training(
    uninterrupted_run: tuple[str, Simulation], call: str, kind: FaultKind, tmp_path: Path
) -> None:
    schedule, expected = uninterrupted_run
    for number in (1, 2):
        run = simulation(tmp_path / f"{number}", schedule)
        run.train()
        run.world.checkpoints.clear()
        (run.directory / "metrics.jsonl").unlink()
        samples = run.world.calls["samples"]
        run.world.faults = [Fault(kind, call=call, call_number=run.world.calls[call] + number)]
        assert run.train(resume=True).status == "completed"
        assert run.weights() == expected.weights()
        assert run.world.calls["samples"] == samples


@pytest.mark.parametrize("call", [pytest.param("gradient", marks=pytest.mark.slow), "step"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_run_that_fails_during_replay_resumes_from_its_newest_step(schedule: str, call: str, tmp_path: Path) -> None:
    def resumed(directory: Path, number: int | None) -> Simulation:
        run = simulation(directory, schedule)
        run.settings = {**run.settings, "steps": 3}
        run.train()
        run.world.checkpoints.clear()
        (run.directory / "metrics.jsonl").unlink()
        run.settings = {**run.settings, "steps": 5}
        run.world.faults = (
            [] if number is None else [Fault("500", call=call, call_number=run.world.calls[call] + number)]
        )
        assert run.train(resume=True).status == "completed"
        return run

    expected = resumed(tmp_path / "clean", None)
    for number in (1, 2, 3):
        run = resumed(tmp_path / f"{number}", number)
        assert run.weights() == expected.weights()


class Slow(Word):
    """Work for longer than the timeout of the service."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": self.task_id}])
        await asyncio.sleep(2000)
        return float(reply.text.count("e"))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("substeps", [1, 2])
def test_gradient_that_fails_unobserved_is_computed_again(at: int, substeps: int, tmp_path: Path) -> None:
    settings = {
        "schedule": {"mode": "stream"},
        "service": {"timeout_s": 1000.0},
        "batch": {"groups": 2, "group_size": 3, "substeps": substeps},
    }
    tasks = [Slow(number) for number in range(9)]
    run = Simulation(tmp_path / "run", World(), settings=settings, tasks=tasks)
    run.world.faults = [Fault("500", call="gradient", call_number=at)]
    assert run.train().status == "completed"


@pytest.mark.parametrize("timeout_s", [60.0, pytest.param(180.0, marks=pytest.mark.slow)])
def test_prompt_without_an_answer_fails_only_its_rollouts(
    timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_sample = simulated_service.SimulatedSamplingClient.sample

    def sample(self: Any, prompt: types.ModelInput, *args: Any) -> Any:
        text = bytes(token for chunk in prompt.chunks for token in chunk.tokens)  # type: ignore[union-attr]  text
        return (
            asyncio.get_running_loop().create_future() if b"task-7777" in text else original_sample(self, prompt, *args)
        )

    monkeypatch.setattr(simulated_service.SimulatedSamplingClient, "sample", sample)
    settings = {
        "schedule": {"mode": "async", "max_staleness": 2},
        "service": {"timeout_s": timeout_s},
        "rollouts": {"timeout_s": 100.0},
        "steps": 75,
        "seed": 5,  # draws it as the 22nd of 150 groups, while there are others to be answered
    }
    tasks = [Word(number) for number in (7777, *range(160))]
    run = Simulation(tmp_path / "run", World(), settings=settings, tasks=tasks)
    assert run.train().status == "completed"
    episodes = pd.read_parquet(run.directory / "episodes")
    failed = episodes[episodes.status == "failed"]
    assert set(failed.task) == {"task-7777"}
    assert failed.error.str.contains("took longer than 100 s").all()


def test_failure_between_substeps_leaves_a_checkpoint(tmp_path: Path) -> None:
    class Down(Word):
        async def rollout(self, policy: rlkit.Policy) -> float:
            played.append(self.task_id)
            if len(played) > 4 * 3 * 2 + 2 * 3:  # two steps, and the first substep of the third
                raise RuntimeError("the sandbox is down")
            return await super().rollout(policy)  # type: ignore[return-value]  an Outcome

    played = list[str]()
    settings = {
        "batch": {"groups": 4, "group_size": 3, "substeps": 2},
        "rollouts": {"max_concurrent": 3, "max_retries": 0},
        "checkpoint": {"every": 0},
        "schedule": {"mode": "stream"},
        "steps": 9,
    }
    run = Simulation(tmp_path / "run", World(), settings=settings, tasks=[Down(number) for number in range(99)])
    with pytest.raises(rlkit.RunFailed, match="the sandbox is down"):
        run.train()
    assert run.ears.saved == [2]
    assert run.world.calls["step"] > 4  # a substep of the third step was taken


def test_step_may_take_longer_than_the_service_timeout(tmp_path: Path) -> None:
    settings = {"service": {"timeout_s": 100.0}, "batch": {"groups": 2, "group_size": 3, "substeps": 2}, "steps": 2}
    run = Simulation(tmp_path / "run", World(), Latency(gradient_s=80.0, step_s=80.0), settings=settings)
    run.train()
    assert run.virtual_s > 4 * 80
    assert not any("going back" in note for note in run.ears.notes)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_randomly_failing_calls_lose_nothing(
    uninterrupted_run: tuple[str, Simulation], share: float, tmp_path: Path
) -> None:
    schedule, expected = uninterrupted_run
    kinds: tuple[FaultKind, ...] = ("429", "500", "408", "broken")
    faults = [Fault(kind, share=share / len(kinds)) for kind in kinds]
    run = simulation(tmp_path / "run", schedule, faults=faults)
    run.train()
    assert run.weights() == expected.weights()


def test_step_completes_only_once_its_record_is_on_the_disk(
    uninterrupted_run: tuple[str, Simulation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, expected = uninterrupted_run
    original_sync, syncs, broken_at = journal._sync, 0, 0

    def sync(files: Sequence[BinaryIO], folder: Path | None) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == broken_at:
            time.sleep(0.05)  # long enough for tables to be written, if anything wrote them
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original_sync(files, folder)

    monkeypatch.setattr(journal, "_sync", sync)
    simulation(tmp_path / "whole", schedule).train()
    for number in range(1, syncs + 1):
        syncs, broken_at = 0, number
        run = simulation(tmp_path / f"{number}", schedule)
        with suppress(rlkit.RunFailed):  # the last one may be that of closing, when everything is there
            run.train()
        broken_at = 0
        run.train(resume=True)
        assert run.weights() == expected.weights(), number
        steps_by_draw = pd.read_parquet(run.directory / "episodes").groupby("draw").step.nunique()
        assert (steps_by_draw == 1).all(), number


def test_new_weights_are_sampled_only_after_the_record_of_their_step_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, append = journal._sync, journal.Journal.append
    appended = on_disk = 0

    class Watching(Word):
        async def rollout(self, policy: rlkit.Policy) -> float:
            steps = on_disk
            reply = await policy.chat([{"role": "user", "content": self.task_id}])
            versions_and_steps.append((reply.turn.version, steps))
            return float(reply.text.count("e"))

    def appending(self: journal.Journal, kind: journal.RecordKind, content: bytes) -> None:
        nonlocal appended
        append(self, kind, content)
        appended += kind is journal.RecordKind.STEP

    def syncing(files: Sequence[BinaryIO], folder: Path | None) -> None:
        nonlocal on_disk
        appended_before = appended
        time.sleep(0.05)
        sync(files, folder)
        on_disk = max(on_disk, appended_before)

    versions_and_steps = list[tuple[int, int]]()
    monkeypatch.setattr(journal.Journal, "append", appending)
    monkeypatch.setattr(journal, "_sync", syncing)
    latency = Latency(gradient_s=0, step_s=0, save_s=0, trained_tokens_per_s=1e12)
    run = Simulation(tmp_path / "run", World(), latency, tasks=[Watching(number) for number in range(9)])
    run.train()
    assert max(version for version, _ in versions_and_steps) == 2
    assert all(version <= steps for version, steps in versions_and_steps)


@pytest.mark.parametrize("staleness", ["paced", "strict"])
@pytest.mark.parametrize("at", [2, 5])
def test_rollouts_use_the_newest_weights_during_replay(staleness: str, at: int, tmp_path: Path) -> None:
    schedule = {"mode": "async", "max_staleness": 2, "staleness": staleness}
    settings = {"steps": 7, "schedule": schedule, "checkpoint": {"every": 0}}
    tasks = [Talk(number) for number in range(40)]
    faults = [Fault("500", call="gradient", call_number=at)]
    run = Simulation(tmp_path / "run", World(faults=faults), Latency(load_s=20), settings=settings, tasks=tasks)
    assert run.train().status == "completed"
    episodes = pd.read_parquet(run.directory / "episodes")
    assert (episodes.status != "failed").all()
    assert episodes.draw.nunique() == 7 * 2
    assert all(
        turn["version"] <= step for step, turns in zip(episodes.step, episodes.turns, strict=True) for turn in turns
    )
    for turns in episodes.turns:
        versions = [turn["version"] for turn in turns]
        assert versions == sorted(versions)
    if staleness == "strict":
        assert max(line["batch/staleness/max"] for line in run.lines()) <= 2


def the_first_checkpoint_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = json_lines.append, False

    def append(path: Path, record: Mapping[str, rlkit.Json]) -> None:
        nonlocal failed
        if path.name == "checkpoints.jsonl" and not failed:
            failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, record)

    monkeypatch.setattr(json_lines, "append", append)


def test_checkpoint_that_could_not_be_recorded_is_reported_and_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_first_checkpoint_is_not_written(monkeypatch)
    run = Simulation(tmp_path / "run", World(), settings={"steps": 9, "checkpoint": {"every": 4}})
    run.train()
    assert run.ears.saved == [6, 8, 9]  # the fifth was asked for before the failure was known
    assert any("the checkpoint of step 4 could not be saved: cannot write to" in note for note in run.ears.notes)


@pytest.mark.parametrize("timeout_s", [20.0, 120.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outage_does_not_count_towards_rollout_timeouts(schedule: str, timeout_s: float, tmp_path: Path) -> None:
    outage = Fault("500", call="sample", after_s=6, until_s=1500)
    run = Simulation(tmp_path / "run", World(faults=[outage]))
    run.settings = {
        "steps": 8,
        "schedule": SCHEDULES[schedule],
        "rollouts": {"timeout_s": timeout_s},
        "service": {"timeout_s": 3600.0},
    }
    assert run.train().status == "completed"
    assert run.virtual_s > 1500
    assert sum(line["env/all/failed"] for line in run.lines()) == 0


def test_unrecorded_last_checkpoint_does_not_count_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    the_first_checkpoint_is_not_written(monkeypatch)
    run = Simulation(tmp_path / "run", World(), settings={"steps": 2, "checkpoint": {"every": 2}})
    assert run.train().checkpoint is not None
    assert (run.directory / "checkpoints.jsonl").exists()
    assert run.ears.saved == [2]


class Side(Word):
    """Request two completions concurrently."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(policy.sample(f"{self.task_id} {number}")) for number in range(2)]
        return float(sum(sample.result().text.count("e") for sample in samples))


def test_service_error_in_concurrent_requests_does_not_fail_the_rollout(tmp_path: Path) -> None:
    faults = [Fault("500", call="sample")]
    tasks = [Side(number) for number in range(9)]
    run = Simulation(tmp_path / "run", World(faults=faults), settings={"service": {"timeout_s": 100.0}}, tasks=tasks)
    with pytest.raises(rlkit.ServiceError, match="something broke"):
        run.train()


class Finite(rlkit.TaskSource):
    """Return six tasks, then fail."""

    draw_count = 0

    def next(self) -> rlkit.Env:
        if self.draw_count == 6:
            raise RuntimeError("the archive is gone")
        self.draw_count += 1
        return Word(self.draw_count)

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> Mapping[str, rlkit.Json]:
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: Mapping[str, rlkit.Json]) -> None:
        self.draw_count = int(str(state["drawn"]))


@pytest.mark.parametrize("staleness", ["paced", "strict"])
def test_tasks_drawn_before_a_source_failed_are_trained_on_and_saved(staleness: str, tmp_path: Path) -> None:
    schedule = {"mode": "async", "max_staleness": 1, "staleness": staleness}
    run = Simulation(tmp_path / "run", World(), settings={"steps": 8, "schedule": schedule})
    run.tasks = Finite()  # type: ignore[assignment]  a source will do
    with pytest.raises(rlkit.EnvironmentFault, match="the archive is gone"):
        run.train()
    assert len(run.lines()) >= 2
    assert run.ears.saved[-1] == len(run.lines())


def test_failed_evaluation_ends_the_run_without_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Evaluation, sampler: object, *, rank: int = 0) -> object:
        raise rlkit.ServiceError("the evaluation's service is down")

    monkeypatch.setattr(Evaluation, "play", fail)
    faults = [Fault("500", call="gradient", call_number=2)]
    settings = {"eval": {"envs": {"held_out": {"env": f"{__file__}:HELD_OUT", "tasks": 2}}, "every": 1}}
    run = Simulation(tmp_path / "run", World(faults=faults), settings=settings)
    with pytest.raises(rlkit.ServiceError, match="the evaluation's service is down"):
        run.train()
    assert sum("recovering the weights" in note for note in run.ears.notes) <= 1


def test_unreachable_service_ends_the_run_with_its_checkpoints(tmp_path: Path) -> None:
    faults = [Fault("500", call_number=None, share=1.0, call="sample")]
    run = Simulation(tmp_path / "run", World(), settings={"service": {"timeout_s": 100.0}, "steps": 5})
    run.train(stop=stopped_after(run, 2))
    run.world.faults = faults
    with pytest.raises(rlkit.ServiceError, match="InternalServerError: something broke"):
        run.train(resume=True)
    assert 100 <= run.virtual_s < 200
    assert run.ears.saved[-1] == 2
    assert any("retrying" in note for note in run.ears.notes)
    run.world.faults = []
    assert run.train(resume=True).steps == 5


def test_unreachable_service_delays_the_run_only_once(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"service": {"timeout_s": 1000.0}, "steps": 50})
    run.world.faults = [Fault("hang", after_s=60.0)]
    with pytest.raises(rlkit.ServiceError, match="no answer within 1000 s"):
        run.train()
    assert 1000 <= run.virtual_s < 1300
    run.world.faults = []
    run.settings = {"steps": 10}
    assert run.train(resume=True).steps >= 10


def stopped_after(run: Simulation, step: int) -> rlkit.StopSignal:
    stop = rlkit.StopSignal()
    heard = run.ears.on_step

    def listen(number: int, metrics: object) -> None:
        heard(number, metrics)  # type: ignore[arg-type]  passed on
        if number == step:
            stop.request()

    run.ears.on_step = listen  # type: ignore[method-assign]  a test listens in
    return stop


def test_a_service_that_hangs_is_reported_within_a_minute(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(faults=[Fault("hang", call="sample", call_number=1)]))
    run.train()
    silent = [note for note in run.ears.notes if note.startswith("no answer from the service for")]
    assert silent
    assert int(silent[0].split()[6]) <= 60
    assert "sampling (" in silent[0]


def test_a_service_that_hangs_at_the_start_is_reported_within_a_minute(tmp_path: Path) -> None:
    faults = [Fault("hang", call="load", call_number=1)]
    run = Simulation(tmp_path / "run", World(faults=faults), settings={"service": {"timeout_s": 1800.0}})
    run.train()
    assert "no answer from the service for 45 s; waiting for: starting a training session (1)" in run.ears.notes


def test_request_for_the_context_size_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = 0

    async def context_tokens(self: SimulatedTinker, model: str) -> int:
        nonlocal requests
        requests += 1
        if requests == 1:
            await asyncio.Event().wait()
        if requests == 2:
            raise rlkit.ServiceError("busy")
        return 1000

    monkeypatch.setattr(SimulatedTinker, "context_tokens", context_tokens)
    run = Simulation(tmp_path / "run", settings={"service": {"timeout_s": 600.0}})
    assert run.train().status == "completed"
    assert any("waiting for: asking for the context (1)" in note for note in run.ears.notes)


class Sometimes(Word):
    """Fails in a way of its own in every seventh rollout."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(number)
        self.how = how

    async def rollout(self, policy: rlkit.Policy) -> float | rlkit.Outcome:
        reply = await policy.chat([{"role": "user", "content": self.task_id}])
        if len(reply.text) % 7 == 3:
            if self.how == "raises":
                raise RuntimeError("the sandbox died")
            if self.how == "hangs":
                await asyncio.Event().wait()
            while self.how == "swallows":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
            raise asyncio.CancelledError
        return float(reply.text.count("e"))


@pytest.mark.parametrize("how", ["raises", "hangs", "swallows", "cancels itself"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_occasional_environment_failures_do_not_end_the_run(schedule: str, how: str, tmp_path: Path) -> None:
    run = simulation(tmp_path / "run", schedule)
    run.tasks = [Sometimes(number, how) for number in range(40)]
    run.settings = {**run.settings, "rollouts": {"timeout_s": 50.0}}
    assert run.train().status == "completed"
    failed = [line["env/all/failed"] for line in run.lines()]
    assert sum(failed) < 18
    assert all(line["batch/groups"] == 2 for line in run.lines())
