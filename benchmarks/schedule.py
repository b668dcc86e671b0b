"""rlkit's loop and tinker-cookbook's, on one simulated service, under a clock that does not wait.

    uv run python benchmarks/schedule.py
    uv run python benchmarks/schedule.py --cookbook DIR       (an unpacked wheel of tinker-cookbook)
    uv run python benchmarks/schedule.py --results DIR        (keeps what was found; --report prints it again)

Workloads, with a service whose samples take 0.3 s and 20 ms a token, gradients 5 s and 1 s for 20,000 tokens, optimiser
steps 2 s and handing over weights 5 s:

    math          16 groups of 16, one turn of 790 tokens in the mean, log-normal
    stragglers    the same, with 0.5 % of the samples ten times slower
    agent         8 groups of 8, 4 to 12 turns of 256 tokens, and after each a tool that takes 5 s
    small         8 groups of 8, one turn of 280 tokens; `clock` is the same where a request for training that finds the
                  service idle waits for the next tick, one in 10 s
    constant      `small` with 40 % of the groups getting equal rewards

Time is virtual and counts from the first sample that is asked for to the last optimiser step, over the number of
steps. The rollouts are the same on both sides. `ideal` is computed from them: for `sync` a step takes as long as its
longest rollout, its gradient, its optimiser step and the weights' way to the sampler; for `stream` the gradients go
out in the requests that would have been best, had one known when each group would finish. `bound` is all the rollouts'
time over the number of them that may be live.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import workloads
from workloads import WORKLOADS, Played, Workload

from rlkit.testing.world import Latency

if TYPE_CHECKING:
    from service import Log

UNLIMITED = 100_000
SIDES = ("ideal", "rlkit", "cookbook")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side."""

    workload: str
    mode: str
    staleness: int = 0
    live: int = UNLIMITED
    strict: bool = False

    @property
    def name(self) -> str:
        """How the table calls it."""
        mode = f"async K={self.staleness}" if self.mode == "async" else self.mode
        limit = "" if self.live == UNLIMITED else f", {self.live} live"
        return f"{self.workload} {mode}{' strict' if self.strict else ''}{limit}"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it.

    Args:
        step_s: virtual seconds for each step that was asked for.
        steps: optimiser steps.
        teaching: for each step, its sequences with something to teach.
        unused: rollouts that were begun and not trained on.
        live: rollouts at once, at most.
        prefill: tokens of prompts that were computed.
    """

    step_s: float
    steps: int
    teaching: list[int]
    unused: int
    live: int
    prefill: int


def _modes(workload: str, *staleness: int, strict: bool = False) -> list[Run]:
    return [Run(workload, "async", k, strict=strict) for k in staleness]


OURS: Sequence[Run] = [
    Run("agent", "sync"),
    Run("agent", "stream"),
    *_modes("agent", 1, 2, 4),
    *_modes("agent", 1, 2, strict=True),
    *(Run("agent", "async", k, live=64) for k in (1, 2)),
    Run("math", "sync"),
    Run("math", "stream"),
    *_modes("math", 1, 2, 4),
    *_modes("stragglers", 1, 2, 4),
    *_modes("stragglers", 1, strict=True),
    *(Run(name, mode, k) for name in ("small", "clock") for mode, k in (("sync", 0), ("stream", 0), ("async", 1))),
    *(Run("constant", mode, k) for mode, k in (("sync", 0), ("stream", 0), ("async", 1))),
]
THEIRS: Sequence[Run] = [
    *(run for run in OURS if not run.strict and run.live == UNLIMITED),
    Run("agent", "async", 0),
]


def found(workload: Workload, played: Played, calls: Mapping[str, int], log: Log) -> Found:
    """What a run amounted to."""
    assert log.began_s is not None
    return Found(
        step_s=(log.steps[-1].done_s - log.began_s) / workload.steps,
        steps=len(log.steps),
        teaching=[step.teaching for step in log.steps],
        unused=played.rollouts - sum(step.sequences for step in log.steps),
        live=played.most_live,
        prefill=calls["prefill_tokens"],
    )


def rlkit_run(run: Run, directory: Path, *, log: Log | None = None) -> Found:
    """Run rlkit."""
    from service import Log, Tinker

    from rlkit.config import load_config
    from rlkit.run import RLTrainer
    from rlkit.testing import ByteChat, World, run_virtual

    workload, played, world, log = WORKLOADS[run.workload], Played(), World(), log or Log()
    ahead = {"max_staleness": run.staleness, "staleness": "strict" if run.strict else "paced"}
    settings = {
        "model": "simulated",
        "envs": {"work": {}},
        "steps": workload.steps,
        "batch": {
            "groups": workload.groups,
            "group_size": workload.group_size,
            "replace_uninformative": workload.constant > 0,
        },
        "schedule": {"mode": run.mode, **(ahead if run.mode == "async" else {})},
        "sampling": {"max_tokens": workloads.MAX_TOKENS},
        "rollouts": {"max_live": run.live, "timeout_s": 1e6},
        "service": {"timeout_s": 1e6},
        "checkpoint": {"every": 0},
    }

    async def train() -> None:
        trainer = RLTrainer(
            load_config([], settings=settings),
            envs={"work": workloads.InOrder(workload, played)},
            directory=directory,
            service=Tinker(world, workload.latency, log),
            chat=ByteChat(),
        )
        await trainer.train()

    run_virtual(train())
    return found(workload, played, world.calls, log)


def cookbook_run(run: Run, directory: Path, *, log: Log | None = None) -> Found:
    """Run the peer."""
    import cookbook
    from service import Client, Log

    from rlkit.testing import World, run_virtual

    workload, played, world, log = WORKLOADS[run.workload], Played(), World(), log or Log()
    run_virtual(
        cookbook.train(
            workload,
            directory,
            mode=run.mode,
            staleness=run.staleness,
            played=played,
            client=lambda: Client(world, workload.latency, log),
            informative=workload.constant > 0,
        )
    )
    return found(workload, played, world.calls, log)


@dataclass(frozen=True, slots=True)
class Ideal:
    """Seconds of a step: of the ideal schedules, and of one rollout after the other."""

    sync: float
    stream: float
    serial: float


def ideal(workload: Workload) -> Ideal:
    """Play every rollout for itself, and compute how long the schedules need for them."""
    from service import Log, Sampling
    from tinker import types

    from rlkit.testing import World, run_virtual

    params = types.SamplingParams(max_tokens=workloads.MAX_TOKENS)

    async def play(task: int, sampler: Sampling) -> tuple[float, int]:
        clock = asyncio.get_running_loop().time
        began, turn, last = clock(), 1, 1
        tokens = list(workloads.question(task).encode())
        while True:
            reply = (await sampler.sample(types.ModelInput.from_ints(tokens), 1, params)).sequences[0].tokens
            if turn == 1:
                last = workloads.turns(workload, reply)
            await workloads.use_tool(workload, reply)
            tokens = [*tokens, *reply]
            if turn == last:
                return clock() - began, len(tokens) - 1
            tokens += workloads.observation(turn)
            turn += 1

    async def play_all() -> list[tuple[float, int]]:
        from service import Client

        client = Client(World(), workload.latency, Log())
        trainer = await client.create_lora_training_client("simulated")
        sampler = await trainer.save_weights_and_get_sampling_client()
        tasks = workload.steps * workload.groups
        return await asyncio.gather(*(play(task, sampler) for task in range(tasks) for _ in range(workload.group_size)))

    rollouts = run_virtual(play_all())
    size, latency = workload.group_size, workload.latency
    groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    sync = stream = 0.0
    for start in range(0, len(groups), workload.groups):
        batch = [
            (max(s for s, _ in group), sum(n for _, n in group)) for group in groups[start : start + workload.groups]
        ]
        after = latency.step_s + latency.save_s
        tokens_s = sum(tokens for _, tokens in batch) / latency.trained_tokens_per_s
        sync += max(finished for finished, _ in batch) + latency.gradient_s + tokens_s + after
        stream += best_stream(sorted(batch), latency) + after
    last = latency.save_s  # the last hand-over is not counted
    steps = workload.steps
    return Ideal((sync - last) / steps, (stream - last) / steps, sum(s for s, _ in rollouts) / steps)


def best_stream(groups: Sequence[tuple[float, int]], latency: Latency) -> float:
    """When the last gradient can be done, however the groups, in the order in which they finish, share requests."""
    done = [0.0]
    for end in range(1, len(groups) + 1):
        finished = groups[end - 1][0]
        choices = [
            max(done[begin], finished) + latency.gradient_s + tokens / latency.trained_tokens_per_s
            for begin in range(end)
            for tokens in [sum(count for _, count in groups[begin:end])]
        ]
        done.append(min(choices))
    return done[-1]


def contend(side: str, only: str) -> None:
    """Play one side's runs, in this process, and print what came of them, a line for each."""
    if side == "ideal":
        for name in ("math", "stragglers", "agent", "small"):
            print(json.dumps([name, asdict(ideal(WORKLOADS[name]))]), flush=True)
        return
    if side == "cookbook":
        import cookbook

        cookbook.prepare()
        print(json.dumps(["version", cookbook.VERSION]), flush=True)
    for run in OURS if side == "rlkit" else THEIRS:
        if only not in run.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            play = rlkit_run if side == "rlkit" else cookbook_run
            print(json.dumps([run.name, asdict(play(run, Path(folder) / "run"))]), flush=True)


