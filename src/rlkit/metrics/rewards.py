"""The mean reward of a step, from its metrics, and a small chart of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

_BARS = "▁▂▃▄▅▆▇█"
_BARS_MAX = 24


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
