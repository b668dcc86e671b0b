"""A run of rlkit, read from its folder as data of the page.

Invariant: what a run of an earlier release did not record is None; what is damaged is a `UsageError` with its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, cast, override

from rlkit._util.files import json_lines
from rlkit._util.paths import ARTEFACTS
from rlkit.config.loading.nodes import dotted
from rlkit.config.loading.resolved import leaves
from rlkit.errors import UsageError
from rlkit.metrics.diagnostics import find_problems
from rlkit.store import checkpoints
from rlkit.store.history import read_metrics
from rlkit.view.discovery import list_searches
from rlkit.view.episode import read_details, read_replies
from rlkit.view.evaluations import list_evaluations
from rlkit.view.group import list_groups, search_replies
from rlkit.view.locks import is_locked
from rlkit.view.records.reader import Place, RecordReader, Step, pick, pick_list
from rlkit.view.tables import Kind, Row, cache_file, find_table, list_tables, read_scores
from rlkit.view.trial_files import read_file

_END_BYTES = 1 << 17
_SETTINGS_MAX = 10_000  # aliases of YAML can repeat a few lines a billion times
_TOKENS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens")


class RunReader(RecordReader):
    """Reader of a run's folder; each call reads the files as they are now."""

    kind = "rlkit"

    @override
    def summary(self) -> Row:
        about = json_lines.read_object(self.path / "run.json")
        config = _read_text(self.path / "config.yaml")
        metrics = self.path / "metrics.jsonl"
        has_evaluation = (self.path / "evaluations").is_dir()
        (first, last), evaluations = _read_ends(metrics, '"env/'), _read_ends(metrics, '"eval/', is_rare=has_evaluation)
        usage = _read_optional(self.path / "usage.json")
        recorded_status = pick(about, "status", str)
        is_live = recorded_status == "running" and is_locked(self.path / "lock")
        status = "dead" if recorded_status == "running" and not is_live else recorded_status
        steps = re.search(r"^steps: (\d+)", config, re.MULTILINE)
        tags = re.search(r"^ +tags:((?: *\[.*\])|(?:\n +- [^\n]*)+)", config, re.MULTILINE)
        return {
            "name": self.path.name,
            "kind": self.kind,
            "path": str(self.path),
            "status": status,
            "live": is_live,
            "reason": pick(about, "error", str) or pick(about, "reason", str),
            "started": pick(about, "started", float),
            "updated": max(_modified(self.path / name) for name in ("metrics.jsonl", "run.json", "usage.json")),
            "step": last.get("step", 0),
            "steps": int(steps[1]) if steps else None,
            "model": pick(about, "identity.model", str),
            "envs": [str(env) for env in pick_list(about, "identity.envs")],
            "tags": re.findall(r"[\w.:/-]+", re.sub(r"#.*|(?m:^ +- )", " ", tags[1])) if tags else [],
            "reward": _pair(_reward(first, "env"), _reward(last, "env")),
            "evaluation": _evaluation(*evaluations),
            "tokens": sum(pick(usage, name, int) or 0 for name in _TOKENS),
            "usd": last.get("usage/usd"),
        }

    @override
    def run(self) -> Row:
        about = json_lines.read_object(self.path / "run.json")
        findings: list[Mapping[str, Any]] = [*_find_problems(self.path / "metrics.jsonl")]
        findings += cast("list[Mapping[str, Any]]", about.get("findings") or [])
        parts = {"discovery": list(self._searches()), ARTEFACTS: (self.path / ARTEFACTS).is_dir()}
        return {
            **self.summary(),
            "config": _read_config(self.path / "config.yaml"),
            "findings": [
                {
                    "step": row["first"],
                    **{name: row.get(name) for name in ("last", "name", "env", "action")},
                    "text": row.get("evidence"),
                }
                for row in findings
            ],
            "checkpoints": [
                {"step": saved.step, "path": saved.state, "expires": saved.expires} for saved in checkpoints(self.path)
            ],
            "best_step": None,
            "versions": about.get("versions", {}),
            "steps_recorded": list_tables(self.path, "step"),
            "evaluations": list_tables(self.path, "evaluation"),
            "parts": [name for name, is_there in parts.items() if is_there],
        }

    @override
    def metrics(self) -> Row:
        lines = dict(read_metrics(self.path / "metrics.jsonl"))
        names = sorted({name for metrics in lines.values() for name in metrics})
        columns = {name: [metrics.get(name) for metrics in lines.values()] for name in names}
        return {"step": list(lines), "metrics": columns}

    @override
    def list_steps(self) -> Sequence[Step]:
        return [(kind, number) for kind in ("step", "evaluation") for number in list_tables(self.path, kind)]

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        return list_groups(self.path, *step)

    @override
    def list_episodes(self, step: Step) -> Iterable[Sequence[Any]]:
        return read_scores(find_table(self.path, *step))

    @override
    def read_replies(self, step: Step, places: Sequence[Place]) -> list[tuple[list[Row], Row, str | None]]:
        return read_replies(self.path, *step, places)

    @override
    def read_details(self, step: Step, place: Place) -> Row:
        return read_details(self.path, *step, place)

    def search(self, number: int, text: str, *, kind: Kind = "step") -> Row:
        """Return the episodes with a text in one of their replies."""
        return {"matches": search_replies(self.path, kind, number, text)}

    def file(self, number: int, position: int, member: int, attempt: int, path: str, *, kind: Kind = "step") -> Row:
        """Return the beginning of a file of an episode's trial."""
        return read_file(self.episode(number, position, member, attempt, kind=kind)["info"], path)

    def evaluations(self) -> Row:
        """Return the scores of each evaluation with their intervals."""
        lines = dict(read_metrics(self.path / "metrics.jsonl"))
        return {"evaluations": list_evaluations(self.path, lines)}

    def discovery(self) -> Row:
        """Return the records and states of each search."""
        return {"searches": list_searches(self.path, self._searches())}

    def _searches(self) -> Sequence[str]:
        folder = self.path / ARTEFACTS
        return sorted({path.parent.name for path in folder.glob("*/*.record.json")})


