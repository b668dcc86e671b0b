"""The history of a run, read from its directory to resume the run, and its metrics by step.

Invariant: a history holds only data that was certainly on the disk. A damaged file is an error that names the file, if
the data is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Literal

from rlkit._util.files import json_lines
from rlkit.env import Task
from rlkit.errors import UsageError
from rlkit.metrics.rewards import restore_copies
from rlkit.store import codec, table
from rlkit.store.journal import Record, RecordKind, list_segments, read_records
from rlkit.store.table import RecordedGroup
from rlkit.types import Episode, Group, Json

DRAW_BYTES = 8

_REMEDY = "the run cannot be resumed without it: put it back from a copy, or start another run from a checkpoint"
_STEP = re.compile(r"step=(\d+)")

type TableKind = Literal["step", "evaluation"]
_FOLDERS: Mapping[TableKind, str] = {"step": "episodes", "evaluation": "evaluations"}


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """Draw of a task."""

    draw: int
    env: str
    task: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Group in the record of its step, with the episodes of `size` rollouts; see `RecordedGroup.is_trained`."""

    draw: int
    is_trained: bool
    size: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Complete groups of a step, in the order of the step."""

    step: int
    groups: Sequence[GroupRecord]


@dataclass(slots=True, eq=False)
class History:
    """The recorded draws, episodes and steps of a run."""

    directory: Path
    step: int = 0  # last step whose groups are complete; 0 for none
    state_step: int = 0  # step after which the task sources had `state`
    state: Mapping[str, Json] = field(default_factory=dict[str, Json])  # state of the task sources to restore
    # Draws and steps after `state_step` in order, each with its segment of the journal.
    events: Sequence[tuple[int, DrawRecord | StepRecord]] = ()
    outstanding: dict[int, DrawRecord] = field(default_factory=dict[int, DrawRecord])  # draws in no step, by draw
    attempts: dict[int, list[Episode]] = field(default_factory=dict[int, list[Episode]])  # in the journal, by draw
    steps: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])  # steps in the journal, by number
    draws: dict[int, DrawRecord] = field(default_factory=dict[int, DrawRecord])  # draws in the journal, by draw
    waiting: list[Task] = field(default_factory=list[Task])  # tasks of the outstanding draws, once these are repeated
    # Metrics of the task sources by step, for steps that are replayed to them.
    task_metrics: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    damaged: list[Path] = field(default_factory=list[Path])  # files of the journal that are missing or unreadable

    def groups(self, step: int) -> Sequence[RecordedGroup]:
        """Return the groups of a step from its table or the journal; raise `UsageError` if neither holds them."""
        path = table_path(self.directory, step)
        if path.exists():
            return read_groups(path)
        record = self.steps.get(step)
        if record is None or any(group.draw not in self.draws for group in record.groups):
            if record is not None and self.damaged:
                raise UsageError(f"{self.damaged[0]} is damaged: the draws of step {step} are unreadable")
            raise UsageError(f"{path} is missing, and the journal no longer holds its episodes; {_REMEDY}")
        return [make_group(self.draws[group.draw], self.attempts.get(group.draw, []), group) for group in record.groups]


def read_groups(path: Path) -> Sequence[RecordedGroup]:
    """Return the groups in a table; raise `UsageError` if it cannot be read."""
    try:
        return table.read_table(path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def check_table(path: Path) -> None:
    """Raise `UsageError` if a table is missing or damaged."""
    try:
        table.check_checksum(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} is missing; {_REMEDY}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}; {_REMEDY}") from error


def table_path(directory: Path, step: int, *, kind: TableKind = "step") -> Path:
    """Return the path of the episodes of a step, or of the evaluation of its weights."""
    return directory / _FOLDERS[kind] / f"step={step:06d}" / "episodes.parquet"


def state_path(directory: Path, step: int) -> Path:
    """Return the path of the state of the task sources after a step."""
    return directory / "state" / f"step={step:06d}.json"


def list_state_steps(directory: Path) -> list[int]:
    """Return the steps after which the state of the task sources is on the disk."""
    return _read_steps(path.stem for path in directory.glob("state/*.json"))


def list_table_steps(directory: Path, *, kind: TableKind = "step") -> list[int]:
    """Return the steps whose episodes, or those of their evaluations, are on the disk."""
    names = glob(f"{_FOLDERS[kind]}/*/episodes.parquet", root_dir=directory)  # noqa: PTH207  half the time
    return _read_steps(name.split("/")[-2] for name in names)


def _read_steps(names: Iterable[str]) -> list[int]:
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def make_group(draw: DrawRecord, attempts: Sequence[Episode], record: GroupRecord) -> RecordedGroup:
    """Return a group with all its attempts; the last attempt of each member is its episode."""
    final = {episode.member: episode for episode in sorted(attempts, key=lambda episode: episode.attempt)}
    episodes = tuple(final[member] for member in sorted(final) if member < record.size)
    return RecordedGroup(Group(draw.env, draw.task, draw.draw, episodes), record.is_trained, attempts)


def upsert_attempt(attempts: list[Episode], episode: Episode) -> None:
    """Add an episode, or replace the record of the same attempt from before it had its reward."""
    for place, attempt in enumerate(attempts):
        if (attempt.member, attempt.attempt) == (episode.member, episode.attempt):
            attempts[place] = episode
            return
    attempts.append(episode)


def load_resume_history(directory: Path) -> History:
    """Return the history that a resumed run needs; errors as in `load_history`."""
    history = load_history(directory)
    segments = {event.draw: segment for segment, event in history.events if isinstance(event, DrawRecord)}
    earliest = min((segments[draw] for draw in history.outstanding), default=history.step + 1)
    usable = [step for step in list_state_steps(directory) if step <= history.step and step < earliest]
    if not usable:
        raise UsageError(f"{state_path(directory, earliest - 1)}, the state of the task sources, is missing; {_REMEDY}")
    history.state_step = usable[-1]
    try:
        history.state = json_lines.read_object(state_path(directory, history.state_step))
    except UsageError as error:
        raise UsageError(f"{error}; {_REMEDY}") from None
    for step in range(history.state_step + 1, history.step + 1):
        if step not in history.steps:  # the task sources cannot replay an unknown step
            raise UsageError(f"{directory / 'journal' / f'{step:06d}.log'} is missing; {_REMEDY}")
    history.events = [(segment, event) for segment, event in history.events if segment > history.state_step]
    return history


def has_started(directory: Path) -> bool:
    """Return whether a run has drawn a task or finished a step."""
    has_records = any(True for _ in read_records(directory / "journal"))
    return has_records or bool(list_state_steps(directory)) or _find_last_trace(directory) is not None


def load_history(directory: Path) -> History:
    """Return the history of a run with all its events, without the state that only a resumed run needs.

    Raises:
        UsageError: the directory's files contradict each other, or a needed part is damaged.
    """
    history = History(directory)
    complete = _find_complete_steps(directory, history.damaged)
    decoded = ((record.segment, _decode_record(record, history)) for record in read_records(directory / "journal"))
    events = [(segment, event) for segment, event in decoded if event is not None and segment <= complete.stop]
    without_record = set(complete).difference(event.step for _, event in events if isinstance(event, StepRecord))
    for step in sorted(without_record):  # the record is lost, but the table exists
        groups = [
            GroupRecord(recorded.group.draw, recorded.is_trained, len(recorded.group.episodes))
            for recorded in history.groups(step)
        ]
        events.insert(sum(segment <= step for segment, _ in events), (step, StepRecord(step, groups)))
    history.events = events
    history.draws = {event.draw: event for _, event in events if isinstance(event, DrawRecord)}
    history.steps = {event.step: event for _, event in events if isinstance(event, StepRecord)}
    history.step = max(history.steps, default=complete.start - 1)
    last = _find_last_trace(directory)
    if last is not None and last[0] > history.step:
        lost = history.step + 1 if list_segments(directory / "journal") else last[0] + 1
        raise UsageError(
            f"{directory / 'journal' / f'{lost:06d}.log'} is missing or damaged: the journal holds "
            f"{history.step or 'no'} steps, but {last[1]} is from step {last[0]}; {_REMEDY}"
        )
    trained = {group.draw for record in history.steps.values() for group in record.groups}
    history.outstanding = {draw: event for draw, event in history.draws.items() if draw not in trained}
    return history


def _find_last_trace(directory: Path) -> tuple[int, Path] | None:
    """Return the last step in files other than the journal, and the file; these files are written after the journal."""
    metrics, checkpoints = directory / "metrics.jsonl", directory / "checkpoints.jsonl"
    traces = [(step, table_path(directory, step).parent) for step in list_table_steps(directory)]
    traces += [(step, state_path(directory, step)) for step in list_state_steps(directory)]
    traces += [(step, metrics) for step, _ in read_metrics(metrics)]
    saved_steps = [line.get("step") for line in json_lines.read_lines(checkpoints)]
    traces += [(step, checkpoints) for step in saved_steps if isinstance(step, int)]
    return max(traces, default=None)


def _find_complete_steps(directory: Path, damaged: list[Path]) -> range:
    """Return the steps in the journal whose groups are complete, and add to the damaged files.

    A table or state is written once the record of its step is on the disk, and a table can replace that record. After a
    power cut, a segment can exist without the end of the segment before it. Its contents are ignored, because they were
    not certainly on the disk.
    """
    folder, state_steps = directory / "journal", list_state_steps(directory)
    records = read_records(folder, damaged=damaged.append)
    recorded = {record.segment for record in records if record.kind is RecordKind.STEP}
    # All segments after the oldest state are still needed, and a state is written after the record of its step.
    damaged += [folder / f"{step:06d}.log" for step in state_steps if step > state_steps[0] and step not in recorded]
    segments = list_segments(folder)
    complete = range(segments[0][0], segments[0][0]) if segments else range(1, 1)
    for number, path in segments:
        if number not in recorded and not table_path(directory, number).exists():
            if number != segments[-1][0] and (path in damaged or number in state_steps):
                raise UsageError(f"{path} is damaged: the groups of step {number} are unreadable")
            break
        complete = range(complete.start, number + 1)
    return complete


def _decode_record(record: Record, history: History) -> DrawRecord | StepRecord | None:
    """Return the draw or step of a record; add an episode to the history."""
    match record.kind:
        case RecordKind.DRAW:
            return DrawRecord(**json.loads(record.content))
        case RecordKind.STEP:
            content = json.loads(record.content)
            groups = [GroupRecord(group["draw"], group["counts"], group["size"]) for group in content["groups"]]
            return StepRecord(content["step"], groups)
        case RecordKind.EPISODE:
            draw = int.from_bytes(record.content[:DRAW_BYTES], "little")
            upsert_attempt(history.attempts.setdefault(draw, []), codec.decode(record.content[DRAW_BYTES:]))
            return None


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the steps of a metrics.jsonl and their finite metrics, with `…/all/…` for a single environment too."""
    rows = list[tuple[int, dict[str, float]]]()
    for metrics in json_lines.read_lines(path):
        if not isinstance(step := metrics.pop("step", None), int):
            raise UsageError(f"{path} is damaged: a line has no step")
        values = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        rows.append((step, restore_copies(values)))
    return rows
