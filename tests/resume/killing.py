"""Runs that are killed, and resumed, many times over: a program, so that it can fork before any thread is started.

    python -m tests.resume.killing

For each line of its input, a `Request` as JSON, it prints one line: for the run that nobody killed and for each killed
and resumed one, what it trained on. Everything heavy is imported once; each run is a fork of this process, and dies of
SIGKILL. Simulated runs play on virtual time, and what the service remembers outlives them. The others play in real time
with the embedded engine.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import rlkit
from rlkit._util import files
from rlkit.config.loading.load import load_config
from rlkit.store import RunStore, table
from rlkit.store import journal as journals
from rlkit.store.history import load_resume_history, table_path
from rlkit.store.journal import Journal, RecordKind, list_segments
from rlkit.testing import ByteChat, Latency, SimulatedTinker, VirtualClock, World, byte_model
from rlkit.tinker_client import sdk
from rlkit.training.trainer import RLTrainer
from rlkit.types import Checkpoint

STEPS = 6
# Imported while a run goes on; once before the forks is enough for all of them.
HEAVY = ("pandas", "pyarrow.dataset")
HEAVY_ENGINE = (
    "rlkit.engine.server.server",
    "rlkit.chat.renderers",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "tinker.resources.training",
    "pyqwest.httpx",
    "uvicorn.protocols.http.auto",
)

type Moment = Literal["asked for", "half made", "made", "half recorded", "recorded"]
MOMENTS: tuple[Moment, ...] = ("asked for", "half made", "made", "half recorded", "recorded")


@dataclass(frozen=True, slots=True)
class Doom:
    """Moment at which a run dies: a time, a write to the journal, or a checkpoint.

    Args:
        share: share of the duration of the uninterrupted run.
        record: kind and number of the journal record that is written incompletely.
        cut: share of the bytes of `record` that is written.
        checkpoint: stage of saving a checkpoint, and the number of the checkpoint.
        torn: truncate the last record of the journal as well.
    """

    share: float | None = None
    record: tuple[str, int] | None = None
    cut: float = 0.0
    checkpoint: tuple[Moment, int] | None = None
    torn: bool = False

    def arm(self, die: Callable[[], NoReturn]) -> None:
        """Make this process call `die` at that moment."""
        if self.record is not None:
            _die_in_a_record(RecordKind[self.record[0]], self.record[1], self.cut, die)
        if self.checkpoint is not None:
            _die_at_a_checkpoint(*self.checkpoint, die)


@dataclass(frozen=True, slots=True)
class Request:
    """Request to run, kill and resume.

    Args:
        root: parent of the folders of the runs.
        schedule: settings of the schedule, or "engine" for a run on the embedded engine. With a number of steps as
            `warm_start`, these are supervised, and a teacher counts in the others.
        kills: number of runs killed at seeded random moments.
        dooms: additional moments, one run for each.
    """

    root: str
    schedule: dict[str, object] | Literal["engine"]
    kills: int = 0
    dooms: Sequence[Doom] = field(default_factory=list[Doom])


def _die_in_a_record(kind: RecordKind, number: int, cut: float, die: Callable[[], NoReturn]) -> None:
    append, counts = Journal.append, Counter[RecordKind]()

    def doomed(self: Journal, kind_: RecordKind, content: bytes) -> None:
        counts[kind_] += 1
        if kind_ is kind and counts[kind] == number:
            framed = journals._frame(kind, content)  # pyright: ignore[reportPrivateUsage]
            files.append(self._file, framed[: round(cut * (len(framed) - 1))])  # pyright: ignore[reportPrivateUsage]
            die()
        append(self, kind_, content)

    Journal.append = doomed


def _die_at_a_checkpoint(moment: Moment, number: int, die: Callable[[], NoReturn]) -> None:
    save, await_save, add = sdk.TinkerLearner.save, sdk._await_save, RunStore.add_checkpoint  # pyright: ignore[reportPrivateUsage]
    counts = Counter[str]()

    def is_due(at: Moment) -> bool:
        counts[at] += 1
        return at == moment and counts[at] == number

    def doomed_save(self: sdk.TinkerLearner, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        answer = save(self, name, ttl_s=ttl_s)
        if is_due("asked for"):
            asyncio.get_running_loop().call_later(0.01, die)  # the request is on its way then
        return answer

    async def doomed_saved(state: Awaitable[Any], sampler: Awaitable[Any], what: str) -> tuple[str, str]:
        if is_due("half made"):
            await state
            die()
        return await await_save(state, sampler, what)

    def doomed_add(self: RunStore, checkpoint: Checkpoint) -> None:
        if is_due("made"):
            die()
        if is_due("half recorded"):
            with (self.directory / "checkpoints.jsonl").open("a") as file:
                file.write('{"step": 2, "state": "tinker:')
            die()
        add(self, checkpoint)
        if is_due("recorded"):
            die()

    sdk.TinkerLearner.save = doomed_save
    sdk._await_save = doomed_saved  # pyright: ignore[reportPrivateUsage]
    RunStore.add_checkpoint = doomed_add


class Words(rlkit.StepEnv[int]):
    """Two turns with a slow tool; the reward depends on the replies."""

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
    """Reward the share of digits in the reply; for the embedded engine."""

    def __init__(self, start: str) -> None:
        self.start = self.task_id = start

    def prompt(self) -> str:
        return self.start

    def grade(self, reply: rlkit.Reply) -> float:
        return sum(ord("0") <= token <= ord("9") for token in reply.turn.completion) / 4


def train_on_engine(folder: Path, *, doom: Doom | None, resume: bool) -> None:
    """Train the byte model on the embedded engine, in this process, which may not survive it."""
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
    if doom is not None:
        doom.arm(_die)
    asyncio.run(trainer.train())
    (folder / "record.json").write_text(json.dumps(collect_record(folder, None)))


def train(folder: Path, schedule: dict[str, object], *, doom: Doom | None, at_s: float | None, resume: bool) -> None:
    """Train with the simulated service, in this process, which may not survive it."""
    world_file = folder / "world.pickle"
    world: World = pickle.loads(world_file.read_bytes()) if resume else World(seed=3)
    schedule, supervised_steps = dict(schedule), int(str(schedule.get("warm_start", 0)))
    settings: dict[str, object] = {
        "model": "simulated",
        "envs": {"words": {}},
        "steps": STEPS - supervised_steps,
        "batch": {"groups": 3, "group_size": 4, "replace_uninformative": True},
        "schedule": schedule,
        "checkpoint": {"every": 2},
        "rollouts": {"max_concurrent": 10, "coalesce": "always"},
    }
    if schedule.pop("warm_start", None):
        talks = [[{"role": "user", "content": str(n)}, {"role": "assistant", "content": "e" * n}] for n in range(1, 8)]
        files.write_text(folder / "talks.jsonl", "".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        settings |= {
            "warm_start": {"files": str(folder / "talks.jsonl"), "steps": supervised_steps},
            "teacher": {"weight": 0.5, "first_step": supervised_steps + 1},
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
    here = threading.current_thread()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        loop = runner.get_loop()

        def die() -> NoReturn:
            if threading.current_thread() is not here:  # where the loop runs, the world stands still
                loop.call_soon_threadsafe(die)
                threading.Event().wait()
            world_file.write_bytes(pickle.dumps(world))
            _die()

        if at_s is not None:
            loop.call_at(at_s, die)
        if doom is not None:
            doom.arm(die)
        runner.run(trainer.train())
        (folder / "record.json").write_text(json.dumps(collect_record(folder, world) | {"makespan": loop.time()}))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def run_in_fork(work: Callable[[], object], *, kill_after_s: float | None = None) -> int:
    """Run `work` in a child process and return its exit code, 9 if it was killed."""
    assert threading.active_count() == 1  # a child would have only the one that forks
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    until_s = math.inf if kill_after_s is None else time.monotonic() + kill_after_s
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            until_s = math.inf
        time.sleep(0.002)
    return abs(os.waitstatus_to_exitcode(status[1]))


def tear(run: Path) -> None:
    """Truncate the last record of the journal."""
    paths = [path for _, path in list_segments(run / "journal") if path.stat().st_size > 8]
    if paths:
        os.truncate(paths[-1], paths[-1].stat().st_size - 3)


def collect_record(folder: Path, world: World | None) -> dict[str, Any]:
    """Collect the training data and metrics of each step of a run."""
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Weights are compared by themselves; what was used counts what a kill made do again.
    variable_metrics = {"time/", "usage/", "service/weights"}
    trained, attempt_counts = [], Counter[tuple[int, int, int]]()
    for step in range(1, STEPS + 1):
        groups = table.read_table(table_path(run, step))
        trained.append(
            sorted(
                (group.group.task, episode.member, episode.reward, group.is_trained)
                for group in groups
                for episode in group.group.episodes
            )
        )
        attempt_counts.update((g.group.draw, e.member, e.attempt) for g in groups for e in g.attempts)
    history = load_resume_history(run)
    for draw in history.outstanding:
        attempt_counts.update((draw, e.member, e.attempt) for e in history.attempts.get(draw, []))
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(tuple(variable_metrics))} for line in lines],
        "weights": [line.get("service/weights") for line in lines],
        "trained": trained,
        "played twice": [list(place) for place, count in attempt_counts.items() if count > 1],
        "samples": world and world.calls["samples"],
        "checkpoints": [json.loads(line)["step"] for line in (run / "checkpoints.jsonl").read_text().splitlines()],
        "left": sorted(path.name for path in run.rglob("*.tmp")),
    }


def collect_record_in_fork(folder: Path) -> dict[str, Any]:
    """Call `collect_record` in a fork, because reading tables starts threads."""
    return json.loads((folder / "record.json").read_text())


def run_simulated(root: Path, schedule: dict[str, object]) -> dict[str, Any]:
    """Run on virtual time without a kill."""
    folder = root / "whole"
    folder.mkdir(parents=True)
    assert run_in_fork(lambda: train(folder, schedule, doom=None, at_s=None, resume=False)) == 0
    return collect_record_in_fork(folder)


def kill_simulated(
    root: Path, request: Request, schedule: dict[str, object], makespan_s: float
) -> list[dict[str, Any]]:
    """Kill runs on virtual time; some of those killed at a time are killed again while they resume."""
    chance = random.Random(0)
    records = list[dict[str, Any]]()
    for number, doom in enumerate(_dooms(request, chance)):
        folder = root / f"killed-{number}"
        folder.mkdir(parents=True)
        deaths, lost = 0, 0
        while True:
            share = doom.share if deaths == 0 else None
            if deaths and doom.share is not None and chance.random() < 0.3:
                share = chance.random()
            at_s = None if share is None else share * makespan_s
            armed = None if deaths else doom
            code = run_in_fork(
                lambda f=folder, d=armed, a=at_s, n=deaths: train(f, schedule, doom=d, at_s=a, resume=n > 0)
            )
            if code == 0:
                break
            assert code == 9, code
            deaths += 1
            if doom.torn:
                tear(folder / "run")
            world: World = pickle.loads((folder / "world.pickle").read_bytes())
            # what was being drawn, finished turns of those rollouts, and the one whose record was torn
            lost += 2 * 10 + (doom.torn or doom.record is not None)
            world._live = 0  # pyright: ignore[reportPrivateUsage] nobody is drawing any more
            (folder / "world.pickle").write_bytes(pickle.dumps(world))
        records.append({**collect_record_in_fork(folder), "deaths": deaths, "lost": lost})
        shutil.rmtree(folder)
    return records


def run_engine(root: Path) -> dict[str, Any]:
    """Run on the embedded engine without a kill."""
    for name in HEAVY_ENGINE:
        importlib.import_module(name)
    gc.freeze()
    (root / "whole").mkdir(parents=True)
    run_in_fork(lambda: byte_model(root / "model"))
    started = time.monotonic()
    assert run_in_fork(lambda: train_on_engine(root / "whole", doom=None, resume=False)) == 0
    return {**collect_record_in_fork(root / "whole"), "makespan": time.monotonic() - started}


def kill_engine(root: Path, request: Request, makespan_s: float) -> list[dict[str, Any]]:
    """Kill runs on the embedded engine."""
    records = list[dict[str, Any]]()
    for number, doom in enumerate(_dooms(request, random.Random(0))):
        folder = root / f"killed-{number}"
        folder.mkdir()
        after_s = None if doom.share is None else doom.share * makespan_s
        code = run_in_fork(lambda f=folder, d=doom: train_on_engine(f, doom=d, resume=False), kill_after_s=after_s)
        deaths = int(code == 9)
        if code == 9:
            if doom.torn:
                tear(folder / "run")
            code = run_in_fork(lambda f=folder: train_on_engine(f, doom=None, resume=True))
        assert code == 0, code
        records.append({**collect_record_in_fork(folder), "deaths": deaths})
        shutil.rmtree(folder)
    return records


def _dooms(request: Request, chance: random.Random) -> Sequence[Doom]:
    """Return the seeded and the requested dooms; every third seeded one also truncates the last record."""
    seeded = [Doom(share=chance.random(), torn=number % 3 == 0) for number in range(request.kills)]
    return [*seeded, *request.dooms]


def answer(request: Request, uninterrupted_by_schedule: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run the schedule uninterrupted, unless a result is cached, then run and kill it."""
    root, name = Path(request.root), json.dumps(request.schedule)
    if isinstance(request.schedule, str):
        uninterrupted = uninterrupted_by_schedule[name] = run_engine(root)
        return {"whole": uninterrupted, "killed": kill_engine(root, request, uninterrupted["makespan"])}
    if name not in uninterrupted_by_schedule:
        uninterrupted_by_schedule[name] = run_simulated(root, request.schedule)
    uninterrupted = uninterrupted_by_schedule[name]
    return {
        "whole": uninterrupted,
        "killed": kill_simulated(root, request, request.schedule, uninterrupted["makespan"]),
    }


def main() -> None:
    """Answer requests until the input ends."""
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # collections in the children would copy what they share
    print(json.dumps("ready"), flush=True)
    uninterrupted_by_schedule = dict[str, dict[str, Any]]()
    for line in sys.stdin:
        arguments = json.loads(line)
        arguments["dooms"] = [Doom(**doom) for doom in arguments["dooms"]]
        print(json.dumps(answer(Request(**arguments), uninterrupted_by_schedule)), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries would have much to say on the way out
