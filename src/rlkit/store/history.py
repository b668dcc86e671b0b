"""Reading a run back, so that it can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from rlkit.errors import UsageError
from rlkit.store import codec, table
from rlkit.store.journal import Kind, Record, records, segments
from rlkit.types import Episode, Group, Json

DRAW_BYTES = 8


@dataclass(frozen=True, slots=True)
class Draw:
    """A task was drawn."""

    draw: int
    env: str
    task: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The groups of a step were complete: draws, in the order in which the step takes them; see `StepGroup.counts`."""

    step: int
    draws: Sequence[int]
    counts: Sequence[bool]


@dataclass(slots=True, eq=False)
class History:
    """What is known of a run.

    Args:
        directory: of the run.
        step: the last one whose groups are complete; 0 for none.
        since: the step whose state the task sources are set back to.
        state: that state.
        events: what happened since, in order.
        outstanding: tasks that were drawn and are in no step yet, by draw.
        attempts: the episodes in the journal, by draw.
        steps: the steps in the journal.
        draws: the draws in the journal.
    """

    directory: Path
    step: int = 0
    since: int = 0
    state: Mapping[str, Json] = field(default_factory=dict[str, Json])
    events: list[Draw | StepRecord] = field(default_factory=list["Draw | StepRecord"])
    outstanding: dict[int, Draw] = field(default_factory=dict[int, Draw])
    attempts: dict[int, list[Episode]] = field(default_factory=dict[int, list[Episode]])
    steps: dict[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    draws: dict[int, Draw] = field(default_factory=dict[int, Draw])

    def groups(self, step: int) -> Sequence[table.StepGroup]:
        """The groups of a step, from its table or from the journal.

        Raises:
            UsageError: they are not in the run's directory any more.
        """
        path = table_path(self.directory, step)
        if path.exists():
            return read_groups(path)
        record = self.steps.get(step)
        if record is None:
            raise UsageError(f"{self.directory}: the episodes of step {step} are gone; the run cannot be resumed")
        pairs = zip(record.draws, record.counts, strict=True)
        return [step_group(self.draws[draw], self.attempts.get(draw, []), counts) for draw, counts in pairs]


def read_groups(path: Path) -> Sequence[table.StepGroup]:
    """The groups in a table.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return table.read(path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def table_path(directory: Path, step: int) -> Path:
    """Where the episodes of a step are."""
    return directory / "episodes" / f"step={step:06d}" / "episodes.parquet"


def state_path(directory: Path, step: int) -> Path:
    """Where the state of the task sources after a step is."""
    return directory / "state" / f"step={step:06d}.json"


def states(directory: Path) -> list[int]:
    """The steps whose state is kept."""
    return sorted(int(path.stem.partition("=")[2]) for path in (directory / "state").glob("step=*.json"))


def step_group(draw: Draw, attempts: Sequence[Episode], counts: bool) -> table.StepGroup:
    """A group of a step from all its attempts: of each member, the last one is the group's own."""
    final = {episode.member: episode for episode in sorted(attempts, key=lambda episode: episode.attempt)}
    episodes = tuple(final[member] for member in sorted(final))
    return table.StepGroup(Group(draw.env, draw.task, draw.draw, episodes), counts, attempts)


def load(directory: Path) -> History:
    """Everything that is needed to go on.

    Raises:
        UsageError: the directory's files do not belong together.
    """
    history = History(directory)
    found: list[tuple[int, Draw | StepRecord]] = []
    for record in records(directory / "journal"):
        event = _event(record, history)
        if event is not None:
            found.append((record.segment, event))
    drawn_in = {event.draw: segment for segment, event in found if isinstance(event, Draw)}
    history.draws = {event.draw: event for _, event in found if isinstance(event, Draw)}
    history.steps = {event.step: event for _, event in found if isinstance(event, StepRecord)}
    tables = [int(path.parent.name.partition("=")[2]) for path in directory.glob("episodes/step=*/episodes.parquet")]
    history.step = max([0, *history.steps, *tables])
    held = {number for number, _ in segments(directory / "journal")}
    for step in sorted(held.intersection(tables).difference(history.steps)):  # the record is torn, the table is whole
        groups = history.groups(step)
        record = StepRecord(step, [one.group.draw for one in groups], [one.counts for one in groups])
        history.steps[step] = record
        found.insert(sum(segment <= step for segment, _ in found), (step, record))
    trained = {draw for record in history.steps.values() for draw in record.draws}
    history.outstanding = {draw: event for draw, event in history.draws.items() if draw not in trained}
    earliest = min((drawn_in[draw] for draw in history.outstanding), default=history.step + 1)
    usable = [step for step in states(directory) if step <= history.step and step < earliest]
    if not usable:
        raise UsageError(f"{directory}: no state of the task sources is left; the run cannot be resumed")
    history.since = usable[-1]
    try:
        history.state = json.loads(state_path(directory, history.since).read_text())
    except ValueError as error:
        raise UsageError(f"{state_path(directory, history.since)} is damaged: {error}") from error
    history.events = [event for segment, event in found if segment > history.since]
    return history


def _event(record: Record, history: History) -> Draw | StepRecord | None:
    match record.kind:
        case Kind.DRAW:
            content = json.loads(record.content)
            return Draw(content["draw"], content["env"], content["task"])
        case Kind.STEP:
            content = json.loads(record.content)
            groups = cast("list[dict[str, Json]]", content["groups"])
            draws = [cast("int", group["draw"]) for group in groups]
            return StepRecord(content["step"], draws, [bool(group["counts"]) for group in groups])
        case Kind.EPISODE:
            draw = int.from_bytes(record.content[:DRAW_BYTES], "little")
            history.attempts.setdefault(draw, []).append(codec.decode(record.content[DRAW_BYTES:]))
            return None
