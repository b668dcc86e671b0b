"""Draw seconds per step of rlkit and tinker-cookbook, from the table of docs/scale.md that benchmarks/schedule.py gave.

python scripts/plot_step_times.py --out docs/assets/step-times.svg
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from charts import save_chart
from matplotlib.figure import Figure

ROWS = {
    "agents, at most\n64 rollouts at once": (88.8, 178.9),
    "service that begins\nwork every 10 s, sync": (31.7, 39.2),
    "the same, stream": (31.0, 40.5),
    "the same, async": (15.9, 20.4),
    "maths, async,\nmax_staleness 1": (54.3, 54.3),
}


def draw() -> Figure:
    """Return the chart."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for side, (name, colour) in enumerate({"rlkit": "#3b5bdb", "tinker-cookbook 0.6.1": "#adb5bd"}.items()):
        places = [place + 0.38 * (side - 0.5) for place in range(len(ROWS))]
        bars = axes.barh(places, [values[side] for values in ROWS.values()], 0.36, color=colour, label=name)
        axes.bar_label(bars, padding=3)
    axes.set(yticks=range(len(ROWS)), yticklabels=list(ROWS), xlabel="seconds per step, simulated service")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
