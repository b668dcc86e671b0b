"""Logs of inspect_ai (`.eval`): a zip archive of JSON, compressed with deflate or Zstandard.

Invariant: no entry is unpacked past `ENTRY_MAX_BYTES`, and a list of samples is read without their messages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from statistics import fmean
from typing import Any, override

from pydantic_core import from_json

from rlkit._util.files.json_fields import pick, pick_list, pick_object, pick_rows
from rlkit._util.files.zip_entries import list_entries, read_entry
from rlkit._util.json_values import map_text
from rlkit.errors import UsageError
from rlkit.view.records.reader import LogGroup, LogReader, Row, Step, make_member, make_message, split_turns

ENTRY_MAX_BYTES = 1 << 28
_SCORES = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
_STATUSES = {"success": "completed", "cancelled": "interrupted", "error": "failed"}


class InspectReader(LogReader):
    """Reader of a log. Epochs of a sample are the members of a group."""

    kind = "inspect"

    def _read(self, name: str) -> Any:
        try:
            return from_json(read_entry(self.path, name, max_bytes=ENTRY_MAX_BYTES))
        except ValueError as error:
            raise UsageError(f"{self.path} is damaged: {name}: {error}") from error

    @cached_property
    def _header(self) -> Row:
        """The beginning of a log, with the results of one that is complete."""
        return self._read("header.json" if "header.json" in list_entries(self.path) else "_journal/start.json")

    @override
    def load_groups(self) -> Mapping[Step, Sequence[LogGroup]]:
        """Return the summaries of the samples; of a sample that was logged twice, the later one."""
        entries, names = list_entries(self.path), ["summaries.json"]
        if names[0] not in entries:  # the log is not complete: parts are numbered from 1
            parts = [name for name in entries if name.startswith("_journal/summaries/")]
            names = sorted(parts, key=lambda name: (len(name), name))
        tasks = defaultdict[str, dict[int, Row]](dict)
        for sample in (sample for name in names for sample in pick_rows(self._read(name), "")):
            tasks[pick(sample, "id", str) or ""][pick(sample, "epoch", int) or 0] = sample
        env = pick(self._header, "eval.task", str) or self.path.name
        groups = [LogGroup(env, task, [epochs[number] for number in sorted(epochs)]) for task, epochs in tasks.items()]
        return {("evaluation", 0): groups}

    @override
    def show_member(self, record: Row) -> Row:
        values = {name: pick(score, "value", object) for name, score in pick_object(record, "scores").items()}
        scores = {name: _read_score(value) for name, value in values.items()}
        return make_member(
            error=pick(record, "error", str),
            is_truncated=record.get("limit") is not None,
            reward=next(iter(scores.values()), None),
            metrics=scores,
            turns=pick(record, "turn_count", int),
            tokens=sum(pick(usage, "output_tokens", int) or 0 for usage in pick_rows(record, "model_usage")),
            seconds=pick(record, "total_time", float),
        )

    @override
    def show_episode(self, record: Row) -> Row:
        sample = self._read(f"samples/{pick(record, 'id', str)}_epoch_{pick(record, 'epoch', str)}.json")
        texts = {f"attachment://{name}": text for name, text in pick_object(sample, "attachments").items()}
        messages = map_text(pick_list(sample, "messages"), lambda text: str(texts.get(text, text)))
        turns = split_turns([make_message(message) for message in pick_rows(messages, "")])
        if turns and (choices := pick_rows(sample, "output.choices")):
            turns[-1]["stop"] = pick(choices[0], "stop_reason", str)
        return {
            "turns": turns,
            "info": {name: pick(sample, name, object) for name in ("target", "scores", "metadata", "limit")},
            "error": pick(sample, "error.traceback", str) or pick(sample, "error.message", str),
        }

    @override
    def run(self) -> Row:
        header, headline = self._header, pick_object(self._header, "results.headline")
        scores = [score for score in pick_rows(header, "results.scores") if score.get("name") == headline.get("score")]
        mean = pick(scores[0], f"metrics.{headline.get('metric')}.value", float) if scores else None
        title = f"{headline.get('score')} {headline.get('metric')}"
        return self.make_run(
            self.path,
            status=_STATUSES.get(pick(header, "status", str) or ""),
            reason=pick(header, "error.message", str),
            started=_parse_time(pick(header, "eval.created", str) or ""),
            updated=_parse_time(pick(header, "stats.completed_at", str) or "") or self.path.stat().st_mtime,
            model=pick(header, "eval.model", str),
            envs=[pick(header, "eval.task", str)],
            tags=pick_list(header, "eval.tags"),
            evaluation=None if mean is None else {"metric": title, "start": None, "now": mean},
            tokens=sum(pick(usage, "total_tokens", int) or 0 for usage in pick_rows(header, "stats.model_usage")),
            config=pick_object(header, "eval"),
            versions=pick_object(header, "eval.packages"),
        )


def _read_score(value: object) -> float | None:
    """Return a score as a number, by inspect_ai's rules; of several values, their mean."""
    if parts := pick_list(value, ""):
        scores = [score for part in parts if (score := _read_score(part)) is not None]
        return fmean(scores) if scores else None
    text = str(value).lower()
    try:
        number = _SCORES[text] if text in _SCORES else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _parse_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
