"""A rollout that ends, blocks or misuses its worker fails, and the rollouts beside it have their usual results."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_object
from rlkit.env import Task
from rlkit.errors import UsageError
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.workers import local
from rlkit.workers.connection import WorkerLoss, WorkerOwner
from rlkit.workers.from_config import open_runner
from rlkit.workers.local import LocalWorker
from rlkit.workers.task_pickles import pickle_task
from tests.limits import HANG_S
from tests.workers.equal_envs import Talk
from tests.workers.helpers import (
    Played,
    descendants,
    describe,
    make_settings,
    opened_pool,
    play,
    processes_with,
    reply,
    wait_for,
)
from tests.workers.hostile_envs import ACTS, AsksForSet, EndsLate, Hostile, HostileScore, Innocent, Leaking

LIMIT_S = 3.0
"""Limit of a rollout that blocks; a busy machine needs more than a second for one that does not."""

BLOCKED = "the environment blocked its worker for longer than 3 s (timeout_s)"
CUT = "an environment closed the connection of its worker, or wrote to it"

FAULTS: Mapping[str, str | None] = {
    "exits": "the worker process ended with exit code 3",
    "crashes": "the worker process was killed by SIGSEGV",
    "kills_itself": "the worker process was killed by SIGKILL, as the system does if memory is short",
    "waits_for_ever": BLOCKED,
    "holds_the_interpreter": BLOCKED,
    "crashes_in_a_thread": "the worker process was killed by SIGSEGV",
    "exits_in_a_callback": "the worker process ended with exit code 7",
    "leaves_a_child_and_exits": "the worker process ended with exit code 6",
    "starts_a_debugger": "breakpoint() needs a terminal, which a worker has not: set rollouts.workers to 0",
    "stops_the_loop": "an environment must not stop the event loop",
    "writes_to_everything": CUT,
    "forks_and_returns": None,
}
"""Reason of the failure; None if the rollout succeeds."""

MORE_FAULTS: Mapping[str, str | None] = {
    "exits_as_if_well": "the worker process ended with exit code 0",
    "interrupts_itself": "the worker process was killed by SIGINT",
    "kills_its_parent": "the worker process was killed by SIGKILL, as the system does if memory is short",
    "forks_and_waits": None,
    "forks_many": "OSError: no more processes at",
    "blocks_in_a_callback": BLOCKED,
    "uses_up_memory": "MemoryError: ",
    "replaces_json": None,
    "cancels_all_tasks": "a rollout in the worker process cancelled all rollouts",
    "closes_the_loop": "RuntimeError: Cannot close a running event loop at",
    "exits_in_a_task": "SystemExit: 4 at",
    "exits_in_a_thread": "the worker process ended with exit code 5",
    "leaves_a_daemon": None,
    "writes_a_little_to_the_connection": CUT,
    "closes_everything": "the worker process ended with exit code 1",
    "prints_a_lot": None,
    "prints_a_long_line": None,
    "returns_a_huge_info": "Hostile returned an info of more than",
    "returns_an_unpicklable_info": None,
    "raises_a_strange_error": "KeyError: <",
}


def play_beside_innocents(act: str, *, timeout_s: float) -> Played:
    """Play a hostile rollout and its siblings in two workers."""
    settings = {
        "innocent": make_settings(group_size=4, retries=0),
        "hostile": make_settings(group_size=1, retries=0, timeout_s=timeout_s),
    }
    return play({"innocent": Innocent(), "hostile": Hostile(act)}, 2, settings=settings)


def check(act: str, reason: str | None) -> None:
    id_text, earlier = uuid.uuid4().hex, descendants()
    os.environ["RLKIT_TEST_ID"] = id_text  # of the workers and all that they start
    try:
        played = play_beside_innocents(act, timeout_s=LIMIT_S if reason == BLOCKED else HANG_S)
    finally:
        del os.environ["RLKIT_TEST_ID"]
    (episode,) = played.groups["hostile"].episodes
    if reason is None:
        assert episode.status == "completed"
    else:
        assert (episode.status, (episode.error or "")[: len(reason)]) == ("failed", reason)
        assert len((episode.error or "").splitlines()) == 1
    alone = play({"innocent": Innocent()}, 0, settings={"innocent": make_settings(group_size=4, retries=0)})
    assert describe(played.groups["innocent"]) == describe(alone.groups["innocent"])
    assert played.metrics["live"] == 2
    assert played.metrics["queue"] == 0
    assert not descendants() - earlier
    assert not processes_with(id_text)


QUICK_FAULTS = ("exits", "holds_the_interpreter")
"""Faults that the test command plays; each takes seconds."""


@pytest.mark.parametrize(
    "act", [pytest.param(act, marks=[] if act in QUICK_FAULTS else pytest.mark.slow) for act in FAULTS]
)
def test_a_hostile_rollout_fails_alone(act: str) -> None:
    check(act, FAULTS[act])


@pytest.mark.slow
@pytest.mark.parametrize("act", MORE_FAULTS)
def test_another_hostile_rollout_fails_alone(act: str) -> None:
    check(act, MORE_FAULTS[act])


def test_each_act_is_tested() -> None:
    assert {*FAULTS, *MORE_FAULTS, "waits_with_a_daemon", "leaves_a_busy_thread"} == {*ACTS}


def test_workers_do_not_wait_for_busy_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLEAN_UP_S", 10_000.0)  # a worker that waits for its threads hangs
    played = play({"hostile": Hostile("leaves_a_busy_thread")}, 1)
    assert [episode.status for episode in played.groups["hostile"].episodes] == ["completed"] * 4


@pytest.mark.slow
def test_the_order_of_a_set_is_equal_in_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    played = play({"e": AsksForSet()}, 4)
    assert len({str(episode.info) for episode in played.groups["e"].episodes}) == 1


@pytest.mark.parametrize(
    ("act", "reason"), [("exits", FAULTS["exits"]), pytest.param("waits_for_ever", BLOCKED, marks=pytest.mark.slow)]
)
def test_a_score_that_ends_or_blocks_its_worker_is_named(act: str, reason: str) -> None:
    settings = {"e": make_settings(group_size=2, retries=0, timeout_s=LIMIT_S)}
    played = play({"e": HostileScore(act)}, 1, settings=settings)
    errors = {episode.error for episode in played.groups["e"].episodes}
    assert errors == {f"HostileScore.score_group: {reason}"}


def test_a_process_that_a_rollout_forks_is_ended_when_it_leaves_the_rollout() -> None:
    played = play_beside_innocents("forks_and_returns", timeout_s=60.0)
    assert played.lines == [
        ("", "printed by a forked process"),
        ("", "a process that the environment forked was ended as it left its code: end it with os._exit"),
    ]
    assert [episode.status for group in played.groups.values() for episode in group.episodes] == ["completed"] * 5


def test_a_rollout_that_ends_its_worker_is_retried_within_the_budget() -> None:
    settings = {"hostile": make_settings(group_size=2, retries=1)}
    played = play({"hostile": Hostile("exits")}, 1, settings=settings)
    assert len(played.episodes) == 3  # two members and a retry
    assert played.metrics["restarts"] == 3


@pytest.mark.slow
def test_a_rollout_whose_worker_others_keep_ending_is_completed() -> None:
    envs = {"long": EndsLate(4.0, ends=False), **{f"ends{n}": EndsLate(0.3 * n, ends=True) for n in range(7)}}
    played = play(envs, 1, settings={name: make_settings(group_size=1, retries=0) for name in envs})
    assert [group.episodes[0].status for group in played.groups.values()] == ["completed", *["failed"] * 7]
    errors = {episode.error for episode in played.episodes if episode.error}
    assert errors == {"the worker process ended with exit code 3"}


LIMIT = partial(LocalWorker, memory_bytes=900 * 2**20)
"""Starts a worker with a limit; a fresh one needs about 100 MiB."""


@pytest.mark.slow
def test_a_worker_that_leaks_is_replaced_and_no_rollout_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.workers.pool.loaded_files", tuple)  # other tests may have loaded large packages
    settings = {"leaking": make_settings(group_size=6, retries=0)}
    played = play({"leaking": Leaking(200)}, 1, settings=settings, connect=LIMIT)
    assert [episode.status for episode in played.episodes] == ["completed"] * 6
    assert played.metrics["restarts"] == 1


@pytest.mark.slow
def test_a_rollout_that_takes_too_much_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.workers.pool.loaded_files", tuple)  # other tests may have loaded large packages
    envs = {"leaking": Leaking(1200, at_once=True), "innocent": Innocent()}
    settings = {name: make_settings(group_size=1, retries=0) for name in envs}
    played = play(envs, 1, settings=settings, connect=LIMIT)
    (episode,) = played.groups["leaking"].episodes
    assert episode.error == "the worker process used more than 900 MiB of memory (workers.memory_mb)"
    assert played.groups["innocent"].episodes[0].status == "completed"


def test_a_worker_that_nobody_closed_ends_with_the_event_loop() -> None:
    class Owner(WorkerOwner):
        def receive(self, frame: bytes, /) -> None: ...
        def lose(self, loss: WorkerLoss, /) -> None: ...
        def show(self, line: str, /) -> None: ...

    async def run() -> LocalWorker:
        worker = LocalWorker(Owner())
        await asyncio.sleep(0.5)
        return worker

    earlier = descendants()
    asyncio.run(run())  # a process without an exit code would be a warning
    assert not descendants() - earlier


RUN = """
import asyncio, sys, time
sys.path.insert(0, {root!r})
from tests.workers.helpers import *  # with what they import
from tests.workers.hostile_envs import Hostile

