"""Draw the progress of three runs whose grader uses a processor for a while: with no, one and two workers.

    python scripts/plot_workers.py --out docs/assets/workers.svg

The runs train a model of 135 million parameters on the embedded engine. It needs two idle processors.
"""

from __future__ import annotations

import json
import os
import tempfile
from itertools import accumulate

import matplotlib.pyplot as plt
from charts import save_chart
from matplotlib.figure import Figure

import rlkit

STEPS = 5
ADDITIONS = 25_000_000
"""Work of the grader: 0.3 s on the machine of the documentation."""

RUNS = {0: "#adb5bd", 1: "#748ffc", 2: "#3b5bdb"}  # colours by the number of workers


class SlowSum(rlkit.Env):
    """A sum whose grader uses a processor, as a simulation or a proof checker does."""

    def __init__(self, left: int, right: int) -> None:
        self.left, self.right = left, right

    async def rollout(self, policy: rlkit.Policy) -> float:
        """Ask for the sum, and return 1 for a right answer."""
        reply = await policy.chat([{"role": "user", "content": f"{self.left} + {self.right} ="}])
        sum(range(ADDITIONS))
        return float(str(self.left + self.right) in reply.text)


def measure_ends(workers: int) -> list[float]:
    """Return the ends of the steps of a run, in seconds after the start of its second step."""
    result = rlkit.train(
        envs=[SlowSum(left, right) for left in range(4) for right in range(4)],
        name=f"workers-{workers}",
        steps=STEPS + 1,
        batch={"groups": 8, "group_size": 8},
        sampling={"max_tokens": 8},
        rollouts={"workers": workers, "max_concurrent": 64},
    )
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    # Kernels are compiled and workers are started in the first step.
    return list(accumulate(line["time/step_s"] for line in lines if line["step"] > 1))


def draw() -> Figure:
    """Return the chart."""
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLKIT_RUNS_DIR"] = folder
        for workers, colour in RUNS.items():
            ends_s = [0.0, *measure_ends(workers)]
            label = f"workers: {workers}, {ends_s[-1] / STEPS:.0f} s a step"
            axes.plot(ends_s, range(len(ends_s)), color=colour, marker="o", label=label)
    axes.set(xlabel="seconds", ylabel="steps", yticks=range(STEPS + 1), xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, loc="upper left")
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
