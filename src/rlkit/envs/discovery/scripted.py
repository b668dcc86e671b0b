"""Scripted programs, which show the results that the environment gives without a model.

Invariant: scripted programs run like a model's programs, with the same verifier, limits and sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping

_STEPS = "rlkit.envs.discovery.problems"
_HEADS: Mapping[str, str] = {
    "erdos": f"import numpy as np\nfrom {_STEPS}.erdos_steps import descend, mirror, search, upsample\n",
    "autocorrelation_1": f"from {_STEPS}.autocorrelation_steps import search\n",
    "autocorrelation_2": f"from {_STEPS}.autocorrelation_steps import search\n",
    "circle_packing": f"from {_STEPS}.packing_steps import search\n",
}


def _program(construction: str) -> str:
    """Return a program that computes its construction by one expression."""
    return f"\ndef run(seed, budget_s):\n    return {construction}\n"


_ADAM = """
def run(seed, budget_s):
    rng = np.random.default_rng(seed)
    h = mirror(np.clip(0.5 + rng.uniform(-0.4, 0.4, 50), 0, 1))
    return descend(h, iterations=3000, symmetric=True)
"""

PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "erdos": {
        "multistart": _program("search(seed, 0.8 * budget_s, start=48, rungs=())"),
        "adam": _ADAM,
        "linear programs": _program("polish(initial_h_values, 0.8 * budget_s)"),
        "basin hopping": _program("search(seed, 0.8 * budget_s, start=60, rungs=(2, 2, 2))"),
        "upsampling": _program("polish(upsample(initial_h_values, 2), 0.8 * budget_s)"),
    },
    "autocorrelation_1": {
        "multistart": _program("search(seed, 0.8 * budget_s, norms=False)"),
        "linear programs": _program("polish(initial_f_values, 0.8 * budget_s)"),
    },
    "autocorrelation_2": {
        "multistart": _program("search(seed, 0.8 * budget_s, norms=True)"),
        "linear programs": _program("polish(initial_f_values, 0.8 * budget_s)"),
    },
    "circle_packing": {
        "basin hopping": _program("search(seed, 0.8 * budget_s, count=len(initial_circles))"),
        "linear programs": _program("polish(initial_circles, 0.8 * budget_s)"),
    },
}
"""Programs by problem and name; those that call `polish` start from the parent, the others at random."""


def make_reply(name: str, problem: str = "erdos") -> str:
    """Return the reply of a policy that proposes one of the programs."""
    return f"```python\n{_HEADS[problem]}{PROGRAMS[problem][name]}```"
