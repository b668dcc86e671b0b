"""The mean reward of a step, from its metrics, metrics of all environments, and small charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

_ENV_FAMILIES = ("tasks/", "advantage/", "teacher/")  # metrics of each environment alone
_LABEL = re.compile(r"eval/[^/]+/[^/]+/[^/]+/tasks")  # a label's value has its number of tasks, and no copies

_BARS = "▁▂▃▄▅▆▇█"
_BARS_MAX = 24
_CHART_PX = (240, 40)  # width and height


def mean_reward(metrics: Mapping[str, float | None], prefix: str) -> float | None:
    """Return the mean reward over the environments of a step (`env`) or an evaluation (`eval`)."""
    if (total := metrics.get(f"{prefix}/all/reward/mean")) is not None:
        return total
    names = [name for name in metrics if name.startswith(f"{prefix}/") and name.endswith("/reward/mean")]
    rewards = [reward for name in names if name.count("/") == 3 and (reward := metrics[name]) is not None]
    return fmean(rewards) if rewards else None


def drop_copies(metrics: Mapping[str, float], families: Iterable[str]) -> Mapping[str, float]:
    """Leave out `env/all/…` or `eval/all/…` where `restore_copies` gives exactly the same metrics back.

    Args:
        families: `env` if a step has one environment, `eval` if an evaluation has one.
    """
    for family in families:
        own_metrics = {name: value for name, value in metrics.items() if not name.startswith(f"{family}/all/")}
        metrics = own_metrics if {**own_metrics, **_copy_metrics(own_metrics, family)} == metrics else metrics
    return metrics


def restore_copies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add `env/all/…` and `eval/all/…` to metrics of a single environment, unless they are there."""
    return {**metrics, **_copy_metrics(metrics, "env"), **_copy_metrics(metrics, "eval")}


def _copy_metrics(metrics: Mapping[str, float], family: str) -> dict[str, float]:
    """Return the metrics of a family's only environment as `<family>/all/…`; none if there are several or copies."""
    names = [name for name in metrics if name.startswith(f"{family}/")]
    envs = {name.split("/", 2)[1] for name in names}
    if len(envs) != 1 or "all" in envs:
        return {}
    own = f"{family}/{envs.pop()}/"
    labels = (name.removeprefix(own).removesuffix("tasks") for name in names if _LABEL.fullmatch(name))
    without_copies = (*_ENV_FAMILIES, *labels)
    own_metrics = {name.removeprefix(own): metrics[name] for name in names}
    return {f"{family}/all/{name}": value for name, value in own_metrics.items() if not name.startswith(without_copies)}


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
