"""Scripted programs, which show the results that the environment gives without a model.

Invariant: scripted programs run like a model's programs, with the same verifier, limits and sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping


def _program(module: str, construction: str) -> str:
    """Return a program that computes its construction by one expression, with the functions of a local search."""
    return f"""from rlkit.envs.discovery.problems.{module} import *
from numpy.random import default_rng

def run(seed, budget_s):
    return {construction}
"""


PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "erdos": {
        "multistart": _program("erdos_steps", "search(seed, 0.8 * budget_s, pieces=48)"),
        "interior points": _program(
            "erdos_interior", "interior_point(default_rng(seed).uniform(0.1, 0.9, 50), centre=0, barrier=1e-3)"
        ),
        "linear programs": _program("erdos_steps", "polish(initial_h_values, 0.8 * budget_s)"),
        "basin hopping": _program("erdos_steps", "search(seed, 0.8 * budget_s)"),
        "upsampling": _program(
            "erdos_steps", "polish(initial_h_values.repeat(1 + (len(initial_h_values) <= 500)), 0.8 * budget_s)"
        ),
    },
    **{
        f"autocorrelation_{suffix}": {
            "multistart": _program("autocorrelation_steps", f"search(seed, 0.8 * budget_s, objective={objective!r})"),
            "linear programs": _program("autocorrelation_steps", "polish(initial_f_values, 0.8 * budget_s)"),
        }
        for suffix, objective in {"1": "first", "2": "second", "3": "third", "3_absolute": "third_absolute"}.items()
    },
    "circle_packing": {
        "basin hopping": _program("packing_steps", "search(seed, 0.8 * budget_s, count=len(initial_circles))"),
        "linear programs": _program("packing_steps", "polish(initial_circles, 0.8 * budget_s)"),
    },
    "kissing": {
        "signed patterns": _program(
            "subset_steps", "search_kissing(seed, 0.8 * budget_s, dimension=initial_vectors.shape[1])"
        ),
        "tabu search": _program("subset_steps", "polish(initial_vectors, 0.8 * budget_s)"),
    },
    "no_isosceles": {
        "multistart": _program(
            "subset_steps", "search_isosceles(seed, 0.8 * budget_s, size=int(initial_cells.max()) + 1)"
        ),
        "tabu search": _program("subset_steps", "polish(initial_cells, 0.8 * budget_s)"),
    },
}
"""Programs by problem and name; those that call `polish` start from the parent, the others at random."""


def make_reply(name: str, problem: str = "erdos") -> str:
    """Return the reply of a policy that proposes one of the programs."""
    return f"```python\n{PROGRAMS[problem][name]}```"


class CallCounter:
    """Clock that counts its calls."""

    calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.calls
