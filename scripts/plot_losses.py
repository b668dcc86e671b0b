"""Draw by how much each loss pushes the log-probability of a token, against the ratio p/q.

python scripts/plot_losses.py --out docs/assets/losses.svg
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from charts import save_chart
from matplotlib.figure import Figure

from rlkit.conformance.objectives import OBJECTIVES

STYLES = {
    "importance_sampling": ("#3b5bdb", "-"),
    "ppo": ("#e8590c", "-"),
    "cispo": ("#2b8a3e", "--"),
    "dro": ("#862e9c", "-"),
}
RATIOS = np.exp(np.linspace(np.log(0.1), np.log(8), 800))


def draw() -> Figure:
    """Return the chart."""
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained", sharex=True)
    logs = np.log(RATIOS)
    for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
        for name, (colour, style) in STYLES.items():
            ones = np.full_like(logs, advantage)
            push = -OBJECTIVES[name].coefficient(logs, np.zeros_like(logs), ones)
            axes.plot(RATIOS, push, style, color=colour, label=name, linewidth=1.8)
        axes.set(xscale="log", xlabel="ratio p/q", title=f"advantage {advantage:+g}", xticks=[0.1, 1, 8])
        axes.set_xticklabels(["0.1", "1", "8"])
        axes.axvline(1, color="#868e96", linewidth=0.8)
        axes.axhline(0, color="#868e96", linewidth=0.8)
    panels[0].set(ylabel="push on log p", ylim=(-0.3, 6))
    panels[1].set(ylim=(-6, 0.3))
    panels[0].legend(frameon=False, loc="upper left")
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