async def main():
    tasks = [Task(0, "hostile", Hostile("waits_with_a_daemon"))]
    async with opened_pool(2, tasks) as pool:
        player = Player(pool, {{"hostile": make_settings(group_size=4)}}, seed=0, slots=Slots(9))
        sampler = ScriptedSampler(reply, chat=ByteChat())
        asyncio.get_running_loop().call_later(1.0, lambda: print("playing", flush=True))
        await player.play(tasks[0], lambda: sampler)

asyncio.run(main())
"""


def test_a_killed_run_leaves_no_process() -> None:
    id_text = uuid.uuid4().hex
    run = subprocess.Popen(
        [sys.executable, "-c", RUN.format(root=str(Path(__file__).parents[2]))],
        env=os.environ | {"RLKIT_TEST_ID": id_text},
        stdout=subprocess.PIPE,
    )
    with run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"playing\n"
        # The run, two workers with their keepers, four daemons.
        assert wait_for(lambda: len(processes_with(id_text)) >= 1 + 2 + 2 + 4, HANG_S) < HANG_S
        run.kill()
    assert wait_for(lambda: not processes_with(id_text), HANG_S) < HANG_S


class Holder(rlkit.Env):
    """Holds a value."""

    def __init__(self, value: object) -> None:
        self.value = value

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 1.0


async def open_and_close(*tasks: Task) -> None:
    async with opened_pool(1, tasks):
        pass


def test_a_task_that_cannot_be_pickled_is_refused_with_its_attribute() -> None:
    match = r"envs\.e: workers need tasks that can be pickled, but Holder\.value\.value \(of type socket\) cannot \("
    with socket.socket() as connection, pytest.raises(UsageError, match=match):
        asyncio.run(open_and_close(Task(0, "e", Holder(Holder(connection)))))


class ExitsWhenPickled:
    def __reduce__(self) -> NoReturn:
        sys.exit(3)


def test_a_task_that_exits_when_it_is_pickled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"but Holder\.value \(of type ExitsWhenPickled\) cannot \(3\)"):
        pickle_task(Task(0, "e", Holder(ExitsWhenPickled())))


class Counted:
    """Counts how often an object of it is pickled."""

    pickles = 0

    def __reduce__(self) -> tuple[object, tuple[()]]:
        Counted.pickles += 1
        return Counted, ()


class Pair(Holder):
    """Holds an object that is pickled before the value."""

    def __init__(self, value: object) -> None:
        self.first = Counted()
        super().__init__(value)


def test_the_search_for_what_cannot_be_pickled_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.workers.task_pickles._SEARCH_S", 0.0)
    with socket.socket() as connection, pytest.raises(UsageError, match=r"but Pair\.value \(of type Pair\) cannot"):
        pickle_task(Task(0, "e", Pair(Pair(Pair(Pair(connection))))))
    assert Counted.pickles == 4 + 4


class DiesWhenLoaded:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (7,)


def test_workers_that_cannot_start_are_not_replaced_for_ever() -> None:
    match, earlier = r"the worker process ended with exit code 7 while it started$", descendants()
    with pytest.raises(UsageError, match=match):
        asyncio.run(open_and_close(Task(0, "e", Holder(DiesWhenLoaded()))))
    assert not descendants() - earlier


class Calls:
    """Calls a function when it is loaded."""

    def __init__(self, function: Callable[..., object], *values: object) -> None:
        self.call = function, values

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def test_a_start_that_takes_too_long_shows_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine imports alone take longer than the limit: those of this file come before it, and files that
    # other tests loaded are none of this worker.
    monkeypatch.setattr("rlkit.config.loading.objects._loaded", {})
    limit = "import main; import rlkit.workers.process as process, tests.workers.test_hostile; process._START_S = 1.0"
    monkeypatch.setattr("rlkit.workers.local._CODE", local._CODE.replace("import main", limit))
    match = r"with exit code 1 while it started; its output:\n  Timeout \(0:00:01\)!\n(  .*\n)*  .* in _load_task\n"
    with pytest.raises(UsageError, match=match):
        asyncio.run(open_and_close(Task(0, "e", Holder(Calls(time.sleep, 10_000)))))


def test_a_task_that_cannot_be_loaded_is_named_with_the_field_of_its_workers() -> None:
    envs = {name: {"env": "arithmetic"} for name in ("good", "bad")} | {"own": {"workers": {"count": 1, "cpus": 2}}}
    config = load_config([], settings={"model": "m", "envs": envs, "rollouts": {"workers": 1}}).config
    tasks = {name: [Holder(1)] for name in envs}

    async def open_runner_and_close() -> None:
        async with open_runner(config, LocalRunner(ByteChat()), tasks, {}):
            pass

    start = "no worker for {} can start; set it to 0 to play in the run's own process: envs.{}: a worker cannot load "
    for field, names, name in [("rollouts.workers", "good, bad", "bad"), ("envs.own.workers", "own", "own")]:
        tasks[name] = [Holder(Calls(int, "no number"))]
        with pytest.raises(UsageError, match=re.escape(f"{field}: {start.format(names, name)}the task: ValueError: ")):
            asyncio.run(open_runner_and_close())
        tasks[name] = [Holder(1)]


def test_a_run_without_workers_that_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of the second worker is missing."""

    async def main() -> None:
        task = Task(0, "hostile", Hostile("exits"))
        async with opened_pool(1, [task]) as pool:
            monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
            player = Player(pool, {"hostile": make_settings(retries=5)}, seed=0, slots=Slots(9))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            await player.play(task, lambda: sampler)

    with pytest.raises(UsageError, match=r"no worker is left.*No such file"):
        asyncio.run(main())


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import rlkit
from tests.workers.helpers import play

