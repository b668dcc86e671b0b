"""Play tasks in this process or in workers, and compare the results."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlkit._util.priority_semaphore import Slots
from rlkit.env import Env, Task
from rlkit.policy import Limits, Sampler
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Group, Sampling
from rlkit.workers.connection import Connect
from rlkit.workers.local import LocalWorker
from rlkit.workers.pool import WorkerPool


def reply(prompt: str, *, seed: int) -> str:
    """A different reply for each seed and prompt."""
    return f"reply {seed % 1000} to {len(prompt)}"


@dataclass
class Played:
    """Results of a few groups.

    Args:
        groups: the groups by the name of their environment.
        episodes: every episode that ended, in order; retried ones too.
        lines: what the workers printed.
        metrics: metrics of the pool at the end.
    """

    groups: Mapping[str, Group]
    episodes: list[Episode]
    lines: list[tuple[str, str]]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@asynccontextmanager
async def opened_pool(
    count: int, tasks: Sequence[Task], lines: list[tuple[str, str]] | None = None, *, connect: Connect = LocalWorker
) -> AsyncGenerator[WorkerPool]:
    def show(env: str, line: str) -> None:
        if lines is not None:
            lines.append((env, line))

    async with WorkerPool(count, connect, LocalRunner(ByteChat()), tasks=tasks, show=show).open() as pool:
        yield pool


def make_settings(*, group_size: int = 4, timeout_s: float = 60.0, retries: int = 1, **more: object) -> EnvSettings:
    return EnvSettings(group_size, Sampling(max_tokens=32), timeout_s, retries, Limits(max_turns=6), **more)


def play(
    envs: Mapping[str, Env],
    workers: int,
    *,
    settings: Mapping[str, EnvSettings] | None = None,
    connect: Connect = LocalWorker,
    make_sampler: Callable[[], Sampler] = lambda: ScriptedSampler(reply, chat=ByteChat()),
) -> Played:
    """Play each environment as a group, all at once; with 0 workers in this process."""
    settings = {name: make_settings() for name in envs} | dict(settings or {})
    tasks = [Task(draw, name, env) for draw, (name, env) in enumerate(envs.items())]
    sampler = make_sampler()
    played = Played({}, [], [])

    async def play_with(runner: LocalRunner | WorkerPool) -> None:
        player = Player(
            runner, settings, seed=5, slots=Slots(100), record=lambda task, episode: played.episodes.append(episode)
        )
        groups = await asyncio.gather(*(player.play(task, lambda: sampler) for task in tasks))
        played.groups = dict(zip(envs, groups, strict=True))
        played.metrics = dict(runner.metrics())

    async def main() -> None:
        if not workers:
            await play_with(LocalRunner(ByteChat()))
            return
        async with opened_pool(workers, tasks, played.lines, connect=connect) as pool:
            await play_with(pool)

    asyncio.run(main())
    return played


def describe(group: Group) -> list[object]:
    """All of a group that must not depend on where it was played; times do."""
    return [
        (
            *(episode.member, episode.attempt, episode.status, episode.reward, episode.metrics, episode.info),
            *(episode.error, episode.masked, episode.group_scored),
            [
                (
                    *(turn.prompt.tokens.tolist(), turn.completion.tolist(), turn.logprobs.tobytes()),
                    *(turn.sampled_mask.tolist(), turn.stop, turn.version, turn.parent),
                )
                for turn in episode.turns
            ],
        )
        for episode in group.episodes
    ]


def descendants(process: int | None = None) -> set[int]:
    """Processes below a process, by default this one, without zombies."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    below = {os.getpid() if process is None else process}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid() if process is None else process}


def processes_with(marker: str) -> set[int]:
    """Processes of the machine whose environment variables or arguments have a text."""
    ids = set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            if marker.encode() in text and "State:\tZ" not in (path / "status").read_text():
                ids.add(int(path.name))
        except OSError:
            continue
    return ids


def wait_for(condition: Callable[[], object], limit_s: float) -> float:
    """Wait until a condition holds, and return the seconds; a test compares them."""
    began_s = time.monotonic()
    while not condition() and time.monotonic() - began_s < limit_s:
        time.sleep(0.05)
    return time.monotonic() - began_s
