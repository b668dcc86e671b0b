"""Print the value that a search without a model reaches, against processor seconds on one core.

    python benchmarks/constructions.py circle_packing [--circles 26] [--region square] [--seconds 60] [--seeds 0 1 2]
    python benchmarks/constructions.py autocorrelation_1  # or _2, _3, _3_absolute
    python benchmarks/constructions.py kissing [--size 11]
    python benchmarks/constructions.py no_isosceles [--size 16]

Searches begin at random constructions. Each line is an improvement; the last construction is verified. For Erdős'
problem, use benchmarks/erdos.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

from rlkit.envs.discovery import make_problem
from rlkit.envs.discovery.problem import Construction, Problem
from rlkit.envs.discovery.problems import autocorrelation_steps, packing_steps, subset_steps
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.problems.subsets import Kissing, NoIsosceles

AUTOCORRELATIONS: dict[str, autocorrelation_steps.Objective] = {
    "autocorrelation_1": "first",
    "autocorrelation_2": "second",
    "autocorrelation_3": "third",
    "autocorrelation_3_absolute": "third_absolute",
}
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
    parser.add_argument("problem", choices=["circle_packing", *AUTOCORRELATIONS, "kissing", "no_isosceles"])
    parser.add_argument("--circles", type=int, default=26)
    parser.add_argument("--region", choices=["square", "rectangle", "circle"], default="square")
    parser.add_argument("--size", type=int, help="dimension of the vectors, or side of the grid")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("set OMP_NUM_THREADS=1: otherwise the seconds are not those of one core")
    dimension, side = options.size or 11, options.size or 16
    chosen: dict[str, tuple[Problem, Callable[..., Construction]]] = {
        "circle_packing": (
            CirclePacking(options.circles, options.region),
            partial(packing_steps.search, count=options.circles, region=options.region),
        ),
        "kissing": (Kissing(dimension), partial(subset_steps.search_kissing, dimension=dimension)),
        "no_isosceles": (NoIsosceles(side), partial(subset_steps.search_isosceles, size=side)),
        **{
            name: (make_problem(name, {}), partial(autocorrelation_steps.search, objective=objective))
            for name, objective in AUTOCORRELATIONS.items()
        },
    }
    for seed in options.seeds:
        searched(*chosen[options.problem], seed=seed, seconds=options.seconds)
