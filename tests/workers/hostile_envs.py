"""Environments that end, block or misuse their process, and one beside them that does nothing of the kind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import rlkit
from rlkit.env import GroupScorer
from rlkit.types import Episode, Outcome


@dataclass(frozen=True)
class Innocent(rlkit.Env):
    """A conversation with short waits."""

    turns: int = 4
    running: ClassVar = set[object]()
    """Rollouts of this process that have begun and not ended."""

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        self.running.add(policy)
        try:
            return await self.talk(policy)
        finally:
            self.running.discard(policy)

    async def talk(self, policy: rlkit.Policy) -> Outcome:
        total, messages = 0, list[rlkit.Message]()
        for number in range(self.turns):
            messages += [{"role": "user", "content": f"question {number}"}]
            answer = await policy.chat(messages)
            messages.append(answer.message)
            total += sum(answer.text.encode())
        return Outcome(float(total), {"total": total})


@dataclass(frozen=True)
class AsksForSet(rlkit.Env):
    """Asks with the words of a set, in its order."""

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        prompt = " ".join({"alpha", "beta", "gamma", "delta", "epsilon", "zeta"})
        await policy.chat([{"role": "user", "content": prompt}])
        return Outcome(1.0, info={"prompt": prompt})


@dataclass(frozen=True)
class Leaking(rlkit.Env):
    """Leave memory behind, a bit in each rollout, or all at once in code that does not end."""

    mib: int
    at_once: bool = False

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "begin"}])
        LEAKED.append(b"x" * (self.mib * 2**20))
        if self.at_once:
            time.sleep(120)
        await asyncio.sleep(1.5)
        return 1.0


LEAKED: list[bytes] = []


@dataclass(frozen=True)
class EndsLate(rlkit.Env):
    """End the worker after a reply and a pause, or only pause."""

    pause_s: float
    ends: bool

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "begin"}])
        await asyncio.sleep(self.pause_s)
        if self.ends:
            os._exit(3)
        return 1.0


@dataclass(frozen=True)
class Hostile(rlkit.Env):
    """Plays a turn, and then does an act of `ACTS`."""

    act: str

    async def rollout(self, policy: rlkit.Policy) -> object:
        await policy.chat([{"role": "user", "content": self.act}])
        result = ACTS[self.act]()
        return await result if asyncio.iscoroutine(result) else result


@dataclass(frozen=True)
class HostileScore(GroupScorer):
    """Does an act of `ACTS` when its group is scored."""

    act: str

    async def rollout(self, policy: rlkit.Policy) -> float:
        return 1.0

    async def score_group(self, episodes: Sequence[Episode]) -> list[float]:
        ACTS[self.act]()
        return [1.0] * len(episodes)


def exits() -> NoReturn:
    os._exit(3)


def exits_as_if_well() -> NoReturn:
    os._exit(0)


def crashes() -> None:
    ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def interrupts_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def forks_many() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (400, 400))
    with contextlib.suppress(OSError):
        for _ in range(60):  # root has no limit of processes
            if not os.fork():
                time.sleep(120)
                os._exit(0)
    raise OSError("no more processes")


def forks_and_returns() -> float:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        print("printed by a forked process")
    return 1.0


async def forks_and_waits() -> float:
    os.fork()
    await asyncio.sleep(0.3)
    return 1.0


def holds_the_interpreter() -> None:
    re.match(r"(a+)+b", "a" * 60)


def waits_for_ever() -> None:
    time.sleep(10_000)


async def blocks_in_a_callback() -> float:
    asyncio.get_running_loop().call_soon(time.sleep, 10_000)
    await asyncio.sleep(10_000)
    return 1.0


def uses_up_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    bytearray(10 * 2**30)


def replaces_json() -> float:
    json.dumps = lambda *_, **__: "{}"  # type: ignore[assignment]
    return 1.0


async def stops_the_loop() -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(10_000)
    return 1.0


async def cancels_all_tasks() -> float:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(10_000)
    return 1.0


def closes_the_loop() -> None:
    asyncio.get_running_loop().close()


async def exits_in_a_task() -> float:
    async def leave() -> None:
        sys.exit(4)

    await asyncio.create_task(leave())
    return 1.0


async def exits_in_a_callback() -> float:
    asyncio.get_running_loop().call_soon(sys.exit, 7)
    await asyncio.sleep(10_000)
    return 1.0


async def leaves_a_busy_thread() -> float:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 10_000), 0.1)
    return 1.0


async def crashes_in_a_thread() -> float:
    def crash() -> None:
        time.sleep(0.5)  # until the others have begun
        while Innocent.running:  # the one whose code runs at the moment would be blamed
            time.sleep(0.01)
        ctypes.string_at(0)

    await asyncio.to_thread(crash)
    return 1.0


async def exits_in_a_thread() -> float:
    threading.Timer(0.1, lambda: os._exit(5)).start()
    await asyncio.sleep(10_000)
    return 1.0


def leaves_a_child_and_exits() -> None:
    """The child has the connection, and a session of its own."""
    if not os.fork():
        os.setsid()
        time.sleep(120)
        os._exit(0)
    os._exit(6)


def leaves_a_daemon() -> float:
    subprocess.Popen(["sh", "-c", "setsid sleep 120 & exit"]).wait()
    return 1.0


async def waits_with_a_daemon() -> float:
    leaves_a_daemon()
    await asyncio.sleep(10_000)
    return 1.0


def writes_to_everything() -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names of descriptors
        with contextlib.suppress(OSError):
            os.set_blocking(int(name), False)
            os.write(int(name), b"garbage \xff\x00\n" * 7)
    raise ValueError("it wrote to everything")


def writes_a_little_to_the_connection() -> float:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  as above
        with contextlib.suppress(OSError):
            if "socket" in str(Path(f"/proc/self/fd/{name}").readlink()):
                os.write(int(name), b"x")
    return 1.0


def closes_everything() -> float:
    os.closerange(3, 1000)
    return 1.0


def prints_a_lot() -> float:
    for number in range(100_000):
        print(number)
    return 1.0


def prints_a_long_line() -> float:
    os.write(1, b"y" * 3_000_000)
    return 1.0


def starts_a_debugger() -> float:
    breakpoint()
    return 1.0


def returns_a_huge_info() -> Outcome:
    return Outcome(1.0, info={"text": "z" * 50_000_000})


def returns_an_unpicklable_info() -> Outcome:
    return Outcome(1.0, info={"lock": threading.Lock()})  # type: ignore[dict-item]


def raises_a_strange_error() -> None:
    raise ExceptionGroup("", [KeyError(threading.Lock())])


ACTS: Mapping[str, Callable[[], object]] = {
    name: act
    for name, act in list(globals().items())
    if getattr(act, "__module__", "") == __name__ and name[0].islower()
}
