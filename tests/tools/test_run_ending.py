"""The directory of a run shows how the run ended, for every way of ending."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rlkit
from rlkit.cli.app import app
from rlkit.testing import Fault, Latency, World, run_virtual
from rlkit.tools.run_ending import read_run_ending
from rlkit.types import Json
from tests.simulation import Simulation, Word

HERE = __file__


def run_doctor(directory: Path) -> str:
    """Return the output of `rlkit doctor` for a run."""
    result: Any = CliRunner().invoke(app, ["doctor", str(directory)], prog_name="rlkit")
    assert result.exit_code == 0
    return result.stdout


class Source(rlkit.TaskSource):
    """Source whose tasks run out with a `KeyError`."""

    def __init__(self) -> None:
        self.tasks = {number: Word(number) for number in range(3)}
        self.draw_count = 0

    def next(self) -> rlkit.Env:
        self.draw_count += 1
        return self.tasks[self.draw_count]

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> dict[str, Json]:
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        self.draw_count = int(str(state["drawn"]))


async def lookup(*_: object, **settings: object) -> None:
    """Preparation of a run with a mistake."""
    answers: dict[str, float] = {}
    answers["answer"]


def test_key_error_of_user_code_is_reported_with_its_line(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", tasks=Source())  # type: ignore[arg-type]  a source is one too
    with pytest.raises(rlkit.RlkitError):
        run.train()
    report = run_doctor(run.directory)
    line = next(
        n for n, text in enumerate(Path(HERE).read_text().splitlines(), 1) if "self.tasks[self.draw_count]" in text
    )
    assert report.startswith("run failed after step ")
    assert f"KeyError: 3, at {HERE}:{line} in next\n" in report
    assert f"  fix: fix {HERE}:{line} in next, then `rlkit resume run`\n" in report


def test_unexpected_error_is_reported_with_type_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulation(tmp_path / "run")
    monkeypatch.setattr("rlkit.training.trainer.load_references", lookup)
    with pytest.raises(KeyError):
        run.train()
    report = run_doctor(run.directory)
    assert f"run failed after step 0: KeyError: 'answer', at {HERE}:" in report
    assert f"  fix: fix {HERE}:" in report
    assert " in lookup, then `rlkit resume run`\n" in report


def end_run(run: Simulation, how: str) -> None:
    """Let a run end in some way."""
    if how == "interrupt":
        stop = rlkit.StopSignal()
        stop.request()
        run.train(stop=stop)
    elif how == "cancellation":
        run.train_until(5)
    elif how == "budget":
        run.settings = {"budget_tokens": 100, "steps": 50}
        run.train()
    elif how == "service":
        run.world = World(faults=[Fault("500", call="gradient", share=1.0)])
        with pytest.raises(rlkit.ServiceError):
            run.train()
    elif how == "rollouts":
        run.tasks = [Broken(number) for number in range(40)]
        with pytest.raises(rlkit.RunFailed):
            run.train()
        assert run.ears.notes[-1] == f"the cause and its fix: rlkit doctor {run.directory}"
    else:
        run.train()


class Broken(Word):
    async def rollout(self, policy: rlkit.Policy) -> float:
        raise KeyError("gold")


WAYS = {
    "interrupt": ("run was interrupted after step ", "  fix: `rlkit resume run`"),
    "cancellation": ("run was interrupted after step ", "  fix: `rlkit resume run`"),
    "budget": ("run reached its budget after step ", "  fix: raise the limit: `rlkit resume run budget_tokens=…`"),
    "service": ("run failed after step 0: ServiceError: ", "check that the service answers (`rlkit doctor`), then "),
    "rollouts": ("run failed after step 0: RolloutsFailed: ", "fix the environment, then `rlkit resume run`: failed"),
    "nothing": (
        "run is complete at step 3: all steps are done\n",
        "run at step 3: 1 finding (less certain with fewer than 5 steps)\n",  # of the simulated service's KL
    ),
}


@pytest.mark.parametrize("how", WAYS)
def test_each_way_of_ending_is_reported_with_a_fix(how: str, tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    end_run(run, how)
    report = run_doctor(run.directory)
    assert report.startswith(WAYS[how][0])
    assert WAYS[how][1] in report
    assert ("KeyError: 'gold' at " in report) == (how == "rollouts")
    assert ("finding" in report) == (how not in ("service", "rollouts"))


def test_resumed_run_does_not_report_its_earlier_ending(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    end_run(run, "rollouts")
    run.tasks = [Word(number) for number in range(40)]
    run.train(resume=True)
    about = json.loads((run.directory / "run.json").read_text())
    assert not about.keys() & {"error", "reason", "place", "place_is_own"}
    assert str(read_run_ending(run.directory)) == "all steps are done"


HOLDS = """
import sys
from pathlib import Path
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.schema import Config, EnvConfig
from rlkit.store import RunStore
with RunStore(Path(sys.argv[1]), resolved=ResolvedConfig.from_python(Config(envs={"arithmetic": EnvConfig()}))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_killed_process_is_reported_as_probably_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert f"run is running and has finished step 0: process {process.pid} is running it\n" in run_doctor(directory)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    report = run_doctor(directory)
    assert report.startswith("run was killed after step 0: it ended without a record: probably killed")
    assert "`rlkit resume run`: finished rollouts are not lost\n" in report


def test_doctor_does_not_change_the_run(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run")
    end_run(run, "rollouts")
    contents = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    run_doctor(run.directory)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == contents


class Flaky(Word):
    """The rollouts of the third task fail; the last task plays long after that."""

    notes: Callable[[], list[str]]

    async def rollout(self, policy: rlkit.Policy) -> Any:
        import asyncio

        number = int(self.task_id.partition("-")[2])
        if number == 2:
            raise ValueError("the tool\nbroke")
        await asyncio.sleep(number)
        Flaky.heard.append(len([note for note in Flaky.notes() if "the tool broke" in note]))
        return await super().rollout(policy)

    heard: list[int]


def test_first_failed_rollout_of_an_environment_is_noted_at_once(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", tasks=[Flaky(number) for number in range(6)])
    run.settings = {"batch": {"groups": 6, "group_size": 3}, "steps": 1}
    Flaky.heard, Flaky.notes = [], lambda: run.ears.notes  # type: ignore[method-assign, assignment]  a test listens in
    run.train()
    told_of = [note for note in run.ears.notes if "first failed rollout" in note]
    assert len(told_of) == 1
    assert told_of[0].startswith("the first failed rollout of words, task task-2: ValueError: the tool broke at ")
    assert Flaky.heard[-1] == 1  # the last rollouts had not ended when it was noted


def test_interrupt_while_saving_after_a_failure_keeps_its_cause(
    tmp_path: Path,
) -> None:
    run = Simulation(tmp_path / "run", latency=Latency(save_s=60.0), settings={"checkpoint": {"every": 0}})
    rollouts = count()

    class Worn(Broken):
        async def rollout(self, policy: rlkit.Policy) -> float:
            return await (Word if next(rollouts) < 6 else Broken).rollout(self, policy)

    run.tasks = [Worn(number) for number in range(40)]
    statuses = list[str]()

    async def interrupt() -> None:
        task = asyncio.create_task(run.trainer().train())
        while not statuses or statuses[-1] != "failed":
            await asyncio.sleep(1)
            path = run.directory / "run.json"
            statuses.append(json.loads(path.read_text())["status"] if path.exists() else "")
        assert not task.done(), "the weights of the first step are being saved"
        task.cancel()
        with pytest.raises((asyncio.CancelledError, rlkit.RunFailed)):
            await task

    run_virtual(interrupt())
    record = json.loads((run.directory / "run.json").read_text())
    assert record["status"] == "failed"
    assert "KeyError" in record["error"]
