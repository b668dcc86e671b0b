"""Runs that are killed, and resumed, many times over: a program, so that it can fork before any thread is started.

    python -m tests.resume.killing FOLDER KILLS SCHEDULE
    python -m tests.resume.killing FOLDER KILLS engine

Each run plays on virtual time with a simulated service, or in real time with the embedded engine. A simulated one ends
by `os._exit`, as after `kill -9`: what a thread was writing stays half written; what the service remembers outlives it.
One with the engine is sent SIGKILL. The last record of every third journal is torn. Prints one JSON object: for the run
that nobody killed and for each killed and resumed one, what it trained on.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlkit
from rlkit.config import load_config
from rlkit.run import RLTrainer
from rlkit.store import table
from rlkit.store.history import load, table_path
from rlkit.store.journal import segments
from rlkit.testing import ByteChat, Latency, SimulatedTinker, VirtualClock, World, byte_model

STEPS = 6


class Words(rlkit.StepEnv[int]):
    """Two turns, with a tool that takes time; the reward follows from what was said."""

    max_turns = 2

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"

    def reset(self) -> tuple[int, list[rlkit.Message]]:
        return 0, [{"role": "user", "content": self.task_id}]

    async def step(self, state: int, reply: rlkit.Reply) -> rlkit.Step:
        await asyncio.sleep(0.5 + len(reply.text) % 7)
        if len(reply.text) % 11 == 3:
            raise RuntimeError("the tool broke")
        return rlkit.Step([{"role": "user", "content": "and then?"}], reward=float(reply.text.count("e")))


class Digits(rlkit.SingleTurnEnv):
    """For the embedded engine: the share of the reply that is digits."""

    def __init__(self, start: str) -> None:
        self.start = self.task_id = start

    def prompt(self) -> str:
        return self.start

    def grade(self, reply: rlkit.Reply) -> float:
        return sum(ord("0") <= token <= ord("9") for token in reply.turn.completion) / 4


def train_on_engine(folder: Path, *, resume: bool) -> None:
    """Train the byte model on the embedded engine."""
    os.environ["RLKIT_ENGINE_DIR"] = str(folder / "engine")
    settings = {
        "model": str(folder.parent / "model"),
        "envs": {"digits": {}},
        "steps": STEPS,
        "batch": {"groups": 3, "group_size": 4},
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 4},
        "checkpoint": {"every": 2},
        "service": {"engine_threads": 1, "engine_device": "cpu"},
    }
    trainer = RLTrainer(
        load_config([], settings=settings),
        envs={"digits": [Digits(text) for text in ("one", "two", "six", "ten")]},
        directory=folder / "run",
        resume=resume and (folder / "run" / "run.json").exists(),
    )
    asyncio.run(trainer.train())
    (folder / "ended").write_text("")


def train(folder: Path, schedule: dict[str, object], *, kill_at_s: float | None, resume: bool) -> None:
    """Train in this process, which may not survive it."""
    world_file = folder / "world.pickle"
    world: World = pickle.loads(world_file.read_bytes()) if resume else World(seed=3)
    settings = {
        "model": "simulated",
        "envs": {"words": {}},
        "steps": STEPS,
        "batch": {"groups": 3, "group_size": 4, "replace_uninformative": True},
        "schedule": schedule,
        "checkpoint": {"every": 2},
        "rollouts": {"max_live": 10, "coalesce": "always"},
    }
    service = SimulatedTinker(world=world, latency=Latency(mean_tokens=12, sigma=0.6))
    trainer = RLTrainer(
        load_config([], settings=settings),
        envs={"words": [Words(number) for number in range(40)]},
        directory=folder / "run",
        resume=resume and (folder / "run" / "run.json").exists(),
        service=service,
        chat=ByteChat(),
    )

    def die() -> None:
        world_file.write_bytes(pickle.dumps(world))
        os._exit(9)

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        if kill_at_s is not None:
            runner.get_loop().call_at(kill_at_s, die)
        runner.run(trainer.train())
        world_file.write_bytes(pickle.dumps(world))
        (folder / "ended").write_text(str(runner.get_loop().time()))


def forked(work: Callable[[], None], *, kill_after_s: float | None = None) -> int:
    """Run in a child; its exit code, 9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    until_s = math.inf if kill_after_s is None else time.monotonic() + kill_after_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            until_s = math.inf
        time.sleep(0.002)
    return abs(os.waitstatus_to_exitcode(ended[1]))


