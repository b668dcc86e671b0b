"""Print Erdős' C₅ that a search without a model reaches, against processor seconds.

    python benchmarks/erdos.py [--seconds 1800] [--seeds 0 1]      from random constructions, one process for each seed
    python benchmarks/erdos.py --from erdos_ttt_discover_2026      a local search from a published construction
    python benchmarks/erdos.py --from FILE.json --seeds 0 1        basin hopping from it, one process for each seed
    python benchmarks/erdos.py --processes 2 [--ray]               one search in two processes, here or on a Ray cluster

Each line is an improvement. The best construction is verified, and certified in exact arithmetic. `--save` writes each
that is better than the file's, so that a search that is stopped loses nothing, and `--from` continues from it.
With as many processes as processors, processor seconds are about the seconds of a clock.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlkit._util import files
from rlkit.envs.discovery.problem import load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.erdos_interior import interior_point
from rlkit.envs.discovery.problems.erdos_steps import Heights, balance, c5, linear_programs, polish, search

MARKS_S = (10, 60, 120, 300, 600, 1200, 1800, 3600)


def proven(h: Heights) -> str:
    verified = Erdos().verify(h)
    return Erdos().certificate(verified.construction).claim


def save_better(path: Path | None, h: Heights) -> None:
    if path and (not path.exists() or c5(h) < c5(np.array(json.loads(path.read_text())["values"]))):
        files.write_text(path, json.dumps({"values": h.tolist()}))


def report_improvement(cpu_s: float, h: Heights, *, search: str = "", save: Path | None) -> None:
    print(f"{search or f'process {os.getpid()}'} {cpu_s:7.1f} s  n = {len(h):4}  C5 = {c5(h):.10f}", flush=True)
    save_better(save, h)


def open_processes(count: int, *, ray: bool) -> AbstractContextManager[Any]:
    if not ray:
        return ProcessPoolExecutor(count)
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # or Ray starts uv in a copy of the folder
    from ray.util.multiprocessing import Pool

    return Pool(count)  # of the cluster at RAY_ADDRESS, or of one that Ray starts here


def run_search(seed: int, seconds: float, start: Heights | None, save: Path | None) -> Heights:
    reached = list[tuple[float, float]]()

    def report(cpu_s: float, h: Heights) -> None:
        reached.append((cpu_s, c5(h)))
        report_improvement(cpu_s, h, search=f"seed {seed}", save=save)

    best = search(seed, seconds, starts=[] if start is None else [start], on_best=report)
    for mark in (mark_s for mark_s in MARKS_S if mark_s <= seconds):
        value = min((value for cpu_s, value in reached if cpu_s <= mark), default=1.0)
        print(f"seed {seed}: after {mark:4} s C5 = {value:.8f}")
    print(f"seed {seed}: {proven(best)}", flush=True)
    return best


def time_steps(h: Heights, *, symmetric: bool) -> None:
    h = balance((h + h[::-1]) / 2) if symmetric else h
    for name, descend in (
        ("linear program", partial(linear_programs, h, symmetric=symmetric, radius=1e-3)),
        ("interior-point step", partial(interior_point, h, centre=0 if symmetric else None)),
    ):
        times_s = list[float]()

        def clock(times_s: list[float] = times_s) -> float:
            times_s.append(time.process_time())
            return times_s[-1]

        descend(end_s=time.process_time() + 5, clock=clock)
        steps_s = np.diff(times_s)
        kind = "symmetric" if symmetric else "any"
        print(f"{name}, {kind} heights: median {np.median(steps_s):.3f} s, at most {steps_s.max():.3f} s", flush=True)


def compare_local_searches(h: Heights, seconds: float) -> None:
    print(f"{len(h)} pieces: {proven(h)}", flush=True)
    for symmetric in (False, True):
        time_steps(h, symmetric=symmetric)
    for name, descend in (
        ("linear programs", lambda end_s: linear_programs(h, end_s=end_s, symmetric=False, radius=1e-3)),
        ("interior points, then linear programs", lambda end_s: polish(h, end_s - time.process_time())),
    ):
        began_s = time.process_time()
        better = descend(began_s + seconds)
        print(f"after {time.process_time() - began_s:.0f} s of {name}: {proven(better)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--processes", type=int, help="processes of one search with the first seed")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--from", dest="start")
    parser.add_argument("--times", type=int, default=1, help="number of pieces that each piece is divided into first")
    parser.add_argument("--save", type=Path, help="JSON file for the best construction")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("set OMP_NUM_THREADS=1: otherwise the seconds are not those of one core")
    origin = options.start and np.repeat(Erdos().verify(load_published(options.start)).construction, options.times)
    seeds, starts = options.seeds or [0, 1], [] if origin is None else [origin]
    if options.start and not options.seeds and not options.processes:
        compare_local_searches(origin, options.seconds)
    else:
        with open_processes(options.processes or len(seeds), ray=options.ray) as pool:
            if options.processes:
                count = options.processes
                report = partial(report_improvement, save=options.save)
                found = search(seeds[0], options.seconds, starts=starts, on_best=report, processes=count, run=pool.map)
            else:
                found = min(
                    pool.map(partial(run_search, seconds=options.seconds, start=origin, save=options.save), seeds),
                    key=c5,
                )
        print(f"best: {proven(found)}")
        save_better(options.save, found)
