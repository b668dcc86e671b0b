"""A run of rlkit, read from its folder as data of the page.

Invariant: what a run of an earlier release did not record is None; what is damaged is a `UsageError` with its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, override

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick, pick_list, pick_rows
from rlkit._util.files.run_locks import is_locked
from rlkit._util.paths import ARTEFACTS
from rlkit.config.loading.resolved import find_tags, read_settings
from rlkit.errors import UsageError
from rlkit.metrics.diagnostics import find_problems
from rlkit.metrics.rewards import mean_reward
from rlkit.store import checkpoints
from rlkit.store.history import read_metrics
from rlkit.view.episode import read_episode, read_replies
from rlkit.view.group import list_groups, search_replies
from rlkit.view.records.reader import Match, Place, RecordReader, Row, Step
from rlkit.view.tables import cache_file, find_table, list_tables, read_scores

_TOKENS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens")

read_lines = cache_file(read_metrics)
_find_problems = cache_file(lambda path: [asdict(finding) for finding in find_problems(read_lines(path))])


class RunReader(RecordReader):
    """Reader of a run's folder; each call reads the files as they are now."""

    kind = "rlkit"

    @override
    def summary(self) -> Row:
        about = json_lines.read_object(self.path / "run.json")
        status = pick(about, "status", str)
        is_live = status == "running" and is_locked(self.path / "lock")
        config_path, metrics_path = self.path / "config.yaml", self.path / "metrics.jsonl"
        config = config_path.read_text(errors="replace") if config_path.exists() else ""
        steps = sum(map(int, re.findall(r"^(?:  )?steps: (\d+)", config, re.MULTILINE)))  # with those of a warm start
        first, last = json_lines.read_ends(metrics_path, '"env/')
        is_rare = (self.path / "evaluations").is_dir()
        first_evaluation, last_evaluation = json_lines.read_ends(metrics_path, '"eval/', is_rare=is_rare)
        evaluation = _pair(mean_reward(first_evaluation, "eval"), mean_reward(last_evaluation, "eval"))
        usage = _read_usage(self.path / "usage.json")
        return {
            "name": self.path.name,
            "kind": self.kind,
            "path": str(self.path),
            "status": "dead" if status == "running" and not is_live else status,
            "live": is_live,
            "reason": pick(about, "error", str) or pick(about, "reason", str),
            "started": pick(about, "started", float),
            "updated": max(_modified(self.path / name) for name in ("metrics.jsonl", "run.json", "usage.json")),
            "step": last.get("step", 0),
            "steps": steps or None,
            "model": pick(about, "identity.model", str),
            "envs": [str(env) for env in pick_list(about, "identity.envs")],
            "tags": find_tags(config),
            "reward": _pair(mean_reward(first, "env"), mean_reward(last, "env")),
            "evaluation": evaluation and {"metric": "reward", "start": evaluation[0], "now": evaluation[1]},
            "tokens": sum(pick(usage, name, int) or 0 for name in _TOKENS),
            "usd": last.get("usage/usd"),
        }

    @override
    def run(self) -> Row:
        about = json_lines.read_object(self.path / "run.json")
        findings = [*_find_problems(self.path / "metrics.jsonl"), *pick_rows(about, "findings")]
        path = self.path / "config.yaml"
        config = read_settings(path) if path.exists() else []
        return {
            **self.summary(),
            "config": config,
            "findings": [{**row, "step": row["first"], "text": row.get("evidence")} for row in findings],
            "checkpoints": [
                {"step": saved.step, "path": saved.state, "expires": saved.expires} for saved in checkpoints(self.path)
            ],
            "best_step": _find_best_step(
                {name: value for name, value, _ in config}, read_lines(self.path / "metrics.jsonl")
            ),
            "versions": about.get("versions", {}),
            "steps_recorded": list_tables(self.path, "step"),
            "evaluations": list_tables(self.path, "evaluation"),
            "parts": ["discovery"] if self.search_envs() else [],
        }

    @override
    def metrics(self) -> Row:
        lines = dict(read_lines(self.path / "metrics.jsonl"))
        names = sorted({name for metrics in lines.values() for name in metrics})
        columns = {name: [metrics.get(name) for metrics in lines.values()] for name in names}
        return {"step": list(lines), "metrics": columns}

    @override
    def list_steps(self) -> Sequence[Step]:
        return [(kind, number) for kind in ("step", "evaluation") for number in list_tables(self.path, kind)]

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        _, last = json_lines.read_ends(self.path / "metrics.jsonl", '"env/')
        return list_groups(self.path, step, last_measured=last.get("step", 0))

    @override
    def list_episodes(self, step: Step) -> Iterable[Sequence[Any]]:
        return read_scores(find_table(self.path, step))

    @override
    def read_replies(self, step: Step, places: Sequence[Place]) -> list[Row]:
        return read_replies(self.path, step, places)

    @override
    def read_episode(self, step: Step, place: Place) -> Row:
        return read_episode(self.path, step, place)

    @override
    def search(self, step: Step, text: str) -> list[Match]:
        return search_replies(self.path, step, text)

    def search_envs(self) -> Sequence[str]:
        """Return the environments that recorded what they discovered."""
        return sorted({path.parent.name for path in (self.path / ARTEFACTS).glob("*/*.record.json")})


def _read_usage(path: Path) -> Row:
    try:
        return json_lines.read_object(path)
    except (OSError, UsageError):  # it counts again from zero, and so does a resumed run
        return {}


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _pair(start: float | None, now: float | None) -> list[float | None] | None:
    return None if now is None and start is None else [start, now]


def _find_best_step(settings: Mapping[str, str], lines: Sequence[tuple[int, Mapping[str, float]]]) -> int | None:
    """Return the first step with the best value of the metric that selects a run's best weights."""
    metric = json.loads(settings.get("best.metric", "null")) or "eval/all/reward/mean"
    values = {step: metrics[metric] for step, metrics in lines if metric in metrics}
    choose = min if settings.get("best.lower_is_better") == "true" else max
    return choose(values, key=lambda step: values[step], default=None)
