"""The result of an evaluation as a table and as JSON: rewards, scores, and how episodes ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rlkit.evaluation.task_scores import TaskScore, count_endings, score_tasks
from rlkit.types import Group, Json

type Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By part (`""` for all tasks, or `label/value`), by score: its `mean`, `low` and `high`."""

_SCORE = re.compile(r"(?:(?P<part>[^/]+/[^/]+)/)?(?P<score>(?:avg|pass|maj)_at_\d+)")

_LONG = 1e6
"""From here on numbers are shown by their power of ten."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """How a model did in an evaluation.

    Args:
        rows: by environment, the row of `summary`.
        scores: by environment, with 95 % intervals.
        tasks: the score of each task.
        metrics: all that `rlkit.evaluate` returned.
    """

    rows: Mapping[str, Mapping[str, float]]
    scores: Mapping[str, Scores]
    tasks: Sequence[TaskScore]
    metrics: Mapping[str, float]

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], groups: Sequence[Group], *, envs: Sequence[str]) -> Self:
        """Make a report of the metrics that `rlkit.evaluate` returned and the groups that it gave to `scored`."""
        rows = {name: summarize_env(metrics, f"eval/{name}") for name in envs}
        scores = {name: read_scores(metrics, f"eval/{name}") for name in envs}
        return cls(rows, scores, score_tasks(groups), metrics)

    @property
    def is_measured(self) -> bool:
        """True if each environment has an episode that did not fail."""
        return all("reward" in row for row in self.rows.values())

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON."""
        envs: dict[str, Json] = {
            name: {**row, "ended": self._ended(name), "scores": self.scores[name]} for name, row in self.rows.items()
        }
        return {"envs": envs, "tasks": [score.to_json() for score in self.tasks], "metrics": self.metrics}

    def render(self, *, tasks: bool = False) -> str:
        """Return tables of rewards and scores, and with `tasks` one of all tasks."""
        ended = [f"{name}: {_counts(counts)}" for name in self.rows if (counts := self._ended(name))]
        parts = [
            [render_rewards(self.rows)],
            render_scores(self.scores),
            ended,
            render_task_scores(self.tasks) if tasks else [],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _ended(self, env: str) -> dict[str, int]:
        return count_endings([score for score in self.tasks if score.env == env])


def summarize_env(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return `episodes`, how many of them `failed`, the mean `reward` of the others, and its `stderr`.

    The mean is left out where every episode failed, its error where fewer than two tasks have one.
    """
    row = {name: metrics.get(f"{prefix}/{name}", 0.0) for name in ("episodes", "failed")}
    known = {"reward": metrics.get(f"{prefix}/reward/mean"), "stderr": metrics.get(f"{prefix}/reward/stderr")}
    return row | {name: value for name, value in known.items() if value is not None}


def read_scores(metrics: Mapping[str, float], prefix: str) -> Scores:
    """Return the scores among an environment's metrics."""
    scores = dict[str, dict[str, dict[str, float]]]()
    for key, mean in metrics.items():
        if not key.startswith(f"{prefix}/") or not (match := _SCORE.fullmatch(key.removeprefix(f"{prefix}/"))):
            continue
        if f"{key}/low" in metrics:
            ends = {"mean": mean, "low": metrics[f"{key}/low"], "high": metrics[f"{key}/high"]}
            scores.setdefault(match["part"] or "", {})[match["score"]] = ends
    return scores


def render_rewards(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return `name  0.830 ± 0.021  100 episodes`, in columns."""
    width = max(len(name) for name in [*rows, "env"])
    lines = [f"{'env':{width}}  {'reward':^15}  episodes  failed"]
    for name, row in rows.items():
        mean = _number(row["reward"]) if "reward" in row else "-"
        error = f" ± {_number(row['stderr'])}" if "stderr" in row else ""
        lines.append(f"{name:{width}}  {mean + error:^15}  {row['episodes']:8.0f}  {row['failed']:6.0f}")
    return "\n".join(lines)


def render_scores(envs: Mapping[str, Scores]) -> list[str]:
    """Return `math  0.412 [0.38, 0.45]  …` in columns; nothing where there is no score."""
    shown = {env: parts for env, parts in envs.items() if parts}
    if not shown:
        return []
    columns = sorted({score for parts in shown.values() for scores in parts.values() for score in scores}, key=_place)
    rows = [["", *(score.replace("_at_", "@") for score in columns)]]
    for env, parts in shown.items():
        for part, scores in parts.items():
            name = env if not part else "  " + part.replace("/", " ")
            rows.append([name, *(_cell(scores.get(score)) for score in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["with 95 % intervals", *lines]


def render_task_scores(scores: Sequence[TaskScore]) -> list[str]:
    """Return `task  1/4  0.250  solved 1, timeout 3`, a line a task."""
    width = max((len(score.task) for score in scores), default=0)
    lines = list[str]()
    for score in scores:
        reward = "-" if score.reward is None else f"{score.reward:.3f}"
        ended = _counts(count_endings([score]))
        lines.append(f"{score.task:{width}}  {score.solved:3}/{score.attempts:<3}  {reward:>6}  {ended}")
    return lines


def _counts(ended: Mapping[str, int]) -> str:
    return ", ".join(f"{how} {count}" for how, count in ended.items())


def _number(value: float) -> str:
    """Return `0.830`, or `1.2e+09` where so many digits would be no table."""
    return f"{value:.3f}" if abs(value) < _LONG else f"{value:.2g}"


def _place(score: str) -> tuple[int, int]:
    kind, k = score.split("_at_")
    return ("avg", "pass", "maj").index(kind), int(k)


def _cell(score: Mapping[str, float] | None) -> str:
    return "-" if score is None else f"{score['mean']:.3f} [{score['low']:.2f}, {score['high']:.2f}]"
