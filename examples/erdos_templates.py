"""Programs from templates, for examples/erdos_templates.yaml: each token of a reply chooses a part of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

import rlkit
from rlkit.envs.discovery import discovery
from rlkit.envs.discovery.source import Discovery
from rlkit.envs.discovery.task import ConstructionProblem

PROGRAM = """import numpy as np
from rlkit.envs.discovery.problems.erdos_interior import interior_point
from rlkit.envs.discovery.problems.erdos_steps import balance, polish

def run(seed, budget_s):
    rng, h, steps = np.random.default_rng(), initial_h_values.copy(), {steps}
    width = max(2, int({width} * len(h)))
    first = rng.integers(len(h) - width + 1)
    part, other = h[first : first + width], h[::-1][first : first + width].copy()
    {change}
    h = {pieces}
    return {descent}
"""
CHANGES = (
    *("pass", "part += rng.normal(0, 0.1, width)", "part += rng.normal(0, 0.01, width)", "part[:] = 0.5", "part += 1"),
    *("part[:] = rng.uniform(0, 1, width)", "part[:] = np.roll(part, 1)", "part[:] = part[::-1].copy()"),
    *("part[:] = other", "part[:] = (part + other) / 2", "h = h[::-1]", "h = 1 - h"),
)
DESCENTS = (
    *("h", "np.clip(h, 0, 1)", "balance(h)", "polish(h, 0.01)"),
    "interior_point(balance(h), barrier=10, steps=steps)",
    "interior_point(balance(h), barrier=1e-1, steps=steps)",
    "interior_point(balance(h), barrier=1e-3, steps=steps)",
    "interior_point(balance(h), barrier=1e-6, steps=steps)",
)
CHOICES = {
    "change": CHANGES,
    "width": (0.03, 0.1, 0.3, 1),
    "pieces": ("h", "h.repeat(2)", "(h + h[::-1]) / 2", "h[::2]"),
    "descent": DESCENTS,
    "steps": (3, 10, 30, 100),
}


def write_program(tokens: Sequence[int]) -> str:
    """Return the program that the tokens choose, each by its number modulo the choices; a missing token is 0."""
    numbers = chain(tokens, repeat(0))
    return PROGRAM.format(**{part: options[next(numbers) % len(options)] for part, options in CHOICES.items()})


class ChosenProgram(ConstructionProblem):
    """A state to improve by the choice of a program."""

    def prompt(self) -> list[rlkit.Message]:
        """Return the number of pieces and the value of the state."""
        return [{"role": "user", "content": f"{len(self.parent.construction)} {self.parent.value:.4f}"}]

    async def grade(self, reply: rlkit.Reply) -> rlkit.Outcome:
        """Grade the chosen program as if the model had written it; without an improvement, the reward is 0."""
        program = write_program(reply.turn.completion.tolist())
        outcome = await super().grade(replace(reply, text=f"```python\n{program}```"))
        return outcome if outcome.metrics["improved"] else replace(outcome, reward=0.0)


class Templates(Discovery):
    """Search whose tasks ask for choices."""

    def next(self) -> ChosenProgram:
        return ChosenProgram(**vars(super().next()))


def templates(*, seed: int = 0) -> Templates:
    """Return the search of a seed."""
    search = discovery(options={"max_points": 400}, program_timeout_s=5, seed=seed)
    return Templates(search.archive, search.play)