def start(side: str, only: str, cookbook: Path | None, results: Path) -> subprocess.Popen[bytes]:
    """Play one side's runs in a process of its own."""
    paths = [str(cookbook)] if cookbook else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--contender", side, "--only", only]
    with (results / f"{side}.jsonl").open("w") as file:
        return subprocess.Popen(command, stdout=file, env=environment)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; the ratio is met if it is at most, or at least, the target."""

    what: str
    ours: float
    other: float
    ratio: float
    target: float | None
    least: bool = False

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.what:44}{self.ours:>10.1f}{self.other:>10.1f}{self.ratio:>9.3f}"
        met = self.ratio >= self.target if self.least else self.ratio <= self.target
        sign = "≥" if self.least else "≤"
        verdict = "met" if met else "MISSED"
        target = f"{sign} {self.target:g}"
        return f"{self.what:44}{self.ours:>10.1f}{self.other:>10.1f}{self.ratio:>9.3f}{target:>9}  {verdict}"


def rows(ours: Mapping[str, Found], theirs: Mapping[str, Found], best: Mapping[str, Ideal]) -> list[Row]:
    """The comparisons that the runs allow."""

    def against(mine: str, other: str, target: float | None) -> list[Row]:
        if mine not in ours or other not in theirs:
            return []
        a, b = ours[mine].step_s, theirs[other].step_s
        what = f"{mine} / cookbook" + ("" if mine == other else f" {other.split(' ', 1)[1]}")
        return [Row(what, a, b, a / b, target)]

    table = list[Row]()
    limited = "agent async K=2, 64 live"
    if limited in ours:
        a, bound = ours[limited], best["agent"].serial / 64
        if (same := theirs.get("agent async K=0")) is not None:
            table.append(
                Row(
                    "agent, 64 live: cookbook K=0 / rlkit K=2", a.step_s, same.step_s, same.step_s / a.step_s, 1.9, True
                )
            )
        table.append(Row(f"{limited} / bound", a.step_s, bound, a.step_s / bound, 1.12))
        second = ours["agent async K=1, 64 live"].step_s
        table.append(Row("agent async K=1, 64 live / bound", second, bound, second / bound, None))
    for run in OURS:
        if run.workload in ("math", "stragglers", "agent") and run.mode == "async" and run.live == UNLIMITED:
            other = replace(run, strict=False).name
            table += against(run.name, other, None if run.strict else 1.02)
    for name in ("math", "agent", "small"):
        for mode in ("sync", "stream"):
            if (run := f"{name} {mode}") in ours:
                a, b = ours[run].step_s, best[name].sync if mode == "sync" else best[name].stream
                table.append(Row(f"{run} / ideal", a, b, a / b, 1.01))
                table += against(run, run, None)
    for run, target in (("clock sync", 0.90), ("clock stream", 0.85), ("clock async K=1", 0.82)):
        table += against(run, run, target)
    table += against("small async K=1", "small async K=1", None)
    unused = {
        name: sum(f.unused for run, f in side.items() if "constant" not in run)
        for name, side in (("rlkit", ours), ("cookbook", theirs))
    }
    table.append(Row("rollouts thrown away, all runs", unused["rlkit"], unused["cookbook"], unused["rlkit"], 0))
    size = WORKLOADS["constant"].group_size
    for run in OURS:
        if run.workload == "constant" and run.name in ours:
            workload = WORKLOADS["constant"]
            exact, peers = (
                sum(count == workload.groups * size for count in side[run.name].teaching) if run.name in side else 0
                for side in (ours, theirs)
            )
            table.append(
                Row(f"{run.name}: full steps of {workload.steps}", exact, peers, exact / workload.steps, 1, True)
            )
    for run in ("math sync", "small sync"):
        if run in ours and run in theirs:
            a, b = ours[run].prefill, theirs[run].prefill
            size = WORKLOADS[run.split()[0]].group_size
            table.append(Row(f"{run}: prefill, thousand tokens", a / 1e3, b / 1e3, b / a, size, True))
    return table


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cookbook", type=Path, help="folder of an unpacked tinker-cookbook; by default the installed one"
    )
    parser.add_argument("--only", default="", help="only runs whose name holds this")
    parser.add_argument("--results", type=Path, help="folder for what each side found")
    parser.add_argument("--report", action="store_true", help="print what the folder holds, and run nothing")
    parser.add_argument("--contender", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options.only)
        return
    results: Path = options.results or Path(tempfile.mkdtemp())
    results.mkdir(parents=True, exist_ok=True)
    if not options.report:
        for process in [start(side, options.only, options.cookbook, results) for side in SIDES]:
            process.wait()
    lines = {side: [json.loads(line) for line in (results / f"{side}.jsonl").open()] for side in SIDES}
    version = next((value for name, value in lines["cookbook"] if name == "version"), "?")
    ours = {name: Found(**value) for name, value in lines["rlkit"]}
    theirs = {name: Found(**value) for name, value in lines["cookbook"] if name != "version"}
    best = {name: Ideal(**value) for name, value in lines["ideal"]}
    print(f"tinker-cookbook {version}; virtual seconds a step")
    print(f"{'run':30}{'rlkit':>10}{'live':>6}{'steps':>6}{'cookbook':>11}{'live':>6}{'steps':>6}{'unused':>8}")
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        mine = f"{a.step_s:>10.1f}{a.live:>6}{a.steps:>6}" if a else " " * 22
        other = f"{b.step_s:>11.1f}{b.live:>6}{b.steps:>6}{b.unused:>8}" if b else ""
        print(f"{name:30}{mine}{other}")
    print(f"\n{'comparison':44}{'rlkit':>10}{'other':>10}{'ratio':>9}{'target':>9}")
    for row in rows(ours, theirs, best):
        print(row)


if __name__ == "__main__":
    main()
