"""The metrics of a run by step: `metrics.jsonl`.

Invariant: a line is the metrics of one step, such as `{"step": 3, "loss": 0.5}`; a number that is not finite is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rlkit._util.files import json_lines
from rlkit.errors import UsageError


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append the metrics of a step."""
    values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    json_lines.append(path, {"step": step, **values})


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the steps of a metrics.jsonl and their finite metrics."""
    rows = list[tuple[int, dict[str, float]]]()
    for metrics in json_lines.read_lines(path):
        if not isinstance(step := metrics.pop("step", None), int):
            raise UsageError(f"{path} is damaged: a line has no step")
        rows.append((step, {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}))
    return rows
