"""Tasks, threads and file descriptors are as before once a run in this process is over, on the real engine too."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pandas as pd
import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.testing import ByteChat, SimulatedTinker, run_virtual
from rlkit.trackers import RunResult, Tracker
from rlkit.training.trainer import RLTrainer
from rlkit.types import Episode
from tests.limits import HANG_S, wait_until

from .simulation import Ears, Simulation, Word

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
ENDS = ("success", "error", "interrupt", "cancellation")


class Ending(Ears):
    """Ends a run at its first step, in one of several ways."""

    def __init__(self, end: str, stop: rlkit.StopSignal) -> None:
        super().__init__()
        self.end, self.stop, self.run = end, stop, asyncio.current_task()

    def on_step(self, step: int, metrics: object) -> None:
        if self.end == "interrupt":
            self.stop.request()
        if self.end == "cancellation":
            assert self.run is not None
            self.run.cancel()


class Failing(Word):
    """Plays for a while, and then only fails."""

    played = 0

    async def rollout(self, policy: rlkit.Policy) -> float:
        Failing.played += 1
        if Failing.played > 12:
            raise RuntimeError("the sandbox died")
        reply = await policy.sample(self.task_id)
        return float(len(reply.text))


async def end_run(end: str, directory: Path, settings: dict[str, object], *, simulated: bool) -> RunResult | None:
    """Train until it ends that way, and look what is left in this event loop."""
    stop = rlkit.StopSignal()
    tracker: Tracker = Ending(end, stop)
    Failing.played = 0
    base: dict[str, object] = {"envs": {"words": {}}, "steps": 3, "batch": {"groups": 2, "group_size": 3}}
    kind = Failing if end == "error" else Word
    trainer = RLTrainer(
        load_config([], settings=base | settings),
        envs={"words": [kind(number) for number in range(8)]},
        trackers=[tracker],
        stop=stop,
        directory=directory,
        service=SimulatedTinker() if simulated else None,
        chat=ByteChat() if simulated else None,
    )
    tasks_before = asyncio.all_tasks()
    result = None
    try:
        result = await trainer.train()
    except rlkit.RunFailed:
        assert end == "error"
    except asyncio.CancelledError:
        assert end == "cancellation"
    # Requests that were under way are answered, and nobody listens.
    if simulated:
        await asyncio.sleep(60)
        assert asyncio.all_tasks() == tasks_before
    async with asyncio.timeout(HANG_S):
        while asyncio.all_tasks() != tasks_before:
            await asyncio.sleep(0.01)
    assert (result is None) == (end in ("error", "cancellation"))
    return result


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("end", ENDS)
def test_run_leaves_no_task_in_the_event_loop(end: str, mode: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"model": "simulated", "schedule": {"mode": mode}}
    run_virtual(end_run(end, tmp_path / "run", settings, simulated=True))


def list_resources() -> tuple[int, list[str]]:
    """File descriptors and threads of this process."""
    gc.collect()
    # The SDK's own event loop goes on, and its pool grows as it likes; so does rlkit's, up to its size.
    pools = ("asyncio_", "rlkit_")
    names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(pools))
    return len(list(Path("/proc/self/fd").iterdir())), names


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_run_on_the_engine_leaves_no_files_and_threads(
    end: str, tmp_path: Path, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_ENGINE_DIR", str(tmp_path / "engine"))
    settings: dict[str, object] = {
        "model": str(byte_model_dir),
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "lora": {"rank": 4},
        "service": {"engine_threads": 1, "engine_device": "cpu"},
    }
    asyncio.run(
        end_run("success", tmp_path / "first", settings, simulated=False)
    )  # what is started once does not count
    resources_before = list_resources()
    asyncio.run(end_run(end, tmp_path / "second", settings, simulated=False))
    # A connection that the SDK keeps for a while is closed in a thread of its own.
    wait_until(lambda: list_resources()[0] <= resources_before[0], why=list_resources)
    assert list_resources()[1] == resources_before[1]


BLOCKED = """
import asyncio, functools, sys, threading
import rlkit, rlkit.api
from rlkit.testing import ByteChat, Latency, SimulatedTinker
from tests.simulation import Word

class Blocked(Word):
    played = 0

    async def rollout(self, policy):
        Blocked.played += 1
        if Blocked.played == 1:
            await asyncio.to_thread(threading.Event().wait)
        return await super().rollout(policy)

at_once = Latency(first_s=0, token_s=0, gradient_s=0, step_s=0, save_s=0, load_s=0)
service = SimulatedTinker(latency=at_once)
rlkit.api.RLTrainer = functools.partial(rlkit.api.RLTrainer, service=service, chat=ByteChat())
result = rlkit.train(
    model="simulated", envs=[Blocked(number) for number in range(8)], steps=2, trackers=[],
    batch={"groups": 2, "group_size": 3}, rollouts={"timeout_s": 3.0},
)
print(result.status * 100_000)
sys.exit(4)
"""


@pytest.mark.slow
def test_endless_thread_does_not_keep_a_training_script_alive() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BLOCKED],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (process.returncode, process.stderr) == (4, "")
    assert process.stdout == "completed" * 100_000 + "\n"


STUBBORN = """
import asyncio, functools, sys
import rlkit, rlkit.api
from rlkit.testing import ByteChat, Latency, SimulatedTinker
from tests.simulation import Word

