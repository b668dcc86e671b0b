"""A whole run on the embedded engine has the same results with any number of workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import rlkit
from rlkit._util.activity import Activity, use_activity
from rlkit._util.priority_semaphore import Slots
from rlkit.config.loading.load import load_config
from rlkit.env import Task
from rlkit.errors import UsageError
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.testing import ByteChat, Latency, ScriptedSampler, SimulatedTinker
from rlkit.tools.doctor import examine_run
from rlkit.training.trainer import RLTrainer
from rlkit.workers.from_config import open_runner
from tests.workers.helpers import describe, make_settings, reply

TIMES = ("time/", "workers/", "usage/")
"""Beginnings of the names of metrics that depend on the machine."""

type Result = tuple[list[dict[str, float]], list[object]]


def run(model: Path, workers: int | Mapping[str, object]) -> Result:
    """Metrics of the steps, and the tokens and rewards of all episodes."""
    settings = {
        "model": str(model),
        "envs": {"arithmetic": {"env": "arithmetic"}},
        "batch": {"groups": 4, "group_size": 4},
        "sampling": {"max_tokens": 8},
        "steps": 2,
        "service": {"engine_threads": 1},
        "rollouts": {"workers": workers},
        "name": f"workers-{workers if isinstance(workers, int) else workers['runner']}",
    }
    result = asyncio.run(RLTrainer(load_config([], settings=settings), trackers=()).train())
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    groups = [record.group for step in (1, 2) for record in table.read_table(table_path(result.directory, step))]
    return (
        [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines],
        [(group.task, describe(group)) for group in sorted(groups, key=lambda group: group.draw)],
    )


@pytest.fixture(scope="module")
def result_here(byte_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKIT_RUNS_DIR", str(tmp_path_factory.mktemp("runs")))
        return run(byte_model_dir, 0)


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_its_workers(byte_model_dir: Path, result_here: Result, workers: int) -> None:
    metrics, groups = run(byte_model_dir, workers)
    assert metrics == result_here[0]
    assert groups == result_here[1]
    assert len(groups) == 8


class WhereAmI(rlkit.Env):
    """The reward is the number of the process."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        await asyncio.sleep(0.5)  # so that each worker gets one
        return float(os.getpid())


@pytest.mark.slow
def test_environments_have_the_workers_of_their_settings() -> None:
    names = {"shared": None, "also_shared": None, "own": {"count": 1, "cpus": 2}, "here": 0}
    envs = {name: {"env": "arithmetic", "workers": workers} for name, workers in names.items()}
    config = load_config([], settings={"model": "m", "envs": envs, "rollouts": {"workers": 2}}).config
    activity, local, tasks = Activity(), LocalRunner(ByteChat()), {name: [WhereAmI()] for name in names}

    async def play_all() -> tuple[dict[str, set[float | None]], Mapping[str, float]]:
        with use_activity(activity):
            return await play_groups()

    async def play_groups() -> tuple[dict[str, set[float | None]], Mapping[str, float]]:
        async with open_runner(config, local, tasks, {}) as runner:
            assert str(activity) == "workers: 3"
            player = Player(runner, {name: make_settings(group_size=4) for name in names}, seed=0, slots=Slots(99))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            drawn = [Task(draw, name, tasks[name][0]) for draw, name in enumerate(names)]
            groups = await asyncio.gather(*(player.play(task, lambda: sampler) for task in drawn))
            return {group.env: {episode.reward for episode in group.episodes} for group in groups}, runner.metrics()

    processes, metrics = asyncio.run(play_all())
    assert processes["here"] == {os.getpid()}
    assert len(processes["own"]) == 1
    shared = processes["shared"] | processes["also_shared"]
    assert len(shared) == 2
    assert len(shared | processes["own"] | processes["here"]) == 4
    assert {name: metrics[f"workers/{name}"] for name in ("live", "restarts", "queue")} == {
        "live": 3.0,
        "restarts": 0.0,
        "queue": 0.0,
    }


class WaitsForFile(rlkit.Env):
    def __init__(self, path: Path) -> None:
        self.path = path

    async def rollout(self, policy: rlkit.Policy) -> float:
        while not self.path.exists():
            await asyncio.sleep(0.01)
        return 1.0


@pytest.mark.slow
def test_rollouts_that_wait_for_a_worker_are_displayed(tmp_path: Path) -> None:
    config = load_config([], settings={"model": "m", "envs": {"e": {}}, "rollouts": {"workers": 1}}).config
    activity, tasks = Activity(), {"e": [WaitsForFile(tmp_path / "end")]}

    async def play() -> None:
        async with open_runner(config, LocalRunner(ByteChat()), tasks, {}) as runner:
            player = Player(runner, {"e": make_settings(group_size=4)}, seed=0, slots=Slots(9))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            playing = asyncio.create_task(player.play(Task(0, "e", tasks["e"][0]), lambda: sampler))
            while activity.counts.get("waiting for a worker") != 3:
                await asyncio.sleep(0.01)
            (tmp_path / "end").touch()
            await playing
            while "waiting for a worker" in activity.counts:
                await asyncio.sleep(0.01)

    with use_activity(activity):
        asyncio.run(play())
    assert str(activity) == "workers: 1"