def tear(run: Path) -> None:
    """Leave the last record of the journal unfinished."""
    written = [path for _, path in segments(run / "journal") if path.stat().st_size > 8]
    if written:
        os.truncate(written[-1], written[-1].stat().st_size - 3)


def record(folder: Path) -> dict[str, Any]:
    """What a run trained on, step by step."""
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = {"time/", "service/weights"}  # weights are compared by themselves
    trained, seen = [], Counter[tuple[int, int, int]]()
    for step in range(1, STEPS + 1):
        groups = table.read(table_path(run, step))
        trained.append(
            sorted(
                (group.group.task, episode.member, episode.reward, group.counts)
                for group in groups
                for episode in group.group.episodes
            )
        )
        seen.update((g.group.draw, e.member, e.attempt) for g in groups for e in g.attempts)
    history = load(run)
    for draw in history.outstanding:
        seen.update((draw, e.member, e.attempt) for e in history.attempts.get(draw, []))
    remembered = folder / "world.pickle"
    world: World = pickle.loads(remembered.read_bytes()) if remembered.exists() else World()
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(tuple(own))} for line in lines],
        "weights": [line.get("service/weights") for line in lines],
        "trained": trained,
        "played twice": [list(place) for place, count in seen.items() if count > 1],
        "samples": world.calls["samples"],
    }


def kill_simulated(root: Path, kills: int, schedule: dict[str, object]) -> list[dict[str, Any]]:
    """Kill runs on virtual time; some are killed again while they resume."""
    whole = root / "whole"
    assert forked(lambda: train(whole, schedule, kill_at_s=None, resume=False)) == 0
    makespan_s = float((whole / "ended").read_text())
    chance = random.Random(0)
    records = list[dict[str, Any]]()
    for number in range(kills):
        folder = root / f"killed-{number}"
        folder.mkdir()
        deaths, lost = 0, 0
        while True:
            at_s = chance.uniform(0, makespan_s) if deaths == 0 or chance.random() < 0.3 else None
            code = forked(lambda f=folder, n=deaths, a=at_s: train(f, schedule, kill_at_s=a, resume=n > 0))
            if code == 0:
                break
            assert code == 9, code
            deaths += 1
            torn = number % 3 == 0
            if torn:
                tear(folder / "run")
            world: World = pickle.loads((folder / "world.pickle").read_bytes())
            # what was being drawn, finished turns of those rollouts, and the one whose record was torn
            lost += 2 * 10 + torn
            world._live = 0  # pyright: ignore[reportPrivateUsage] nobody is drawing any more
            (folder / "world.pickle").write_bytes(pickle.dumps(world))
        records.append({**record(folder), "deaths": deaths, "lost": lost})
    return records


def kill_engine(root: Path, kills: int) -> list[dict[str, Any]]:
    """Kill runs on the embedded engine."""
    forked(lambda: byte_model(root / "model") and None)  # in a child: torch would start threads here
    for heavy in ("rlkit.engine.server", "rlkit.renderers", "transformers.models.auto.tokenization_auto"):
        importlib.import_module(heavy)  # once, before the forks
    whole = root / "whole"
    started = time.monotonic()
    assert forked(lambda: train_on_engine(whole, resume=False)) == 0
    makespan_s = time.monotonic() - started
    chance = random.Random(0)
    records = list[dict[str, Any]]()
    for number in range(kills):
        folder = root / f"killed-{number}"
        folder.mkdir()
        after_s = chance.uniform(0.2, 1) * makespan_s
        code = forked(lambda f=folder: train_on_engine(f, resume=False), kill_after_s=after_s)
        if code == 9:
            if number % 3 == 0:
                tear(folder / "run")
            code = forked(lambda f=folder: train_on_engine(f, resume=True))
        assert code == 0, code
        records.append({**record(folder), "deaths": 1})
    return records


def main(root: Path, kills: int, what: str) -> None:
    """Run once in peace, then `kills` times not."""
    (root / "whole").mkdir(parents=True)
    killed = kill_engine(root, kills) if what == "engine" else kill_simulated(root, kills, json.loads(what))
    print(json.dumps({"whole": record(root / "whole"), "killed": killed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
