"""The mean reward of a step, from its metrics, and small charts of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

_BARS = "▁▂▃▄▅▆▇█"
_BARS_MAX = 24
_CHART_PX = (240, 40)  # width and height


def mean_reward(metrics: Mapping[str, float | None], prefix: str) -> float | None:
    """Return the mean reward over the environments of a step (`env`) or an evaluation (`eval`)."""
    total = metrics.get(f"{prefix}/all/reward/mean")
    if total is not None:
        return total
    names = [name for name in metrics if name.startswith(f"{prefix}/") and name.endswith("/reward/mean")]
    rewards = [reward for name in names if name.count("/") == 3 and (reward := metrics[name]) is not None]
    return fmean(rewards) if rewards else None


def draw_bars(values: Sequence[float], *, width: int = _BARS_MAX) -> str:
    """Return a chart of blocks, at most `width` wide; each is the mean of its steps."""
    count = min(len(values), width)
    if count <= 0:
        return ""
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / ((high - low) or 1) * (len(_BARS) - 1))] for mean in means)


def draw_line_chart(values: Sequence[float]) -> str:
    """Return an SVG line chart for a notebook, in the colour of the text around it."""
    width, height = _CHART_PX
    low, high = min(values), max(values)
    right, top = (width - 4) / max(len(values) - 1, 1), (height - 4) / ((high - low) or 1)
    points = " ".join(f"{2 + x * right:.1f},{height - 2 - (y - low) * top:.1f}" for x, y in enumerate(values))
    label = f"reward by step, from {values[0]:.2f} to {values[-1]:.2f}"
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"/>'
    return f'<svg role="img" aria-label="{label}" width="{width}" height="{height}">{line}</svg>'