def test_workers_with_more_processors_than_the_machine_has_are_refused() -> None:
    processors = len(os.sched_getaffinity(0))
    settings = {"model": "m", "envs": {"e": {"env": "arithmetic", "workers": {"cpus": processors + 1}}}}
    config = load_config([], settings=settings).config

    async def open_and_close() -> None:
        async with open_runner(config, LocalRunner(ByteChat()), {"e": [WhereAmI()]}, {}):
            pass

    match = rf"^envs\.e\.workers\.cpus: {processors + 1} is more .* \({processors}\): lower it, or set .*\.count"
    with pytest.raises(UsageError, match=match):
        asyncio.run(open_and_close())


def test_workers_on_another_system_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([], settings={"model": "m", "envs": {"e": {}}, "rollouts": {"workers": 1}}).config

    async def open_and_close() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            async with open_runner(config, LocalRunner(ByteChat()), {"e": [WhereAmI()]}, {}):
                pass

    with pytest.raises(UsageError, match=r"^rollouts\.workers: workers on this machine need Linux; set it to 0"):
        asyncio.run(open_and_close())


class Printing(rlkit.Env):
    """Prints, and runs a program that prints."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        assert isinstance(sys.stdout.encoding, str)  # libraries choose their characters by it
        print("→ from Python")
        print("the last line", end="")
        subprocess.run(["echo", "from a program"], check=True)
        return 1.0


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        pytest.param("a", ["a: from a program", "a: the last line", "a: → from Python"], marks=pytest.mark.slow),
        (
            "ab",
            [
                *("a: the last line", "a: → from Python", "b: the last line", "b: → from Python"),
                *("worker: from a program", "worker: from a program"),
            ],
        ),
    ],
)
def test_lines_have_the_name_of_the_environment_or_of_the_only_one_in_the_worker(
    names: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.workers.pool.loaded_files", tuple)  # those of other tests may print
    envs = {name: {"env": "arithmetic"} for name in names}
    config = load_config([], settings={"model": "m", "envs": envs, "rollouts": {"workers": 1}}).config
    tasks = {name: [Printing()] for name in names}

    async def play_all() -> None:
        async with open_runner(config, LocalRunner(ByteChat()), tasks, {}) as runner:
            player = Player(runner, {name: make_settings(group_size=1) for name in names}, seed=0, slots=Slots(9))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            drawn = [Task(draw, name, tasks[name][0]) for draw, name in enumerate(names)]
            groups = await asyncio.gather(*(player.play(task, lambda: sampler) for task in drawn))
            assert [group.rewards.tolist() for group in groups] == [[1.0]] * len(names)

    asyncio.run(play_all())
    assert sorted(capsys.readouterr().err.splitlines()) == lines


class Computing(rlkit.Env):
    """Computes, or only waits."""

    def __init__(self, compute_s: float, wait_s: float) -> None:
        self.compute_s = compute_s
        self.wait_s = wait_s

    async def rollout(self, policy: rlkit.Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": "begin"}])
        end_s = time.monotonic() + self.compute_s
        while time.monotonic() < end_s:
            pass
        await asyncio.sleep(self.wait_s)
        return len(reply.text) % 3


@pytest.mark.parametrize(("compute_s", "wait_s", "is_bound"), [(0.1, 0.0, True), (0.0, 0.03, False)])
def test_doctor_finds_a_run_that_is_bound_by_the_code_of_its_environment(
    compute_s: float, wait_s: float, is_bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    settings = {
        "model": "simulated",
        "envs": {"computing": {}},
        "batch": {"groups": 2, "group_size": 4},
        "sampling": {"max_tokens": 8},
        "steps": 6,
        "name": "bound",
    }
    instant = Latency(first_s=0.0, token_s=0.0, gradient_s=0.0, step_s=0.0, save_s=0.0, load_s=0.0, clock_s=0.0)
    trainer = RLTrainer(
        load_config([], settings=settings),
        envs={"computing": [Computing(compute_s, wait_s)]},
        service=SimulatedTinker(latency=instant),
        chat=ByteChat(),
    )
    result = asyncio.run(trainer.train())
    findings = {finding.name: finding for finding in examine_run(result.directory)[3]}
    assert ("environment_cpu" in findings) == is_bound
    if is_bound:
        assert "rollouts.workers" in str(findings["environment_cpu"])
