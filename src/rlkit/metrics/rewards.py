"""The mean reward of a step, from its metrics, metrics of all environments, and small charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

_ALL = "env/all/"
_ENV_FAMILIES = ("tasks/", "advantage/", "teacher/")  # metrics of each environment alone

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


def drop_copies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the metrics `env/all/…` that repeat those of a step's only environment; `restore_copies` adds them."""
    env = _find_only_env(metrics)
    return {
        name: value
        for name, value in metrics.items()
        if env is None or not name.startswith(_ALL) or name.replace("all", env, 1) not in metrics
    }


def restore_copies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the metrics `env/all/…` to those of a step's only environment, unless they are there."""
    if (env := _find_only_env(metrics)) is None or any(name.startswith(_ALL) for name in metrics):
        return dict(metrics)
    values = {name.removeprefix(f"env/{env}/"): value for name, value in metrics.items() if name.startswith("env/")}
    return {
        **metrics,
        **{f"{_ALL}{name}": value for name, value in values.items() if not name.startswith(_ENV_FAMILIES)},
    }


def _find_only_env(metrics: Mapping[str, float]) -> str | None:
    envs = {name.split("/", 2)[1] for name in metrics if name.startswith("env/")} - {"all"}
    return envs.pop() if len(envs) == 1 else None


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
