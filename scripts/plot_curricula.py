"""Draw how often the curricula draw a task, by its solve rate.

python scripts/plot_curricula.py --out docs/assets/curricula.svg
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from charts import save_chart
from matplotlib.figure import Figure

from rlkit.config.schema.envs import FilterCurriculum, TargetCurriculum
from rlkit.envs.arithmetic import arithmetic
from rlkit.tasks.curriculum import TargetSource

RATES = np.linspace(0, 1, 401)


def target_draws(sharpness: float) -> np.ndarray:
    """Return how much more often than the average `target` draws a task of each solve rate."""
    settings = TargetCurriculum(name="target", sharpness=sharpness)
    source = TargetSource(arithmetic(max_operand=99, count=len(RATES)), settings, seed=0)
    source.rates[:], source.groups[:] = RATES, 1
    return source.probabilities() * len(RATES)


def filter_draws() -> np.ndarray:
    """Return the same for `filter`: tasks outside of the bounds are only rechecked."""
    settings = FilterCurriculum(name="filter")
    is_kept = (settings.min_solve_rate <= RATES) & (settings.max_solve_rate >= RATES)
    weights = np.where(is_kept, 1.0, 1 / settings.recheck_epochs)
    return weights / weights.mean()


def draw() -> Figure:
    """Return the chart."""
    figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    axes.plot(RATES, np.ones_like(RATES), color="#868e96", label="no curriculum")
    axes.plot(RATES, filter_draws(), color="#3b5bdb", label="filter")
    axes.plot(RATES, target_draws(2), color="#e8590c", label="target")
    axes.plot(RATES, target_draws(8), "--", color="#e8590c", label="target, sharpness 8")
    axes.set(xlabel="solve rate of a task", ylabel="draws, relative to the mean", xlim=(0, 1), ylim=(0, None))
    axes.legend(frameon=False, fontsize=10)
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
