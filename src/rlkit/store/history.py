"""Reading a run back, so that it can go on.

Invariant: what is found is what was on the disk for sure, or there is an error that names the file that is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlkit.errors import UsageError
from rlkit.store import codec, jsonl, table
from rlkit.store.journal import Record, RecordKind, list_segments, read_records
from rlkit.types import Episode, Group, Json

DRAW_BYTES = 8

REMEDY = "the run cannot be resumed without it: put it back from a copy, or start another run from a checkpoint"
"""The end of a message about a file of a run that is gone."""

_STATE = re.compile(r"step=(\d+)\.json")
_TABLE = re.compile(r"step=(\d+)")


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """A task was drawn."""

    draw: int
    env: str
    task: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as a member of a step; see `StepGroup.is_trained`. It holds the episodes of `size` rollouts."""

    draw: int
    is_trained: bool
    size: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The groups of a step were complete; they stand in the order in which the step takes them."""

    step: int
    groups: Sequence[GroupRecord]


@dataclass(slots=True, eq=False)
class History:
    """What is known of a run.

    Args:
        directory: the run's directory.
        step: the last step whose groups are complete; 0 for none.
        state_step: the step after which the task sources had the `state` that they are set back to.
        state: state of the task sources.
        events: the draws and steps since, in order.
        outstanding: tasks that were drawn and are in no step yet, by draw.
        attempts: the episodes in the journal, by draw.
        steps: the steps in the journal.
        draws: the draws in the journal.
        task_metrics: by step, the metrics of the task sources, for steps that they were taken through again.
        damaged: files of the journal with records that cannot be read, or are missing.
    """

    directory: Path
    step: int = 0
    state_step: int = 0
    state: Mapping[str, Json] = field(default_factory=dict[str, Json])
    events: list[DrawRecord | StepRecord] = field(default_factory=list["DrawRecord | StepRecord"])
    outstanding: dict[int, DrawRecord] = field(default_factory=dict[int, DrawRecord])
    attempts: dict[int, list[Episode]] = field(default_factory=dict[int, list[Episode]])
    steps: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    draws: dict[int, DrawRecord] = field(default_factory=dict[int, DrawRecord])
    task_metrics: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    damaged: list[Path] = field(default_factory=list[Path])

    def groups(self, step: int) -> Sequence[table.StepGroup]:
        """Return the groups of a step, from its table or from the journal.

        Raises:
            UsageError: they are not in the run's directory any more.
        """
        path = table_path(self.directory, step)
        if path.exists():
            return read_groups(path)
        record = self.steps.get(step)
        is_known = record is not None and all(member.draw in self.draws for member in record.groups)
        if record is not None and self.damaged and not is_known:
            raise UsageError(f"{self.damaged[0]} is damaged where it says what was drawn for step {step}")
        if record is None or not is_known:
            raise UsageError(f"{path} is gone, and the journal holds its episodes no more; {REMEDY}")
        return [
            make_step_group(self.draws[member.draw], self.attempts.get(member.draw, []), member)
            for member in record.groups
        ]


def read_groups(path: Path) -> Sequence[table.StepGroup]:
    """Return the groups in a table; a UsageError says that it cannot be read."""
    try:
        return table.read(path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def check_table(path: Path) -> None:
    """Check that a table is there and whole; a UsageError says that it is not."""
    try:
        table.check(path)
    except FileNotFoundError:
        raise UsageError(f"{path} is gone; {REMEDY}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}; {REMEDY}") from error


def table_path(directory: Path, step: int) -> Path:
    """Return where the episodes of a step are."""
    return directory / "episodes" / f"step={step:06d}" / "episodes.parquet"


def evaluation_path(directory: Path, step: int) -> Path:
    """Return where the episodes are that measured the weights of a step."""
    return directory / "evaluations" / f"step={step:06d}" / "episodes.parquet"


def state_path(directory: Path, step: int) -> Path:
    """Return where the state of the task sources after a step is."""
    return directory / "state" / f"step={step:06d}.json"


def list_state_steps(directory: Path) -> list[int]:
    """Return the steps whose state is kept."""
    folder = directory / "state"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for found in map(_STATE.fullmatch, names) if found)


def make_step_group(draw: DrawRecord, attempts: Sequence[Episode], member: GroupRecord) -> table.StepGroup:
    """Make a group of a step from all its attempts: of each rollout, the last one is the group's own."""
    final = {episode.member: episode for episode in sorted(attempts, key=lambda episode: episode.attempt)}
    episodes = tuple(final[number] for number in sorted(final) if number < member.size)
    return table.StepGroup(Group(draw.env, draw.task, draw.draw, episodes), member.is_trained, attempts)


def upsert_attempt(attempts: list[Episode], episode: Episode) -> None:
    """Add an episode, in the place of itself where it was recorded before it had its reward."""
    for place, before in enumerate(attempts):
        if (before.member, before.attempt) == (episode.member, episode.attempt):
            attempts[place] = episode
            return
    attempts.append(episode)


