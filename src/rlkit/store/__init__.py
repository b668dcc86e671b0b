"""The run directory: everything that is known about a run, in files that other tools can read.

Invariant: what was finished outlives the process, and is on the disk before it is trained on; a reader never sees half
a file, only at worst a torn last line of a `.jsonl` file, which it can tell. One process writes to a run at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rlkit._util import files
from rlkit._util.threads import in_thread
from rlkit.config import Resolved
from rlkit.env import Task
from rlkit.errors import RunFailed, UsageError
from rlkit.store import codec, lines, table
from rlkit.store.about import About, holds_run
from rlkit.store.episode_redaction import without_secrets
from rlkit.store.history import (
    DRAW_BYTES,
    Draw,
    History,
    Member,
    check_table,
    evaluation_path,
    has_begun,
    keep_last,
    load,
    read_groups,
    state_path,
    states,
    step_group,
    table_path,
)
from rlkit.store.journal import Journal, Kind, unwritable
from rlkit.store.lock import lock
from rlkit.store.table import StepGroup
from rlkit.types import Checkpoint, Episode, Group, Json, Tokens


class RunStore:
    """The directory of one run, held by one process at a time.

    Args:
        directory: of the run; it is made. A run that finished nothing is replaced; any other is not.
        resolved: the configuration, written redacted with the origin of each value.
        resume: go on with the run that is there.

    Raises:
        UsageError: the directory holds a run and `resume` is not set, or it holds none and it is; or another process
            writes to it.
    """

    def __init__(self, directory: Path, *, resolved: Resolved, resume: bool = False) -> None:
        self.directory = directory
        if resume and not holds_run(directory):
            raise UsageError(f"{directory} holds no run to resume: it has no run.json")
        self._lock = lock(directory)
        try:
            self.about = About(directory, resolved, resume=resume)
            self._measured = {step for step, _ in self.metrics}
            self.checkpoints()  # one that is damaged is named before anything is written
        except BaseException:
            self._lock.close()
            raise
        self._journal: Journal | None = None
        self._decode: Callable[[Tokens], str] = lambda tokens: ""
        self._drawn_in: dict[int, int] = {}
        self._draws: dict[int, Draw] = {}
        self._attempts: dict[int, list[Episode]] = {}
        self._step = 0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """The last step whose groups are complete."""
        return self._step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def open(
        self,
        initial: Mapping[str, Json],
        *,
        decode: Callable[[Tokens], str],
        replay: Callable[[History], None] = lambda history: None,
    ) -> History:
        """Begin to write; what is known of the run so far.

        Args:
            initial: the state of the task sources before the first draw, kept for a new run.
            decode: tokens to text, for people who read the tables.
            replay: called with what was read, before anything is written; may refuse it with an error.

        Raises:
            UsageError: the run cannot be resumed. Nothing is changed on the disk then.
        """
        if not self.about.has_state and not has_begun(self.directory):
            files.write_text(state_path(self.directory, 0), codec.dump(initial))
        history = load(self.directory)
        self._check_tables(history)
        unwritten = {  # their process died before it wrote them
            path: history.groups(step)
            for step in history.steps
            if not (path := table_path(self.directory, step)).exists()
        }
        replay(history)
        self.about.has_state = True
        self.about.begin()
        self._decode = decode
        for path, groups in unwritten.items():
            table.write(path, groups, decode=decode)
        self._step = history.step
        self._journal = Journal(self.directory / "journal", segment=history.step + 1)
        self.expect(history)
        return history

    def _check_tables(self, history: History) -> None:
        """Check the tables of the steps that are taken again, as far as the checkpoints that were written down say.

        Raises:
            UsageError: one is damaged or gone.
        """
        measured, now_s = self.measured(history.step), time.time()
        saved = (one.step for one in self.checkpoints() if one.expires is None or one.expires > now_s)
        begin = max((step for step in saved if step <= measured), default=0)
        for step in range(begin + 1, history.step + 1):
            if step not in history.steps or table_path(self.directory, step).exists():
                check_table(table_path(self.directory, step))

    def expect(self, history: History) -> None:
        """Go on with the groups that are outstanding, those too whose draws were lost and made again."""
        # All of them were drawn after the state that the sources are set back to.
        self._drawn_in = dict.fromkeys(history.outstanding, history.since + 1)
        self._draws = dict(history.outstanding)
        self._attempts = {draw: list(history.attempts.get(draw, [])) for draw in history.outstanding}

    def record_draw(self, task: Task) -> None:
        """A task was drawn. What is recorded later is not on the disk before this.

        Raises:
            RunFailed: it cannot be written.
        """
        self._draws[task.draw] = Draw(task.draw, task.name, task.id)
        self._drawn_in[task.draw] = self._step + 1
        record = {"draw": task.draw, "env": task.name, "task": task.id}
        self._writer.append(Kind.DRAW, codec.dump(record).encode())

    def record_episode(self, task: Task, episode: Episode) -> None:
        """An episode ended, or has its reward now that its group is complete.

        The end of the process cannot undo that any more, and after `sync` nor can a power cut.

        What it says, other than what the model was given and said, is written without secrets.

        Raises:
            RunFailed: it cannot be written.
        """
        episode = self._without_secrets(episode)
        keep_last(self._attempts.setdefault(task.draw, []), episode)
        draw = task.draw.to_bytes(DRAW_BYTES, "little")
        self._writer.append(Kind.EPISODE, draw + codec.encode(episode))

    async def sync(self) -> None:
        """Return when all that was recorded is on the disk.

        Raises:
            RunFailed: it cannot be written.
        """
        await self._writer.sync()

    def record_step(self, groups: Sequence[Member], state: Mapping[str, Json]) -> Awaitable[None]:
        """The groups of the next step are complete; await what comes back to know that this is on the disk.

        Their table, and the state of the task sources, are written behind the run's back.

        Args:
            groups: in the order in which the step takes them.
            state: of the task sources, after they were told of these groups.

        Raises:
            RunFailed: this, or an earlier step's table, cannot be written.
        """
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()  # what cannot be written ends the run, and not only at its end
        self._step += 1
        kept = [step_group(self._draws.pop(one.draw), self._attempts.pop(one.draw, []), one) for one in groups]
        for one in groups:
            del self._drawn_in[one.draw]
        record = {"step": self._step, "groups": [asdict(one) for one in groups]}
        self._writer.append(Kind.STEP, codec.dump(record).encode())
        retried = self.about.retries_failed
        self.about.retries_failed = False
        written = asyncio.create_task(self._writer.sync())
        written.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        oldest = min(self._drawn_in.values(), default=self._step + 1)
        self._keeping = asyncio.create_task(
            self._keep(self._keeping, written, self._step, kept, codec.dump(state), before=oldest, retried=retried)
        )
        return written

    async def groups(self, step: int) -> Sequence[StepGroup]:
        """The groups of an earlier step."""
        await self.settle()
        return await in_thread(read_groups, table_path(self.directory, step))

    async def settle(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            RunFailed: something cannot be written.
        """
        if self._keeping is not None:
            await self._keeping

    async def close(self) -> None:
        """Write what is left, and stop writing."""
        if self._journal is not None:
            try:
                await asyncio.gather(self.settle(), return_exceptions=True)
            finally:
                journal, self._journal = self._journal, None
                await journal.close()

    async def keep_evaluation(self, step: int, tried: Sequence[tuple[Group, Sequence[Episode]]]) -> None:
        """Write the episodes that measured the weights of a step: of each group, all its attempts.

        Raises:
            RunFailed: they cannot be written.
        """
        kept = [
            step_group(
                Draw(group.draw, group.env, group.task),
                [self._without_secrets(episode) for episode in attempts],
                Member(group.draw, True, len(group.episodes)),
            )
            for group, attempts in tried
        ]
        try:
            await in_thread(lambda: table.write(evaluation_path(self.directory, step), kept, decode=self._decode))
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def used(self) -> Mapping[str, Json]:
        """What `keep_used` was given last.

        Raises:
            UsageError: the file is damaged.
        """
        path = self.directory / "usage.json"
        return lines.read_object(path) if path.exists() else {}

    def keep_used(self, used: Mapping[str, Json]) -> None:
        """What the run has used, for the process that goes on with it.

        Raises:
            RunFailed: it cannot be written.
        """
        try:
            files.write_text(self.directory / "usage.json", json.dumps(dict(used)) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl: `{"step": 3, "env/arithmetic/reward/mean": 0.5, …}`; null where not finite.

        Raises:
            RunFailed: it cannot be written.
        """
        written = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, **written})
        self._measured.add(step)

    @property
    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """What `add_metrics` was given so far, without what is not finite; read from the disk."""
        return lines.numbers(self.directory / "metrics.jsonl")

    def has_metrics(self, step: int) -> bool:
        """Whether a step's line is written."""
        return step in self._measured

    @property
    def first_measured(self) -> int | None:
        """The first step whose line is written."""
        return min(self._measured, default=None)

    def measured(self, step: int) -> int:
        """The last step up to `step` before which no line is missing; 0 for none."""
        first = min(self.first_measured or 0, 1)  # step 0 has a line where weights are evaluated before the first step
        gaps = (number for number in range(first, step + 1) if number not in self._measured)
        return max(next(gaps, step + 1) - 1, 0)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """One line of checkpoints.jsonl.

        Raises:
            RunFailed: it cannot be written.
        """
        self._append("checkpoints.jsonl", asdict(checkpoint))

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """One line of checkpoints.jsonl that says that it was deleted.

        Raises:
            RunFailed: it cannot be written.
        """
        self._append("checkpoints.jsonl", {"step": checkpoint.step, "deleted": checkpoint.state})

    def checkpoints(self) -> list[Checkpoint]:
        """All that were written and not deleted, oldest first, whether or not the service still has them."""
        return checkpoints(self.directory)

    @property
    def _writer(self) -> Journal:
        if self._journal is None:
            raise RuntimeError("the store is not open")
        return self._journal

    async def _keep(
        self,
        earlier: asyncio.Task[None] | None,
        written: asyncio.Task[None],
        step: int,
        groups: Sequence[StepGroup],
        state: str,
        *,
        before: int,
        retried: bool,
    ) -> None:
        if earlier is not None:
            await earlier
        await asyncio.shield(written)  # a step is a step once its record says so
        try:
            await in_thread(self._write_step, step, groups, state)
            if retried:
                self.about.write()
        except OSError as error:
            raise self._unwritable(error) from error
        # What was drawn in segment n is drawn again from the state after step n − 1.
        known = states(self.directory)
        needed = max(kept for kept in known if kept < before)
        for kept in known:
            if kept < needed:
                state_path(self.directory, kept).unlink(missing_ok=True)
        self._writer.drop_through(needed)

    def _write_step(self, step: int, groups: Sequence[StepGroup], state: str) -> None:
        table.write(table_path(self.directory, step), groups, decode=self._decode)
        files.write_text(state_path(self.directory, step), state)

    def _without_secrets(self, episode: Episode) -> Episode:
        return without_secrets(episode, self.about.redactor)

    def _append(self, name: str, record: Mapping[str, Json]) -> None:
        try:
            lines.append(self.directory / name, record)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RunFailed:
        return unwritable(self.directory, error)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints of a run that were written and not deleted, oldest first.

    A later line of the same checkpoint says when it expires now.

    Raises:
        UsageError: the file is damaged.
    """
    path = directory / "checkpoints.jsonl"
    written = lines.read(path)
    deleted = {line["deleted"] for line in written if isinstance(line.get("deleted"), str)}
    found = [_checkpoint(path, line) for line in written if "deleted" not in line]
    return [saved for saved in {one.state: one for one in found}.values() if saved.state not in deleted]


def _checkpoint(path: Path, line: Mapping[str, Any]) -> Checkpoint:
    match line:
        case {"step": int(step), "state": str(state), "sampler": str(sampler), "expires": float() | None as expires}:
            return Checkpoint(step, state, sampler, expires)
        case _:
            raise UsageError(f"{path} is damaged: a line is no checkpoint")
