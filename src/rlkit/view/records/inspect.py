"""Logs of inspect_ai (`.eval`): a zip archive of JSON, compressed with deflate or Zstandard.

Invariant: no entry is unpacked past `ENTRY_MAX_BYTES`, and a list of samples is read without their messages.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from io import BytesIO
from statistics import fmean
from typing import Any, override
from zipfile import BadZipFile, ZipFile, ZipInfo

from zstandard import ZstdDecompressor, ZstdError

from rlkit.errors import UsageError
from rlkit.view.records import reader
from rlkit.view.records.reader import LogReader, Row, Step, pick, pick_list, pick_object, pick_rows

ENTRY_MAX_BYTES = 1 << 28
_ZSTANDARD = 93  # compression method that zipfile does not support before Python 3.14
_SCORES = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
_STATUSES = {"success": "completed", "cancelled": "interrupted", "error": "failed"}
_FAULTS = (OSError, EOFError, KeyError, ValueError, OverflowError, RuntimeError, BadZipFile, zlib.error, ZstdError)


class InspectReader(LogReader):
    """Reader of a log. Epochs of a sample are the members of a group."""

    kind = "inspect"

    @cached_property
    def _entries(self) -> Mapping[str, ZipInfo]:
        try:
            with ZipFile(self.path) as archive:
                return {entry.filename: entry for entry in archive.infolist()}
        except _FAULTS as error:
            raise UsageError(f"{self.path} is damaged: {error}") from error

    def _read(self, name: str) -> Any:
        try:
            entry = self._entries[name]
            with self.path.open("rb") as file, ZipFile(file) as archive:
                if entry.compress_type == _ZSTANDARD:
                    file.seek(entry.header_offset + 26)
                    lengths = file.read(4)
                    file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
                    packed = BytesIO(file.read(entry.compress_size))
                    unpacked = ZstdDecompressor().stream_reader(packed, read_across_frames=True)
                else:
                    unpacked = archive.open(entry)
                data = unpacked.read(ENTRY_MAX_BYTES + 1)
            if len(data) > ENTRY_MAX_BYTES:
                raise ValueError(f"it has more than {ENTRY_MAX_BYTES:,} bytes")
        except _FAULTS as error:
            raise UsageError(f"{self.path} is damaged: {name}: {error}") from error
        return reader.parse_json(self.path, data)

    @cached_property
    def _header(self) -> Row:
        return self._read("header.json" if "header.json" in self._entries else "_journal/start.json")

    @cached_property
    def _groups(self) -> list[list[Row]]:
        """Summaries of the samples, by their ids; of a sample that was logged twice, the later one."""
        journal = [name for name in self._entries if re.fullmatch(r"_journal/summaries/\d+\.json", name)]
        names = ["summaries.json"] if "summaries.json" in self._entries else sorted(journal, key=lambda x: (len(x), x))
        groups = dict[str, dict[int, Row]]()
        for sample in (sample for name in names for sample in pick_rows({"": self._read(name)}, "")):
            groups.setdefault(pick(sample, "id", str) or "", {})[pick(sample, "epoch", int) or 0] = sample
        return [[group[epoch] for epoch in sorted(group)] for group in groups.values()]

    @override
    def list_steps(self) -> Sequence[Step]:
        return [("evaluation", 0)]

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        env, rows = pick(self._header, "eval.task", str) or self.path.name, list[Row]()
        for position, samples in enumerate(self._groups):
            members = [_read_member(sample) for sample in samples]
            task = pick(samples[0], "id", str) or ""
            rows.append(reader.make_group(position, env=env, task=task, members=members))
        return rows

    @override
    def read_episode(self, step: Step, position: int, member: int) -> tuple[Sequence[Row], Row, str | None]:
        summary = self._groups[position][member]
        sample = self._read(f"samples/{pick(summary, 'id', str)}_epoch_{pick(summary, 'epoch', str)}.json")
        texts = pick_object(sample, "attachments").items()
        attachments = {f"attachment://{key}": text for key, text in texts if isinstance(text, str)}
        turns = reader.split_turns(
            [reader.make_message(message, attachments) for message in pick_rows(sample, "messages")]
        )
        if turns and (choices := pick_rows(sample, "output.choices")):
            turns[-1]["stop"] = pick(choices[0], "stop_reason", str)
        info = {field: pick(sample, field, object) for field in ("target", "scores", "metadata", "limit")}
        return turns, info, pick(sample, "error.traceback", str) or pick(sample, "error.message", str)

    @override
    def run(self) -> Row:
        header, headline = self._header, pick_object(self._header, "results.headline")
        scores = [each for each in pick_rows(header, "results.scores") if each.get("name") == headline.get("score")]
        names = [str(headline.get(each)) for each in ("score", "metric")]
        mean = pick(scores[0], f"metrics.{headline.get('metric')}.value", float) if scores else None
        return self.make_run(
            self.path,
            status=_STATUSES.get(pick(header, "status", str) or ""),
            reason=pick(header, "error.message", str),
            started=_parse_time(pick(header, "eval.created", str)),
            model=pick(header, "eval.model", str),
            envs=[pick(header, "eval.task", str)],
            tags=pick_list(header, "eval.tags"),
            evaluation=None if mean is None else {"metric": " ".join(names), "start": mean, "now": mean},
            tokens=sum(pick(usage, "total_tokens", int) or 0 for usage in pick_rows(header, "stats.model_usage")),
            config=reader.list_settings(pick_object(header, "eval")),
            versions=pick_object(header, "eval.packages"),
        )


def _read_member(sample: Row) -> Row:
    scores = {name: _read_score(pick(score, "value", object)) for name, score in pick_object(sample, "scores").items()}
    return reader.make_member(
        error=pick(sample, "error", str),
        is_truncated=sample.get("limit") is not None,
        reward=next(iter(scores.values()), None),
        metrics=scores,
        turns=pick(sample, "turn_count", int),
        tokens=sum(pick(usage, "output_tokens", int) or 0 for usage in pick_rows(sample, "model_usage")),
        seconds=pick(sample, "total_time", float),
    )


def _read_score(value: object) -> float | None:
    """Return a score as a number, by inspect_ai's rules; of several values, their mean."""
    if parts := [_read_score(part) for part in pick_list({"": value}, "")]:
        numbers = [part for part in parts if part is not None]
        return fmean(numbers) if numbers else None
    if isinstance(value, bool):
        return float(value)
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else pick({"": value}, "", float)
    return _SCORES.get(str(value).lower())


def _parse_time(text: str | None) -> float | None:
    with suppress(ValueError):
        return datetime.fromisoformat(text or "").timestamp()
