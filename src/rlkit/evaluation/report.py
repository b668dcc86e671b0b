"""Report of an evaluation as tables and as JSON: rewards, scores, and how episodes ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rlkit.evaluation.scores import compute_scores, split_by_label
from rlkit.evaluation.task_scores import TaskScore, count_endings, score_tasks
from rlkit.metrics.intervals import Score
from rlkit.types import Group, Json

type Scores = Mapping[str, Mapping[str, Score]]
"""Scores by group of tasks: `""` for all tasks, or `label/value`."""

_EXPONENT_MIN = 1e6  # smallest number that is rendered with an exponent


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of an evaluation."""

    rows: Mapping[str, Mapping[str, float]]  # result of `summarize_env` for each environment
    scores: Mapping[str, Scores]  # scores with 95 % intervals for each environment
    tasks: Sequence[TaskScore]
    metrics: Mapping[str, float]  # all metrics that `rlkit.evaluate` returned
    env_metrics: Mapping[str, Mapping[str, float]]  # means of the metrics that each environment's outcomes have

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], groups: Sequence[Group], *, envs: Sequence[str]) -> Self:
        """Create a report from the metrics and groups of an evaluation."""
        rows = {name: summarize_env(metrics, f"eval/{name}") for name in envs}
        scores = {name: score_parts([group for group in groups if group.env == name]) for name in envs}
        return cls(rows, scores, score_tasks(groups), metrics, read_env_metrics(metrics, groups))

    @property
    def is_measured(self) -> bool:
        """True if at least one episode of each environment has a reward."""
        return all("reward" in row for row in self.rows.values())

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON."""
        envs = dict[str, Json]()
        for name, row in self.rows.items():
            parts = self.scores[name].items()
            scores = {part: {score: asdict(value) for score, value in scores.items()} for part, scores in parts}
            envs[name] = {**row, "endings": self._count_endings(name), "scores": scores}
        return {"envs": envs, "tasks": [asdict(score) for score in self.tasks], "metrics": self.metrics}

    def render(self, *, tasks: bool = False) -> str:
        """Render tables of rewards and scores; with `tasks`, also a table of all tasks."""
        endings = [f"{name}: {_render_counts(counts)}" for name in self.rows if (counts := self._count_endings(name))]
        parts = [
            [render_rewards(self.rows)],
            render_scores(self.scores),
            endings,
            [f"{name}: {_render_means(means)}" for name, means in self.env_metrics.items()],
            render_task_scores(self.tasks) if tasks else [],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _count_endings(self, env: str) -> dict[str, int]:
        return count_endings([score for score in self.tasks if score.env == env])


def summarize_env(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counts `episodes` and `failed`, the mean `reward`, and its standard error `stderr`.

    `reward` is missing if every episode failed. `stderr` is missing if fewer than two tasks have a reward.
    """
    row = {name: metrics.get(f"{prefix}/{name}", 0.0) for name in ("episodes", "failed")}
    reward = {"reward": metrics.get(f"{prefix}/reward/mean"), "stderr": metrics.get(f"{prefix}/reward/stderr")}
    return row | {name: value for name, value in reward.items() if value is not None}


def read_env_metrics(metrics: Mapping[str, float], groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return the means of the metrics of outcomes, for each environment that has any."""
    names = dict[str, set[str]]()
    for group in groups:
        names.setdefault(group.env, set()).update(*(episode.metrics for episode in group.episodes))
    means = {
        env: {name: metrics[key] for name in sorted(found) if (key := f"eval/{env}/{name}") in metrics}
        for env, found in names.items()
    }
    return {env: values for env, values in means.items() if values}


def score_parts(groups: Sequence[Group]) -> Scores:
    """Return the scores of all tasks of an environment and of each value of a label, if they have a reward."""
    parts = {part: compute_scores(part_groups) for part, part_groups in split_by_label(groups).items()}
    return {part: scores for part, scores in parts.items() if scores}


def render_rewards(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Render a table of mean rewards: `name  0.830 ± 0.021  100  0`."""
    width = max(len(name) for name in [*rows, "env"])
    lines = [f"{'env':{width}}  {'reward':^15}  episodes  failed"]
    for name, row in rows.items():
        mean = _render_number(row["reward"]) if "reward" in row else "-"
        error = f" ± {_render_number(row['stderr'])}" if "stderr" in row else ""
        lines.append(f"{name:{width}}  {mean + error:^15}  {row['episodes']:8.0f}  {row['failed']:6.0f}")
    return "\n".join(lines)


def render_scores(envs: Mapping[str, Scores]) -> list[str]:
    """Return the lines of a table of scores, `math  0.412 [0.38, 0.45]  …`; no lines if there are no scores."""
    if not (scored_envs := {env: parts for env, parts in envs.items() if parts}):
        return []
    names = {score for parts in scored_envs.values() for scores in parts.values() for score in scores}
    columns = sorted(names, key=_sort_key)
    rows = [["", *(score.replace("_at_", "@") for score in columns)]]
    for env, parts in scored_envs.items():
        for part, scores in parts.items():
            name = env if not part else "  " + part.replace("/", " ")
            rows.append([name, *(_render_cell(scores.get(score)) for score in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["with 95 % intervals", *lines]


def render_task_scores(scores: Sequence[TaskScore]) -> list[str]:
    """Return a line for each task, such as `task  1/4  0.250  solved 1, timeout 3`."""
    width = max((len(score.task) for score in scores), default=0)
    lines = list[str]()
    for score in scores:
        reward = "-" if score.reward is None else f"{score.reward:.3f}"
        endings = _render_counts(count_endings([score]))
        lines.append(f"{score.task:{width}}  {score.solved:3}/{score.attempts:<3}  {reward:>6}  {endings}")
    return lines


def _render_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _render_means(means: Mapping[str, float]) -> str:
    return ", ".join(f"mean {name} {_render_number(value)}" for name, value in means.items())


def _render_number(value: float) -> str:
    """Return `0.830`, or `1.2e+09` for a large number."""
    return f"{value:.3f}" if abs(value) < _EXPONENT_MIN else f"{value:.2g}"


def _sort_key(score: str) -> tuple[int, int]:
    kind, k = score.split("_at_")
    return ("avg", "pass", "maj").index(kind), int(k)


def _render_cell(score: Score | None) -> str:
    return "-" if score is None else f"{score.mean:.3f} [{score.low:.2f}, {score.high:.2f}]"
