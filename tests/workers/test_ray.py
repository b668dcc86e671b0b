"""Workers on a Ray cluster of two nodes, which are processes of this machine. Skipped where Ray is not installed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.config.schema import Config
from rlkit.env import Task
from rlkit.envs.discovery.problems.erdos_steps import search
from rlkit.errors import MissingError
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Group, Sampling
from rlkit.workers.from_config import open_runner
from rlkit.workers.pool import WorkerPool
from tests.envs.discovery.scripted import CallCounter
from tests.limits import HANG_S, wait_until
from tests.workers import test_runs

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # Ray reads it when it is imported; rlkit sets it where it imports Ray first
}
ray = pytest.importorskip("ray", reason="ray is not installed (rlkit-tinker[ray])")
from ray.cluster_utils import Cluster  # noqa: E402  after the check
from ray.util.multiprocessing import Pool  # noqa: E402  as above

from rlkit.workers.ray_actor import RayWorker  # noqa: E402  as above

pytestmark = pytest.mark.filterwarnings("default")  # those of Ray are not ours

LOCAL = LocalRunner(ByteChat())
MARK = f"RLKIT_TEST_CLUSTER={os.getpid()}"
"""Variable of all processes of the cluster."""


class Count(rlkit.Env):
    """Conversation of turns; the reward depends on all sampled tokens."""

    def __init__(self, turns: int = 2, *, deadly: str = "") -> None:
        self.turns = turns
        self.deadly = deadly

    async def rollout(self, policy: rlkit.Policy) -> float:
        said, messages = "", [{"role": "user", "content": "begin"}]
        for _ in range(self.turns):
            reply = await policy.chat(messages)
            if self.deadly and reply.text.startswith(self.deadly):
                os._exit(3)
            said += reply.text
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "and"}]
        return sum(map(ord, said)) / 1000


class Processors(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        return float(os.environ["PYTHON_CPU_COUNT"])  # limits the programs of `ForkServer`


class Stuck(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "begin"}])
        while True:
            pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A connection to a cluster with a processor on each of two nodes."""
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    del os.environ[name]


def answer(text: str, *, seed: int) -> str:
    return f"{random.Random(f'{text} {seed}').randrange(10**6):06d}"


async def play(
    runner: RolloutRunner, env: rlkit.Env, *, groups: int = 2, on_request: Callable[[], None] = lambda: None
) -> list[Group]:
    def author(text: str, *, seed: int) -> str:
        on_request()
        return answer(text, seed=seed)

    settings = EnvSettings(4, Sampling(max_tokens=16), 60.0, 0, Limits())
    player = Player(runner, {"e": settings}, seed=0, slots=Slots(16))
    sampler = ScriptedSampler(author, chat=ByteChat())
    return await asyncio.gather(*(player.play(Task(draw, "e", env), lambda: sampler) for draw in range(groups)))


def open_pool(env: rlkit.Env, *, count: int = 2, lines: list[str] | None = None) -> Any:
    shown = [] if lines is None else lines
    pool = WorkerPool(
        count, RayWorker, LOCAL, tasks=[Task(0, "e", env)], show=lambda env, line: shown.append(f"{env}: {line}")
    )
    return pool.open()


def tokens_and_rewards(groups: list[Group]) -> list[tuple[float | None, list[list[int]]]]:
    return [
        (episode.reward, [turn.completion.tolist() for turn in episode.turns])
        for group in groups
        for episode in group.episodes
    ]


