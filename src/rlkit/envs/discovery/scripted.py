"""Programs that nobody had to think of: what a search reaches without a model, through the same environment.

Invariant: they are played like any model's programs, with the same verifier, limits and sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = (
    "import numpy as np\nfrom rlkit.envs.discovery.steps import descend, ladder, linear_programs, mirrored, upsample\n"
)

PROGRAMS: Mapping[str, str] = {
    "multistart": """
def run(seed, budget_s):
    return ladder(seed, 0.8 * budget_s, start=48, rungs=())
""",
    "adam": """
def run(seed, budget_s):
    rng = np.random.default_rng(seed)
    h = mirrored(np.clip(0.5 + rng.uniform(-0.4, 0.4, 50), 0, 1))
    return descend(h, iterations=3000, symmetric=True)
""",
    "linear programs": """
def run(seed, budget_s):
    return polish(initial_h_values, 0.8 * budget_s)
""",
    "basin hopping": """
def run(seed, budget_s):
    return ladder(seed, 0.8 * budget_s, start=60, rungs=(2, 2, 2))
""",
    "upsampling": """
def run(seed, budget_s):
    return polish(upsample(initial_h_values, 2), 0.8 * budget_s)
""",
}
"""For `erdos`: from random beginnings, but for `linear programs` and `upsampling`, which start from the parent."""


def reply(name: str) -> str:
    """What a policy says that proposes one of the programs."""
    return f"```python\n{_HEAD}{PROGRAMS[name]}```"
