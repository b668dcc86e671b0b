"""Scores of a model from several attempts at each task, with confidence intervals.

Invariant: intervals are computed over tasks, because attempts at one task are not independent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rlkit._util.files.json_fields import pick_object
from rlkit.metrics.intervals import Score, estimate_mean
from rlkit.metrics.metrics import SOLVED
from rlkit.types import Episode, Group

LABELS_MAX = 20  # maximum number of values of a label; labels with more values get no scores


def compute_scores(groups: Sequence[Group]) -> dict[str, Score]:
    """Return `avg_at_k`, `pass_at_k` and `maj_at_k` of groups whose tasks have up to k attempts with a reward.

    - `avg_at_k`, for the largest k: share of a task's attempts that solve it. For k = 1 its name is `pass_at_1`, which
      it estimates for every k.
    - `pass_at_k`, for powers of two and the largest k: unbiased probability that one of k attempts solves the task,
      1 − C(n − c, k) / C(n, k) with c of n attempts solved (Chen et al. 2021, arXiv:2107.03374).
    - `maj_at_k`, for the largest k, if outcomes have an `answer` in their info: 1 if the most frequent answer solves
      the task, else 0; the mean over equally frequent answers. Attempts without an answer have no vote (Wang et al.
      2022, arXiv:2203.11171).
    """
    tasks = [[episode for episode in group.episodes if episode.reward is not None] for group in groups]
    if not (tasks := [episodes for episodes in tasks if episodes]):
        return {}
    largest = max(map(len, tasks))
    counts = [(len(episodes), sum(map(_is_solved, episodes))) for episodes in tasks]
    average = f"{'pass' if largest == 1 else 'avg'}_at_{largest}"
    scores = {average: estimate_mean([solved / attempts for attempts, solved in counts])}
    sizes = {2**power for power in range(1, largest.bit_length())} | {largest}
    for k in sorted(sizes - {1}):
        values = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
        scores[f"pass_at_{k}"] = estimate_mean(values)
    majorities = [value for episodes in tasks if (value := _score_majority(episodes)) is not None]
    if majorities and largest > 1:
        scores[f"maj_at_{largest}"] = estimate_mean(majorities)
    return scores


def compute_score_metrics(groups: Sequence[Group], *, prefix: str) -> dict[str, float]:
    """Return the scores of groups by environment, for all environments together, and by label, with intervals.

    The keys are `<prefix>/<env>/<score>`, `…/<score>/low` and `…/<score>/high`. For each label in `info["labels"]`, the
    same keys are under `<prefix>/<env>/<label>/<value>/…`, with the number of `tasks`. The standard error of the mean
    reward is `<prefix>/<env>/reward/stderr`.
    """
    metrics = dict[str, float]()
    for name in [*dict.fromkeys(group.env for group in groups), "all"]:
        env_groups = [group for group in groups if name in (group.env, "all")]
        if (error := compute_standard_error(env_groups)) is not None:
            metrics[f"{prefix}/{name}/reward/stderr"] = error
        for part, part_groups in split_by_label(env_groups).items() if name != "all" else [("", env_groups)]:
            place, scores = "/".join(filter(None, (prefix, name, part))), compute_scores(part_groups)
            if part and scores:
                metrics[f"{place}/tasks"] = float(len(part_groups))
            for score, value in scores.items():
                key = f"{place}/{score}"
                metrics |= {key: value.mean, f"{key}/low": value.low, f"{key}/high": value.high}
    return metrics


def compute_standard_error(groups: Sequence[Group]) -> float | None:
    """Return the standard error of the mean reward; None for fewer than two tasks with a reward.

    Tasks are independent; attempts at one task are not. With T tasks and N episodes with a reward, of mean m, the error
    is √(T/(T−1) · Σ_tasks (Σ_episodes (r − m))²) / N; with one attempt per task, s/√N. Source: Liang and
    Zeger 1986, for the mean alone; Miller 2024, "Adding error bars to evals", §2.2 (arXiv:2411.00640).
    """
    tasks = [group.rewards[group.valid_mask] for group in groups if group.valid_mask.any()]
    if len(tasks) < 2:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # rewards near the ends of the float range
        mean = float(np.concatenate(tasks).mean())
        deviations = np.array([float((rewards - mean).sum()) for rewards in tasks])
        squares = len(tasks) / (len(tasks) - 1) * float(np.square(deviations).sum())
    return math.sqrt(squares) / sum(map(len, tasks))


def split_by_label(groups: Sequence[Group]) -> Mapping[str, Sequence[Group]]:
    """Return all groups as `""`, and those of each sorted value of a label as `label/value`.

    Labels with a single value or more than `LABELS_MAX` values are left out.
    """
    labelled, parts = defaultdict[str, dict[str, list[Group]]](dict), dict[str, Sequence[Group]]({"": groups})
    for group in groups:
        for label, value in _read_labels(group).items():
            labelled[label].setdefault(value, []).append(group)
    for label, values in labelled.items():
        if 1 < len(values) <= LABELS_MAX:
            parts |= {f"{label}/{value}": value_groups for value, value_groups in sorted(values.items())}
    return parts


def _read_labels(group: Group) -> dict[str, str]:
    labels = filter(None, (pick_object(episode.info, "labels") for episode in group.episodes))
    return {_escape(label): _escape(str(value)) for label, value in next(labels, dict[str, object]()).items()}


def _escape(text: str) -> str:
    """Replace slashes, which separate the parts of a metric's name."""
    return text.replace("/", "_").strip() or "_"


def _is_solved(episode: Episode) -> bool:
    return episode.reward is not None and episode.reward >= SOLVED


def _score_majority(episodes: Sequence[Episode]) -> float | None:
    """Return the probability that the most frequent answer solves the task; None if no outcome has an answer."""
    if not any("answer" in episode.info for episode in episodes):
        return None
    answers = [(str(answer), _is_solved(e)) for e in episodes if (answer := e.info.get("answer")) is not None]
    votes = Counter(answer for answer, _ in answers)
    solved = Counter(answer for answer, is_solved in answers if is_solved)
    if not votes:
        return 0.0
    top = max(votes.values())
    return float(np.mean([solved[answer] / top for answer, count in votes.items() if count == top]))