SWALLOWED = eval(sys.argv[2])

class Beating(Word):
    async def rollout(self, policy):
        async def beats():
            while True:
                try:
                    await asyncio.sleep(0.5)
                except SWALLOWED:
                    pass
        self.beating = asyncio.create_task(beats())
        return await super().rollout(policy)

at_once = Latency(first_s=0, token_s=0, gradient_s=0, step_s=0, save_s=0, load_s=0)
service = SimulatedTinker(latency=at_once)
make = functools.partial(rlkit.RLTrainer, service=service, chat=ByteChat())
tasks, small = [Beating(number) for number in range(8)], {"groups": 2, "group_size": 3}
if sys.argv[1] == "train":
    rlkit.api.RLTrainer = make
    result = rlkit.train(model="simulated", envs=tasks, steps=2, trackers=[], batch=small)
else:
    settings = {"model": "simulated", "envs": {"words": {}}, "steps": 2, "batch": small}
    result = asyncio.run(make(rlkit.load_config([], settings=settings), envs={"words": tasks}).train())
print(result.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("swallowed", ["asyncio.CancelledError", "BaseException"])
@pytest.mark.parametrize("how", ["train", "RLTrainer"])
def test_uncancellable_task_does_not_keep_a_training_script_alive(
    how: str, swallowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", STUBBORN, how, swallowed],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "completed\n")
    if swallowed == "BaseException":  # Python says what no coroutine may do
        assert set(re.findall(r"^\w*Error.*", process.stderr, re.M)) == {
            "RuntimeError: coroutine ignored GeneratorExit"
        }
    else:
        assert process.stderr == ""


@pytest.mark.parametrize("end", ["success", "cancellation"])
def test_task_shared_by_rollouts_runs_until_the_run_ends(end: str, tmp_path: Path) -> None:
    beats, cancelled_tasks = list[int](), list[str]()

    class Sharing(Word):
        beating: asyncio.Task[None] | None = None

        async def rollout(self, policy: rlkit.Policy) -> float:
            Sharing.beating = Sharing.beating or asyncio.create_task(self.beats())
            assert not Sharing.beating.done()
            return await super().rollout(policy)  # type: ignore[return-value]  an Outcome

        async def beats(self) -> None:
            try:
                for number in count():
                    beats.append(number)
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                self.last = asyncio.create_task(self.again())
                await asyncio.sleep(1)
                cancelled_tasks.append("shared")
                raise

        async def again(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled_tasks.append("made while it ended")

    async def run() -> None:
        simulation = Simulation(tmp_path / "run", tasks=[Sharing(number) for number in range(16)])
        playing = asyncio.create_task(simulation.trainer().train())
        if end == "cancellation":
            await asyncio.sleep(5)
            playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled() == (end == "cancellation")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())
    assert len(beats) > 5
    assert cancelled_tasks == ["shared", "made while it ended"]


def test_episodes_of_a_reported_step_are_released(tmp_path: Path) -> None:
    alive, played = list[int](), count()

    class Counting(Word):
        async def rollout(self, policy: rlkit.Policy) -> float:
            reward = await super().rollout(policy)
            if next(played) % 4 == 0:  # looking through all objects takes long
                alive.append(sum(type(item) is Episode for item in gc.get_objects()))
            return reward  # type: ignore[return-value]  an Outcome

    settings = {"steps": 4, "batch": {"groups": 4, "group_size": 4}}
    count_before = sum(type(item) is Episode for item in gc.get_objects())
    Simulation(tmp_path / "run", settings=settings, tasks=[Counting(number) for number in range(16)]).train()
    assert max(alive) - count_before <= 16  # those of the step that is played


TELLING: list[rlkit.Env] = []


def test_recorded_text_of_an_episode_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "opensesame-123")

    class Telling(Word):
        async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
            reward = await super().rollout(policy)
            if self.task_id == "task-1":
                raise ValueError("401 for opensesame-123")
            return rlkit.Outcome(float(reward), info={"asked": ["with opensesame-123", {"key": "opensesame-123"}]})  # type: ignore[arg-type]  a number

    monkeypatch.setattr(sys.modules[__name__], "TELLING", [Telling(number) for number in range(4)])
    held_out = {"envs": {"held_out": {"env": f"{__name__}:TELLING", "tasks": 4}}}
    run = Simulation(tmp_path / "run", tasks=TELLING, settings={"steps": 4, "eval": held_out})
    run.train()
    played = [pd.read_parquet(run.directory / folder) for folder in ("episodes", "evaluations")]
    assert all(part.error.notna().any() for part in played)
    episodes = pd.concat(played)
    assert episodes.error.str.contains(r"401 for \*\*\*").any()
    assert not episodes.error.str.contains("opensesame", na=False).any()
    assert not episodes["info"].str.contains("opensesame").any()
    assert episodes["info"].str.contains(r"with \*\*\*").any()
