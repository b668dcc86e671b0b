"""The scores of an evaluation as a table: one row for all tasks of an environment, one for each part of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SCORE = re.compile(r"(?:(?P<part>[^/]+/[^/]+)/)?(?P<score>(?:avg|pass|maj)_at_\d+)")

type Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By part (`""` for all tasks, or `label/value`), by score: its `mean`, `low` and `high`."""


def scores_of(metrics: Mapping[str, float], prefix: str) -> Scores:
    """The scores among an environment's metrics."""
    found = dict[str, dict[str, dict[str, float]]]()
    for key, mean in metrics.items():
        if not key.startswith(f"{prefix}/") or not (match := _SCORE.fullmatch(key.removeprefix(f"{prefix}/"))):
            continue
        if f"{key}/low" in metrics:
            ends = {"mean": mean, "low": metrics[f"{key}/low"], "high": metrics[f"{key}/high"]}
            found.setdefault(match["part"] or "", {})[match["score"]] = ends
    return found


def scores_table(envs: Mapping[str, Scores]) -> list[str]:
    """`math  0.412 [0.38, 0.45]  …` in columns; nothing where there is no score."""
    shown = {env: parts for env, parts in envs.items() if parts}
    if not shown:
        return []
    columns = sorted({score for parts in shown.values() for one in parts.values() for score in one}, key=_place)
    rows = [["", *(score.replace("_at_", "@") for score in columns)]]
    for env, parts in shown.items():
        for part, one in parts.items():
            name = env if not part else "  " + part.replace("/", " ")
            rows.append([name, *(_cell(one.get(score)) for score in columns)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns) + 1)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["with 95 % intervals", *lines]


def _place(score: str) -> tuple[int, int]:
    kind, k = score.split("_at_")
    return ("avg", "pass", "maj").index(kind), int(k)


def _cell(score: Mapping[str, float] | None) -> str:
    return "-" if score is None else f"{score['mean']:.3f} [{score['low']:.2f}, {score['high']:.2f}]"