def worker_processes() -> list[int]:
    """Workers of the cluster and their keepers; other tests may have workers too."""

    def read(folder: Path, name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except OSError:  # it has ended, or is another user's
            return b""

    folders = [folder for folder in Path("/proc").glob("[0-9]*") if MARK.encode() in read(folder, "environ")]
    return [int(folder.name) for folder in folders if b"rlkit.workers.process" in read(folder, "cmdline")]


def live_actors() -> list[object]:
    from ray._private.state import actors

    return [actor for actor in actors().values() if actor["State"] != "DEAD"]


def check_that_nothing_is_left() -> None:
    wait_until(lambda: not live_actors(), why=live_actors)
    wait_until(lambda: not worker_processes(), why=worker_processes)


def test_rollouts_have_the_same_results_as_in_this_process(cluster: Any) -> None:
    async def run() -> list[Group]:
        config = Config.model_validate(
            {
                "model": "m",
                "envs": {"e": {"env": f"{__name__}:Count"}},
                "rollouts": {"workers": {"runner": "ray"}},
            }
        )
        async with open_runner(config, LOCAL, {"e": [Count()]}, {}) as runner:
            assert runner.metrics()["workers/live"] == 2  # a worker for each processor of the cluster
            assert len(live_actors()) == len(worker_processes()) / 2 == 2  # each has a keeper
            assert (await play(runner, Processors()))[0].rewards.tolist() == [1.0] * 4
            return await play(runner, Count())

    groups = asyncio.run(run())
    expected = asyncio.run(play(LOCAL, Count()))
    assert tokens_and_rewards(groups) == tokens_and_rewards(expected)
    check_that_nothing_is_left()


def test_a_run_does_not_depend_on_the_cluster(
    cluster: Any, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    here, there = test_runs.run(byte_model_dir, 0), test_runs.run(byte_model_dir, {"runner": "ray", "count": 2})
    assert there == here
    assert len(there[1]) == 8


def test_worker_that_ends_in_its_actor_fails_only_the_rollout_that_ended_it(cluster: Any) -> None:
    expected = asyncio.run(play(LOCAL, Count()))
    deadly = ByteChat().decode(expected[0].episodes[1].turns[0].completion)

    async def run() -> list[Group]:
        async with open_pool(Count()) as pool:
            groups = await play(pool, Count(deadly=deadly))
            assert pool.restarts == 1
            return groups

    groups = asyncio.run(run())
    failed = groups[0].episodes[1]
    assert (failed.status, failed.error) == ("failed", "the worker process ended with exit code 3")
    results, usual_results = tokens_and_rewards(groups), tokens_and_rewards(expected)
    assert results[:1] + results[2:] == usual_results[:1] + usual_results[2:]
    check_that_nothing_is_left()


def test_rollouts_of_a_lost_node_are_played_again(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.workers.ray_actor._PATIENCE_S", 1.0)
    requests, lines = list[None](), list[str]()
    node = cluster.add_node(num_cpus=1)

    def kill_node() -> None:
        requests.append(None)
        if len(requests) == 30:  # of at least 8 * 8
            cluster.remove_node(node, allow_graceful=False)

    async def run() -> list[Group]:
        async with open_pool(Count(8), count=3, lines=lines) as pool:
            groups = await play(pool, Count(8), on_request=kill_node)
            while not pool.restarts:  # the node may have played nothing
                await asyncio.sleep(0.1)
            again = await play(pool, Count(8))  # the replacement waits for a processor, and nobody waits for it
            assert pool.restarts == 1
            assert tokens_and_rewards(again) == tokens_and_rewards(groups)
            while not lines:
                await asyncio.sleep(0.1)
            return groups

    groups = asyncio.run(run())
    assert tokens_and_rewards(groups) == tokens_and_rewards(asyncio.run(play(LOCAL, Count(8))))
    assert set(lines) == {": waiting for 1 free processors of the Ray cluster"}
    check_that_nothing_is_left()


KILLED = """
import asyncio, sys
import ray
from tests.workers.test_ray import Stuck, open_pool, play

async def main():
    async with open_pool(Stuck()) as pool:
        await play(pool, Stuck(), on_request=lambda: print("asked", flush=True))

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
asyncio.run(main())
"""


def test_killed_run_leaves_no_actor_and_no_worker(cluster: Any) -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED, cluster.address], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    try:
        assert "asked\n" in iter(run.stdout.readline, "")  # after what Ray prints of nodes that other tests killed
        time.sleep(1)  # until a rollout blocks its worker
        assert len(worker_processes()) == 4
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        run.wait(HANG_S)
        run.stdout.close()
    check_that_nothing_is_left()


def test_a_scripted_search_runs_on_the_cluster_as_on_this_machine(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    run_search = partial(search, 0, 10, pieces=100, clock=CallCounter(), processes=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in Ray's workers: with more threads, sums are rounded differently
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        expected = executor.submit(run_search).result()
    with Pool(2) as pool:
        assert len(live_actors()) == 2
        assert run_search(run=pool.map).tolist() == expected.tolist()
    check_that_nothing_is_left()


def test_missing_ray_or_cluster_is_a_one_line_error(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with open_pool(Count()):
            pass

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(MissingError, match="uv sync --extra ray"):
            asyncio.run(run())

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in ("127.0.0.1:1", "ray://[::1]:1"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(
            MissingError, match=rf"\(\[Errno \d+\] .*\): start one .* RAY_ADDRESS \({re.escape(address)}\)$"
        ):
            asyncio.run(run())
    monkeypatch.delenv("RAY_ADDRESS")

    def fail(**settings: object) -> None:
        raise ConnectionError("no cluster at 127.0.0.1:1\nTraceback")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(MissingError, match=r"cannot connect to a Ray cluster \(no cluster at 127.0.0.1:1\): start one"):
        asyncio.run(run())
