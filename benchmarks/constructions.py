"""Print the value that a search without a model reaches, against processor seconds on one core.

    python benchmarks/constructions.py circle_packing [--circles 26] [--seconds 60] [--seeds 0 1 2]
    python benchmarks/constructions.py autocorrelation_1
    python benchmarks/constructions.py autocorrelation_2

Searches begin at random constructions. Each line is an improvement; the last construction is verified. For Erdős'
problem, use benchmarks/erdos.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

from rlkit.envs.discovery.problem import Construction, Problem
from rlkit.envs.discovery.problems import autocorrelation_steps, packing_steps
from rlkit.envs.discovery.problems.autocorrelation import FirstAutocorrelation, SecondAutocorrelation
from rlkit.envs.discovery.problems.packing import CirclePacking

MARKS_S = (1, 3, 10, 30, 60, 120)


def searched(problem: Problem, search: Callable[..., Construction], *, seed: int, seconds: float) -> None:
    reached = list[tuple[float, float]]()

    def report(cpu_s: float, construction: Construction) -> None:
        reached.append((cpu_s, problem.verify(construction).value))
        print(f"{problem.name} seed {seed} {cpu_s:7.1f} s  {problem.symbol} = {reached[-1][1]:.9f}", flush=True)

    best = search(seed, seconds, on_best=report)
    for mark in (mark_s for mark_s in MARKS_S if mark_s <= seconds):
        values = [value for cpu_s, value in reached if cpu_s <= mark]
        if values:
            print(f"{problem.name} seed {seed}: after {mark:4} s {values[-1]:.7f}")
    print(f"{problem.name} seed {seed}: verified {problem.verify(best).value:.12f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("problem", choices=["circle_packing", "autocorrelation_1", "autocorrelation_2"])
    parser.add_argument("--circles", type=int, default=26)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("set OMP_NUM_THREADS=1: otherwise the seconds are not those of one core")
    chosen: dict[str, tuple[Problem, Callable[..., Construction]]] = {
        "circle_packing": (CirclePacking(options.circles), partial(packing_steps.search, count=options.circles)),
        "autocorrelation_1": (FirstAutocorrelation(), partial(autocorrelation_steps.search, norms=False)),
        "autocorrelation_2": (SecondAutocorrelation(), partial(autocorrelation_steps.search, norms=True)),
    }
    for seed in options.seeds:
        searched(*chosen[options.problem], seed=seed, seconds=options.seconds)