def load_resume_history(directory: Path) -> History:
    """Return everything that is needed to go on.

    Raises:
        UsageError: the directory's files do not belong together, or are damaged where that matters.
    """
    history, events = _read(directory)
    drawn_in = {event.draw: segment for segment, event in events if isinstance(event, DrawRecord)}
    earliest = min((drawn_in[draw] for draw in history.outstanding), default=history.step + 1)
    usable = [step for step in list_state_steps(directory) if step <= history.step and step < earliest]
    if not usable:
        raise UsageError(f"{state_path(directory, earliest - 1)}, the state of the task sources, is gone; {REMEDY}")
    history.state_step = usable[-1]
    path = state_path(directory, history.state_step)
    try:
        history.state = jsonl.read_object(path)
    except UsageError as error:
        raise UsageError(f"{error}; {REMEDY}") from None
    unknown = [step for step in range(history.state_step + 1, history.step + 1) if step not in history.steps]
    if unknown:  # the task sources cannot be taken through what nobody knows
        raise UsageError(f"{directory / 'journal' / f'{unknown[0]:06d}.log'} is gone; {REMEDY}")
    history.events = [event for segment, event in events if segment > history.state_step]
    return history


def load_history(directory: Path) -> History:
    """Return the steps of a run and what was played since, without what only a run that goes on needs.

    Raises:
        UsageError: the directory's files do not belong together, or are damaged where that matters.
    """
    return _read(directory)[0]


def has_started(directory: Path) -> bool:
    """Say whether a run has drawn a task, or finished anything."""
    drawn = next(iter(read_records(directory / "journal")), None)
    return bool(list_state_steps(directory)) or drawn is not None or _last_trace(directory) is not None


def _read(directory: Path) -> tuple[History, list[tuple[int, DrawRecord | StepRecord]]]:
    """Return the steps and draws, and the same as events in their order, each with its segment of the journal."""
    history = History(directory)
    ended = _steps_ended(directory, history.damaged)
    read = ((record.segment, _event(record, history)) for record in read_records(directory / "journal"))
    events = [(segment, event) for segment, event in read if event is not None and segment <= ended.stop]
    tables = set(ended).difference(event.step for _, event in events if isinstance(event, StepRecord))
    for step in sorted(tables):  # its record is lost, and its table is there
        groups = [GroupRecord(one.group.draw, one.is_trained, len(one.group.episodes)) for one in history.groups(step)]
        events.insert(sum(segment <= step for segment, _ in events), (step, StepRecord(step, groups)))
    history.draws = {event.draw: event for _, event in events if isinstance(event, DrawRecord)}
    history.steps = {event.step: event for _, event in events if isinstance(event, StepRecord)}
    history.step = max(history.steps, default=ended.start - 1)
    last = _last_trace(directory)
    if last is not None and last[0] > history.step:
        lost = history.step + 1 if list_segments(directory / "journal") else last[0] + 1
        raise UsageError(
            f"{directory / 'journal' / f'{lost:06d}.log'} is gone or damaged: the journal knows {history.step or 'no'} "
            f"steps, and {last[1]} is of step {last[0]}; {REMEDY}"
        )
    trained = {group.draw for record in history.steps.values() for group in record.groups}
    history.outstanding = {draw: event for draw, event in history.draws.items() if draw not in trained}
    return history, events


def _last_trace(directory: Path) -> tuple[int, Path] | None:
    """Return the last step of which something is written outside of the journal, where it is written later."""
    measured, saved = directory / "metrics.jsonl", directory / "checkpoints.jsonl"
    tables = [(int(found[1]), path) for path in directory.glob("episodes/*") if (found := _TABLE.fullmatch(path.name))]
    return max(
        [
            *((step, path) for step, path in tables if table_path(directory, step).exists()),
            *((step, state_path(directory, step)) for step in list_state_steps(directory)),
            *((step, measured) for step, _ in jsonl.read_metrics(measured)),
            *((line["step"], saved) for line in jsonl.read(saved) if isinstance(line.get("step"), int)),
        ],
        default=None,
    )


def _steps_ended(directory: Path, damaged: list[Path]) -> range:
    """Return the steps whose groups are complete, of those whose segments are there.

    A table and a state are written when the record of their step is on the disk; a table tells as much as the record.
    A segment can outlive the end of the one before only in a power cut, before anything in it was on the disk for sure;
    it is left out.
    """
    folder, kept = directory / "journal", list_state_steps(directory)
    recorded = {
        record.segment for record in read_records(folder, damaged=damaged.append) if record.kind is RecordKind.STEP
    }
    # What follows the oldest state that is kept is still needed, and a state is written after the record of its step.
    damaged += [folder / f"{step:06d}.log" for step in kept if step > kept[0] and step not in recorded]
    numbers = [number for number, _ in list_segments(folder)]
    ended = range(numbers[0], numbers[0]) if numbers else range(1, 1)
    for number, path in list_segments(folder):
        if number not in recorded and not table_path(directory, number).exists():
            if number != numbers[-1] and (path in damaged or number in kept):
                raise UsageError(f"{path} is damaged where it says what step {number} is made of")
            break
        ended = range(ended.start, number + 1)
    return ended


def _event(record: Record, history: History) -> DrawRecord | StepRecord | None:
    match record.kind:
        case RecordKind.DRAW:
            content = json.loads(record.content)
            return DrawRecord(content["draw"], content["env"], content["task"])
        case RecordKind.STEP:
            content = json.loads(record.content)
            groups = cast("list[dict[str, Any]]", content["groups"])
            return StepRecord(
                content["step"], [GroupRecord(group["draw"], group["counts"], group["size"]) for group in groups]
            )
        case RecordKind.EPISODE:
            draw = int.from_bytes(record.content[:DRAW_BYTES], "little")
            upsert_attempt(history.attempts.setdefault(draw, []), codec.decode(record.content[DRAW_BYTES:]))
            return None
