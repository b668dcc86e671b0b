"""Compare the training loops of rlkit and tinker-cookbook on one simulated service, in virtual time.

    uv run python benchmarks/schedule.py
    uv run python benchmarks/schedule.py --cookbook DIR       (an unpacked wheel of tinker-cookbook)
    uv run python benchmarks/schedule.py --results DIR        (keeps the measurements; --report prints them again)

A sample takes 0.3 s and 20 ms per token, a gradient 5 s and 1 s per 20,000 tokens, an optimiser step 2 s, and the
transfer of weights to the sampler 5 s. Workloads:

    math          16 groups of 16, one turn of 790 tokens on average, log-normal
    stragglers    the same, with 0.5 % of the samples ten times slower
    agent         8 groups of 8, 4 to 12 turns of 256 tokens, each followed by a tool call of 5 s
    small         8 groups of 8, one turn of 280 tokens
    clock         the same with gradients of 2 s, and a service that ticks every 10 s: a training request to the idle
                  service waits for the next tick; `clock 5` has gradients of 5 s
    constant      `small`, with equal rewards in 40 % of the groups

With a clock, the gain depends on when a step ends between two ticks. cookbook requests the weights when the step is
done, and then waits for a tick; rlkit has requested them already. The gain is 10 s minus gradient and optimiser step:
4.8 s with `clock`, 1.8 s with `clock 5`.

The seconds per step are the virtual time from the first request for a sample to the last optimiser step, divided by the
number of steps. Both sides play the same rollouts. `ideal` is computed from these rollouts. For `sync`, a step takes
its longest rollout, its gradient, its optimiser step and the transfer of weights. For `stream`, groups share requests
for gradients as if the time at which each group finishes were known. `bound` is the total time of the rollouts divided
by the limit on live rollouts. A ratio has no target if cookbook trained fewer steps than requested: cookbook 0.5.8 does
this with `async`, because it drops late groups.
"""

from __future__ import annotations

import argparse
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
from ideal import Ideal, ideal
from workloads import WORKLOADS, Played, Workload

if TYPE_CHECKING:
    from service import Log

UNLIMITED = 100_000
SIDES = ("ideal", "rlkit", "cookbook")


@dataclass(frozen=True, slots=True)
class Run:
    """Configuration of a run."""

    workload: str
    mode: str
    staleness: int = 0
    live: int = UNLIMITED
    strict: bool = False

    @property
    def name(self) -> str:
        """Name in the table."""
        mode = f"async K={self.staleness}" if self.mode == "async" else self.mode
        limit = "" if self.live == UNLIMITED else f", {self.live} live"
        return f"{self.workload} {mode}{' strict' if self.strict else ''}{limit}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of a run.

    Args:
        step_s: virtual seconds per requested step.
        steps: optimiser steps.
        teaching: for each step, the number of sequences with an advantage other than 0.
        unused: rollouts that were started but not trained on.
        live: maximum number of concurrent rollouts.
        prefill: computed prompt tokens.
        staleness: mean staleness in steps as the side reports it: of turns (rlkit), or of groups at their start.
    """

    step_s: float
    steps: int
    teaching: list[int]
    unused: int
    live: int
    prefill: int
    staleness: float = 0.0


def _modes(workload: str, *staleness: int, strict: bool = False) -> list[Run]:
    return [Run(workload, "async", k, strict=strict) for k in staleness]


RLKIT_RUNS: Sequence[Run] = [
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
    *(
        Run(name, mode, k)
        for name in ("small", "clock", "clock 5")
        for mode, k in (("sync", 0), ("stream", 0), ("async", 1))
    ),
    *(Run("constant", mode, k) for mode, k in (("sync", 0), ("stream", 0), ("async", 1))),
]
COOKBOOK_RUNS: Sequence[Run] = [
    *(run for run in RLKIT_RUNS if not run.strict and run.live == UNLIMITED),
    Run("agent", "async", 0),
]


def measure_run(workload: Workload, played: Played, calls: Mapping[str, int], log: Log, directory: Path) -> Measurement:
    """Measure a finished run."""
    reported = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    names = ("batch/staleness/mean", "async/staleness_mean")
    ages = [line[name] for line in reported for name in names if name in line]
    assert log.began_s is not None
    return Measurement(
        step_s=(log.steps[-1].done_s - log.began_s) / workload.steps,
        steps=len(log.steps),
        teaching=[step.teaching for step in log.steps],
        unused=played.rollouts - sum(step.sequences for step in log.steps),
        live=played.most_live,
        prefill=calls["prefill_tokens"],
        staleness=sum(ages) / len(ages) if ages else 0.0,
    )


def rlkit_run(run: Run, directory: Path, *, log: Log | None = None) -> Measurement:
    """Run rlkit's loop."""
    from service import Log, Tinker

    from rlkit.config.loading.load import load_config
    from rlkit.testing import ByteChat, World, run_virtual
    from rlkit.training.trainer import RLTrainer

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
        "rollouts": {"max_concurrent": run.live, "timeout_s": 1e6},
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
    return measure_run(workload, played, world.calls, log, directory)