_find_problems = cache_file(lambda path: [asdict(finding) for finding in find_problems(read_metrics(path))])


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read_optional(path: Path) -> Mapping[str, Any]:
    try:
        return json_lines.read_object(path)
    except (OSError, UsageError):  # it counts again from zero, and so does a resumed run
        return {}


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _read_ends(path: Path, prefix: str, *, is_rare: bool = False) -> tuple[Row, Row]:
    """Return the first and the last line of a file of metrics with a name of a prefix.

    Args:
        is_rare: whether such lines may be far from the beginning and the end, so that the whole file may be read.
    """
    if not path.exists():
        return {}, {}
    with path.open("rb") as file:
        head = file.read(_END_BYTES)
        file.seek(max(file.seek(0, 2) - _END_BYTES, 0))
        tail = file.read()
        if is_rare and not (prefix.encode() in head and prefix.encode() in tail):
            file.seek(0)
            head = tail = file.read()
    lines = head.rpartition(b"\n")[0].split(b"\n"), tail.rpartition(b"\n")[0].split(b"\n")[::-1]
    first, last = (
        next((line for line in part if line[:1] == b"{" and prefix.encode() in line), b"{}") for part in lines
    )
    try:
        return json.loads(first), json.loads(last)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _reward(metrics: Row, prefix: str) -> float | None:
    """Return the mean reward over the environments."""
    names = [name for name in metrics if name.startswith(f"{prefix}/") and name.endswith("/reward/mean")]
    values = [metrics[name] for name in names if name.count("/") == 3 and metrics[name] is not None]
    total: float | None = metrics.get(f"{prefix}/all/reward/mean")
    return fmean(values) if total is None and values else total


def mean_rewards(directory: Path) -> list[float]:
    """Return the mean reward over the environments of each step that has one."""
    rewards = (_reward(dict(metrics), "env") for _, metrics in read_metrics(directory / "metrics.jsonl"))
    return [reward for reward in rewards if reward is not None]


def _pair(start: float | None, now: float | None) -> list[float | None] | None:
    return None if now is None and start is None else [start, now]


def _evaluation(first: Row, last: Row) -> Row | None:
    start, now = _reward(first, "eval"), _reward(last, "eval")
    return None if start is None and now is None else {"metric": "reward", "start": start, "now": now}


def _read_config(path: Path) -> list[list[str]]:
    """Return each value of a recorded configuration with its dotted name and its origin."""
    import yaml

    text = _read_text(path)
    try:
        values = list(islice(leaves(yaml.safe_load(text) or {}), _SETTINGS_MAX))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    marks = [line.rpartition("  # ")[2] for line in text.splitlines() if "  # " in line]
    origins = marks if len(marks) == len(values) else [""] * len(values)
    return [[dotted(key), json.dumps(value), origin] for (key, value), origin in zip(values, origins, strict=True)]
