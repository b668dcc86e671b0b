"""Print Erdős' C₅ that a search without a model reaches, against processor seconds on one core.

    python benchmarks/erdos.py [--seconds 400] [--seeds 0 1 3]     from random constructions
    python benchmarks/erdos.py --from erdos_ttt_discover_2026      a local search from a published construction

Each line is an improvement. The last construction of a search is verified, and certified in exact arithmetic.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from rlkit.envs.discovery.problem import load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.erdos_steps import Heights, c5, linear_programs, search

MARKS_S = (10, 60, 120, 180, 240, 300, 400)


def proven(h: Heights) -> str:
    verified = Erdos().verify(h)
    return Erdos().certificate(verified.construction).claim


def from_scratch(seed: int, seconds: float) -> None:
    reached = list[tuple[float, float, int]]()

    def report(cpu_s: float, h: Heights) -> None:
        reached.append((cpu_s, c5(h), len(h)))
        print(f"seed {seed} {cpu_s:7.1f} s  n = {len(h):4}  C5 = {c5(h):.9f}", flush=True)

    best = search(seed, seconds, on_best=report)
    for mark in (mark_s for mark_s in MARKS_S if mark_s <= seconds):
        value = min((value for cpu_s, value, _ in reached if cpu_s <= mark), default=1.0)
        print(f"seed {seed}: after {mark:4} s C5 = {value:.7f}")
    print(f"seed {seed}: {proven(best)}", flush=True)


def from_published(name: str, seconds: float, times: int) -> None:
    h = np.repeat(Erdos().verify(load_published(name)).construction, times)
    print(f"{name}, {len(h)} pieces: {proven(h)}", flush=True)
    began = time.process_time()
    better = linear_programs(h, end_s=began + seconds, symmetric=False, radius=1e-3)
    print(f"after {time.process_time() - began:.0f} s of linear programs: {proven(better)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--from", dest="start")
    parser.add_argument("--times", type=int, default=1, help="number of pieces that each piece is divided into first")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("set OMP_NUM_THREADS=1: otherwise the seconds are not those of one core")
    if options.start:
        from_published(options.start, options.seconds, options.times)
    else:
        for seed in options.seeds:
            from_scratch(seed, options.seconds)