class Local(rlkit.SingleTurnEnv):
    def prompt(self):
        return "in a script"
    def grade(self, reply):
        return float(len(reply.text))

if __name__ == "__main__":
    print(*[episode.reward for episode in play({{"e": Local()}}, 2).groups["e"].episodes])
"""


def test_a_class_of_a_script_is_played_in_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert [float(word) > 0 for word in run.stdout.split()] == [True] * 4


def test_a_class_of_a_file_is_played_in_workers(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    env = load_object(f"{file}:Local", field="envs.e.env")
    assert [episode.status for episode in play({"e": env()}, 2).groups["e"].episodes] == ["completed"] * 4


class CleansUp(rlkit.Env):
    """Writes a file when it is cancelled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "hi"}])
        (self.path / "began").touch()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            (self.path / "ended").touch()
        return 1.0


@pytest.mark.parametrize("is_hasty", [False, True])
def test_a_cancelled_rollout_cleans_up(tmp_path: Path, is_hasty: bool) -> None:
    async def main() -> None:
        task = Task(0, "e", CleansUp(tmp_path))
        async with opened_pool(1, [task, Task(1, "talk", Talk())]) as pool:
            settings = {"e": make_settings(group_size=2), "talk": make_settings()}
            player = Player(pool, settings, seed=0, slots=Slots(9))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            playing = asyncio.create_task(player.play(task, lambda: sampler))
            while not (tmp_path / "began").exists():
                await asyncio.sleep(0.01)
            playing.cancel()
            if is_hasty:  # the pool is closed meanwhile
                return
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert (tmp_path / "ended").exists()
            group = await player.play(Task(1, "talk", Talk()), lambda: sampler)
            assert [episode.status for episode in group.episodes] == ["completed"] * 4

    asyncio.run(main())
    assert (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_killed_worker_between_rollouts_is_replaced() -> None:
    async def main() -> None:
        task = Task(0, "talk", Talk())
        async with opened_pool(2, [task]) as pool:
            keepers = {pid for pid in descendants() if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}
            for process in descendants() - keepers:
                os.kill(process, signal.SIGKILL)
            player = Player(pool, {"talk": make_settings()}, seed=0, slots=Slots(9))
            sampler = ScriptedSampler(reply, chat=ByteChat())
            group = await player.play(task, lambda: sampler)
            assert [episode.status for episode in group.episodes] == ["completed"] * 4
            assert pool.metrics()["restarts"] == 2

    asyncio.run(main())