def cookbook_run(run: Run, directory: Path, *, log: Log | None = None) -> Measurement:
    """Run the peer's loop."""
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
    return measure_run(workload, played, world.calls, log, directory)


def contend(side: str, only: str) -> None:
    """Play one side's runs in this process, and print one line of measurements per run."""
    if side == "ideal":
        for name in ("math", "stragglers", "agent", "small"):
            print(json.dumps([name, asdict(ideal(WORKLOADS[name]))]), flush=True)
        return
    if side == "cookbook":
        import cookbook

        cookbook.prepare()
        print(json.dumps(["version", cookbook.VERSION]), flush=True)
    for run in RLKIT_RUNS if side == "rlkit" else COOKBOOK_RUNS:
        if only not in run.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            play = rlkit_run if side == "rlkit" else cookbook_run
            print(json.dumps([run.name, asdict(play(run, Path(folder) / "run"))]), flush=True)


def start(side: str, only: str, cookbook: Path | None, results: Path) -> subprocess.Popen[bytes]:
    """Play one side's runs in a separate process."""
    paths = [str(cookbook)] if cookbook else []
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--contender", side, "--only", only]
    with (results / f"{side}.jsonl").open("w") as file:
        return subprocess.Popen(command, stdout=file, env=environment)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `is_minimum` says if the ratio must be at least the target, or at most."""

    what: str
    value: float
    peer: float
    ratio: float
    target: float | None
    is_minimum: bool = False

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.what:44}{self.value:>10.1f}{self.peer:>10.1f}{self.ratio:>9.3f}"
        met = self.ratio >= self.target if self.is_minimum else self.ratio <= self.target
        sign = "≥" if self.is_minimum else "≤"
        verdict = "met" if met else "MISSED"
        target = f"{sign} {self.target:g}"
        return f"{self.what:44}{self.value:>10.1f}{self.peer:>10.1f}{self.ratio:>9.3f}{target:>9}  {verdict}"


def rows(
    rlkit_runs: Mapping[str, Measurement], cookbook_runs: Mapping[str, Measurement], best: Mapping[str, Ideal]
) -> list[Row]:
    """Return the comparisons for which there are runs."""

    def against(mine: str, other: str, target: float | None) -> list[Row]:
        if mine not in rlkit_runs or other not in cookbook_runs:
            return []
        a, b = rlkit_runs[mine], cookbook_runs[other]
        what = f"{mine} / cookbook" + ("" if mine == other else f" {other.split(' ', 1)[1]}")
        same_work = b.steps >= a.steps
        return [Row(what, a.step_s, b.step_s, a.step_s / b.step_s, target if same_work else None)]

    table = list[Row]()
    limited = "agent async K=2, 64 live"
    if limited in rlkit_runs:
        a, bound = rlkit_runs[limited], best["agent"].serial / 64
        if (same := cookbook_runs.get("agent async K=0")) is not None:
            table.append(
                Row(
                    "agent, 64 live: cookbook K=0 / rlkit K=2", a.step_s, same.step_s, same.step_s / a.step_s, 1.9, True
                )
            )
        table.append(Row(f"{limited} / bound", a.step_s, bound, a.step_s / bound, 1.12))
        second = rlkit_runs["agent async K=1, 64 live"].step_s
        table.append(Row("agent async K=1, 64 live / bound", second, bound, second / bound, None))
    for run in RLKIT_RUNS:
        if run.workload in ("math", "stragglers", "agent") and run.mode == "async" and run.live == UNLIMITED:
            other = replace(run, strict=False).name
            table += against(run.name, other, None if run.strict else 1.02)
    for name in ("math", "agent", "small"):
        for mode in ("sync", "stream"):
            if (run := f"{name} {mode}") in rlkit_runs:
                a, b = rlkit_runs[run].step_s, best[name].sync if mode == "sync" else best[name].stream
                # groups that finish close together can share a request only in the ideal, which knows the future
                table.append(Row(f"{run} / ideal", a, b, a / b, None if run == "small stream" else 1.01))
                table += against(run, run, None)
    for run, target in (
        ("clock sync", 0.90),
        ("clock stream", 0.85),
        ("clock async K=1", 0.82),
        ("clock 5 sync", None),
        ("clock 5 stream", None),
        ("clock 5 async K=1", None),
    ):
        table += against(run, run, target)
    table += against("small async K=1", "small async K=1", None)
    unused = {
        name: sum(f.unused for run, f in side.items() if "constant" not in run)
        for name, side in (("rlkit", rlkit_runs), ("cookbook", cookbook_runs))
    }
    table.append(Row("unused rollouts, all runs", unused["rlkit"], unused["cookbook"], unused["rlkit"], 0))
    size = WORKLOADS["constant"].group_size
    for run in RLKIT_RUNS:
        if run.workload == "constant" and run.name in rlkit_runs:
            workload = WORKLOADS["constant"]
            exact, peers = (
                sum(count == workload.groups * size for count in side[run.name].teaching) if run.name in side else 0
                for side in (rlkit_runs, cookbook_runs)
            )
            table.append(
                Row(f"{run.name}: full steps out of {workload.steps}", exact, peers, exact / workload.steps, 1, True)
            )
    for run in ("math sync", "small sync"):
        if run in rlkit_runs and run in cookbook_runs:
            a, b = rlkit_runs[run].prefill, cookbook_runs[run].prefill
            size = WORKLOADS[run.split()[0]].group_size
            table.append(Row(f"{run}: prefill, thousands of tokens", a / 1e3, b / 1e3, b / a, size, True))
    return table


def format_columns(measurement: Measurement | None, width: int) -> str:
    """Render the columns of a run."""
    if measurement is None:
        return ""
    counts = f"{measurement.live:>6}{measurement.steps:>6}{measurement.staleness:>6.2f}{measurement.unused:>7}"
    return f"{measurement.step_s:>{width}.1f}{counts}"


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cookbook", type=Path, help="folder of an unpacked tinker-cookbook; by default the installed one"
    )
    parser.add_argument("--only", default="", help="play only runs whose name contains this")
    parser.add_argument("--results", type=Path, help="folder for the measurements of each side")
    parser.add_argument("--report", action="store_true", help="print the measurements in the folder and run nothing")
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
    rlkit_runs = {name: Measurement(**value) for name, value in lines["rlkit"]}
    cookbook_runs = {name: Measurement(**value) for name, value in lines["cookbook"] if name != "version"}
    best = {name: Ideal(**value) for name, value in lines["ideal"]}
    print(f"tinker-cookbook {version}; virtual seconds per step")
    head = f"{'live':>6}{'steps':>6}{'stale':>6}{'unused':>7}"
    print(f"{'run':28}{'rlkit':>8}{head}{'cookbook':>10}{head}")
    for name in dict.fromkeys([*rlkit_runs, *cookbook_runs]):
        print(f"{name:28}{format_columns(rlkit_runs.get(name), 8):35}{format_columns(cookbook_runs.get(name), 10)}")
    print(f"\n{'comparison':44}{'rlkit':>10}{'other':>10}{'ratio':>9}{'target':>9}")
    for row in rows(rlkit_runs, cookbook_runs, best):
        print(row)


if __name__ == "__main__":
    main()
