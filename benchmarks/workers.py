"""Compare rollouts in workers with rollouts in the process of the run, on the same work in the same run.

    uv run python benchmarks/workers.py

    speed       rollouts per second of an environment with 20 ms of CPU a turn: 64 rollouts of 8 turns, two workers
                against one process
    overhead    CPU a turn of an environment without CPU, 64 rollouts of 8 turns: the run and its worker together,
                and how much more that is than in one process
    32k prompt  the same with prompts of 32,768 tokens a turn, and how much more they add to the overhead
    scale       requests a second that one event loop can answer while it is 80 % busy, for 1,000 simulated workers
                with 8 rollouts each: their frames are real, but come from this process, without sockets and without the
                CPU of the workers. Prompts of 1,000 tokens and completions of 200. `served` is the number of rollouts,
                each with a turn every ten seconds, that this rate serves

The sampler answers at once. CPU is that of the run and of its workers. Each value is the best of a few rounds, in which
the contenders take turns. `speed` needs two idle processors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from rlkit._util.gc_tuning import rare_garbage_collection
from rlkit._util.priority_semaphore import Slots
from rlkit.env import Env, Task
from rlkit.policy import Limits, Policy, Sampler, Samplers
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner, Rollout, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat
from rlkit.types import Completion, Prompt, Sampling
from rlkit.workers.client import WorkerClient
from rlkit.workers.connection import Connection, WorkerOwner
from rlkit.workers.local import LocalWorker
from rlkit.workers.messages import Ask, Play, Ready, Start, encode
from rlkit.workers.pool import WorkerPool
from rlkit.workers.task_pickles import TaskPickle

ROLLOUTS, TURNS = 64, 8
CPU_S = 0.020
LONG_PROMPT = 32_768
CONNECTIONS, CALLS = 1_000, 8
PROMPT, COMPLETION = 1_000, 200
BUSY = 0.8
SECONDS_PER_TURN = 10.0
SAMPLING = Sampling(max_tokens=COMPLETION)
SETTINGS = EnvSettings(ROLLOUTS, SAMPLING, timeout_s=600.0, max_retries=0, limits=Limits())


@dataclass(frozen=True)
class Turns(Env):
    """A rollout whose turns have a prompt of some length, and use some CPU."""

    cpu_s: float
    prompt_tokens: int

    async def rollout(self, policy: Policy) -> float:
        tokens = np.zeros(self.prompt_tokens, np.int32)
        for turn in range(TURNS):
            tokens[-1] = turn
            await policy.sample(tokens.copy())
            began_s = time.thread_time()
            while time.thread_time() - began_s < self.cpu_s:
                pass
        return 1.0


class InstantSampler(Sampler):
    """Answers at once, always the same."""

    version = 0

    def __init__(self, tokens: int) -> None:
        self._completion = Completion(np.ones(tokens, np.int32), np.full(tokens, -1.0, np.float32), "stop")

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        return [self._completion] * num_samples


@dataclass(frozen=True)
class Cost:
    """Wall-clock seconds of all rollouts, and CPU seconds of the run and its workers."""

    seconds: float
    cpu_s: float


class Contender:
    """A runner of rollouts."""

    def __init__(self, runner: RolloutRunner) -> None:
        self._runner = runner

    async def measure(self, env: Env) -> Cost:
        player = Player(self._runner, {"env": SETTINGS}, seed=0, slots=Slots(ROLLOUTS))
        sampler = InstantSampler(16)
        began_s, cpu_s = time.perf_counter(), self._cpu_s()
        group = await player.play(Task(0, "env", env), lambda: sampler)
        assert all(episode.status == "completed" for episode in group.episodes), group.episodes[0].error
        return Cost(time.perf_counter() - began_s, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        workers = self._runner._workers if isinstance(self._runner, WorkerPool) else []
        return time.process_time() + sum(worker.cpu_s for worker in workers)


@asynccontextmanager
async def open_contender(workers: int) -> AsyncGenerator[Contender]:
    """Start a runner, and warm it up."""
    local = LocalRunner(ByteChat())
    if workers:
        async with WorkerPool(workers, LocalWorker, local, tasks=[], show=print).open() as pool:
            await Contender(pool).measure(Turns(0.0, 16))
            yield Contender(pool)
    else:
        await Contender(local).measure(Turns(0.0, 16))
        yield Contender(local)


async def compare(env: Env, *, workers: int, rounds: int) -> tuple[Cost, Cost]:
    """Return the least costs of an environment in this process and in workers."""
    costs_here, costs_there = list[Cost](), list[Cost]()
    async with open_contender(0) as here, open_contender(workers) as there:
        for _ in range(rounds):  # in turn, because a shared machine has slow minutes
            costs_here.append(await here.measure(env))
            costs_there.append(await there.measure(env))
    return _least(costs_here), _least(costs_there)


def _least(costs: Sequence[Cost]) -> Cost:
    return Cost(min(cost.seconds for cost in costs), min(cost.cpu_s for cost in costs))


class SimulatedWorker(Connection):
    """A connection to no worker: `ask` sends a frame as a worker would, and answers are counted."""

    def __init__(self, owner: WorkerOwner) -> None:
        self._owner = owner
        self.answers = -1 - CALLS  # the first messages are the start and the calls
        owner.receive(_content(Ready()))

    def send(self, frame: bytes) -> None:
        self.answers += 1

    async def close(self) -> None:
        pass

    def ask(self, frame: bytes) -> None:
        """Receive the content of a frame."""
        self._owner.receive(frame)


def _content(message: Ready | Ask) -> bytes:
    frame = encode(message)
    return frame[frame.index(b"\x80") :]  # a pickle begins with this byte


async def scale(requests: int) -> float:
    """Return the CPU seconds per request of the event loop, with many simulated workers."""
    connections, clients = list[SimulatedWorker](), list[WorkerClient]()

    def connect(owner: WorkerOwner) -> Connection:
        connections.append(SimulatedWorker(owner))
        return connections[-1]

    sampler = InstantSampler(COMPLETION)
    prompt = Prompt(np.zeros(PROMPT, np.int32))
    start = encode(Start((), LocalRunner(ByteChat()), ()))
    for _ in range(CONNECTIONS):
        clients.append(WorkerClient(connect, start, print_line=print_nothing, replace=print_nothing))
    samplers = Samplers(lambda: sampler, lambda: sampler)
    play = Play(0, 0, Rollout(0, SETTINGS, 0, 0, 0, "train"))
    calls = [
        asyncio.create_task(client.call(play, TaskPickle(0, b""), samplers)) for client in clients for _ in range(CALLS)
    ]
    await asyncio.sleep(0)
    cpu_s, number = 0.0, 0
    while number < requests:
        asks = [  # CPU of the workers, which does not count
            _content(Ask(1 + (number + k) // CONNECTIONS % CALLS, number + k, prompt, SAMPLING, 0, 1, True))
            for k in range(CONNECTIONS)
        ]
        began_s = time.process_time()
        for connection, frame in zip(connections, asks, strict=True):
            connection.ask(frame)
        number += len(asks)
        while sum(connection.answers for connection in connections) < number:  # noqa: ASYNC110  an event would cost CPU
            await asyncio.sleep(0)
        cpu_s += time.process_time() - began_s
    for call in calls:
        call.cancel()
    for client in clients:
        client._excusing.cancel()
    return cpu_s / number


def print_nothing(*_: object) -> None:
    """Ignore lines and losses."""


def print_row(what: str, here: float | None, there: float, ratio: float, target: str, *, unit: str) -> None:
    """Print a row; a target is a sign and a number, or "" if there is none."""
    limit = float(target[1:] or "nan")
    verdict = "" if not target else "met" if (ratio >= limit if target[0] == "≥" else ratio <= limit) else "MISSED"
    cell = " " * 12 if here is None else f"{here:>12.3g}"
    print(f"{what:24}{cell}{there:>12.3g} {unit:14}{ratio:>9.3g} {target:>8} {verdict}", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the measurements of CPU")
    rounds = parser.parse_args().rounds
    print(f"{len(os.sched_getaffinity(0))} processors; load of the last minute {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'one process':>12}{'workers':>12} {'unit':14}{'compared':>9} {'target':>8}")
    with rare_garbage_collection():
        costs = asyncio.run(compare(Turns(CPU_S, 16), workers=2, rounds=max(rounds // 4, 1)))
        rates = [ROLLOUTS / cost.seconds for cost in costs]
        print_row("speed, 2 workers", *rates, rates[1] / rates[0], "≥1.8", unit="rollouts/s")
        differences = list[float]()
        for name, tokens, target in (("overhead", 16, 0.3), ("32k prompt", LONG_PROMPT, 1.0)):
            costs = asyncio.run(compare(Turns(0.0, tokens), workers=1, rounds=rounds))
            here, there = (cost.cpu_s / (ROLLOUTS * TURNS) * 1e3 for cost in costs)
            differences.append(there - here)
            growth = differences[-1] - (differences[0] if len(differences) > 1 else 0.0)
            print_row(name, here, there, growth, f"≤{target}", unit="CPU ms/turn")
        request_s = min(asyncio.run(scale(20 * CONNECTIONS)) for _ in range(rounds))
        print_row("scale, CPU", None, request_s * 1e6, request_s * 1e6, "", unit="µs/request")
        rate = BUSY / request_s
        print_row("scale, 80 % busy", None, rate, rate, "", unit="requests/s")
        print_row("scale, served", None, rate * SECONDS_PER_TURN, rate * SECONDS_PER_TURN, "", unit="rollouts")


if __name__ == "__main__":
    main()
