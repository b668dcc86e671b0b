"""The evaluations of a run, with the confidence intervals that the run computed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from rlkit.view.records.reader import Row
from rlkit.view.tables import find_table, list_tables, read_scores

_SCORE = re.compile(r"eval/(?P<env>[^/]+)/(?:(?P<label>.+/.+)/)?(?P<score>[^/]+)/low")


def list_evaluations(directory: Path, lines: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Return each evaluation: scores of its environments and labels, and the mean of each task.

    Args:
        lines: metrics by step.
    """
    rows = list[Row]()
    for step in list_tables(directory, "evaluation"):
        tasks = _score_tasks(find_table(directory, ("evaluation", step)))
        metrics = lines.get(step, {})
        rows.append({"step": step, "envs": [_score_env(env, metrics, tasks[env]) for env in tasks]})
    return rows


def _score_env(env: str, metrics: Mapping[str, float], tasks: list[list[object]]) -> Row:
    scores = list[Row]()
    for key, low in metrics.items():
        if (match := _SCORE.fullmatch(key)) and match["env"] == env:
            name = key.removesuffix("/low")
            score = {"mean": metrics.get(name), "low": low, "high": metrics.get(f"{name}/high")}
            scores.append({"label": match["label"], "metric": match["score"], **score})
    main: Row = next(
        (score for score in scores if score["label"] is None),
        {"metric": "reward", "mean": metrics.get(f"eval/{env}/reward/mean"), "low": None, "high": None},
    )
    return {
        "env": env,
        **{name: main[name] for name in ("metric", "mean", "low", "high")},
        "episodes": metrics.get(f"eval/{env}/episodes"),
        "tasks": tasks,
        "labels": [
            {**score, "n": metrics.get(f"eval/{env}/{score['label']}/tasks")}
            for score in scores
            if score["label"] and score["metric"] == main["metric"]
        ],
    }


def _score_tasks(path: Path) -> dict[str, list[list[object]]]:
    """Return the id, mean reward and number of episodes of each task by environment."""
    rewards = dict[tuple[str, str], list[float | None]]()
    for env, task, *_, reward in read_scores(path):
        rewards.setdefault((env, task), []).append(reward)
    tasks = dict[str, list[list[object]]]()
    for (env, task), values in rewards.items():
        graded = [value for value in values if value is not None]
        tasks.setdefault(env, []).append([task, fmean(graded) if graded else None, len(values)])
    return tasks
