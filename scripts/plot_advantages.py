"""Draw the advantage of a success and of a failure, by estimator, in groups with more and more successes.

python scripts/plot_advantages.py --out docs/assets/advantages.svg
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from charts import save_chart
from matplotlib.figure import Figure

from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.types import Episode, Group

COLOURS = {
    "group_mean": "#3b5bdb",
    "grpo": "#e8590c",
    "maxrl": "#2b8a3e",
    "pkpo": "#862e9c",
    "entropic_adaptive": "#c2255c",
}
SIZE = 8


def advantages(name: str, successes: int) -> tuple[float, float]:
    """Return the advantages of a success and of a failure in a group of `SIZE` episodes."""
    rewards = [1.0] * successes + [0.0] * (SIZE - successes)
    episodes = [Episode(member, 0, (), "completed", reward, {}, {}, 1.0) for member, reward in enumerate(rewards)]
    values = np.asarray(ESTIMATORS[name]().advantages(Group("env", "task", 0, tuple(episodes))))
    return float(values[0]), float(values[-1])


def draw() -> Figure:
    """Return the chart."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    counts = range(1, SIZE)
    for name, colour in COLOURS.items():
        success, failure = zip(*(advantages(name, count) for count in counts), strict=True)
        axes.plot(counts, success, "-o", color=colour, markersize=4, label=name)
        axes.plot(counts, failure, "--o", color=colour, markersize=4, fillstyle="none")
    axes.axhline(0, color="#868e96", linewidth=0.8)
    axes.set(xlabel=f"successes in a group of {SIZE}", ylabel="advantage")
    axes.legend(frameon=False, title="solid: a success, dashed: a failure")
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
