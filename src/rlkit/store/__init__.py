"""The run directory: everything that is known about a run, in files that other tools can read.

Invariant: what was finished outlives the process, and is on the disk before it is trained on; a reader never sees half
a file, only at worst a torn last line of a `.jsonl` file, which it can tell. One process writes to a run at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from rlkit._util import files
from rlkit._util.threads import in_thread
from rlkit.config import Resolved
from rlkit.env import Task
from rlkit.errors import UsageError
from rlkit.store import codec, jsonl, table
from rlkit.store.episode_redaction import redact_episode
from rlkit.store.history import (
    DRAW_BYTES,
    DrawRecord,
    GroupRecord,
    History,
    check_table,
    evaluation_path,
    has_started,
    list_state_steps,
    load_resume_history,
    make_step_group,
    read_groups,
    state_path,
    table_path,
    upsert_attempt,
)
from rlkit.store.journal import Journal, RecordKind, report_write_errors
from rlkit.store.lock import acquire_lock
from rlkit.store.metadata import RunMetadata, is_run_directory
from rlkit.store.table import StepGroup
from rlkit.types import Checkpoint, Episode, Group, Json, Tokens


class RunStore:
    """The directory of one run, held by one process at a time.

    What cannot be written raises `RunFailed`, here or when it is awaited.

    Args:
        directory: made if it is missing. A run that finished nothing is replaced; any other is not.
        resolved: the configuration, written redacted with the origin of each value.
        resume: go on with the run in the directory.

    Raises:
        UsageError: the directory holds a run and `resume` is not set, or it holds none and it is; or another process
            writes to it.
    """

    def __init__(self, directory: Path, *, resolved: Resolved, resume: bool = False) -> None:
        self.directory = directory
        if resume and not is_run_directory(directory):
            raise UsageError(f"{directory} holds no run to resume: it has no run.json")
        self._lock = acquire_lock(directory)
        try:
            self.metadata = RunMetadata(directory, resolved, resume=resume)
            self._measured = {step for step, _ in self.read_metrics()}
            self.checkpoints()  # one that is damaged is named before anything is written
        except BaseException:
            self._lock.close()
            raise
        self._journal: Journal | None = None
        self._decode: Callable[[Tokens], str] = lambda tokens: ""
        self._drawn_in: dict[int, int] = {}
        self._draws: dict[int, DrawRecord] = {}
        self._attempts: dict[int, list[Episode]] = {}
        self.step = 0
        """The last step whose groups are complete."""
        self._keeping: asyncio.Task[None] | None = None

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
        """Begin to write, and return what is known of the run so far.

        Args:
            initial: state of the task sources before the first draw of a new run.
            decode: tokens to text, for people who read the tables.
            replay: called with the history before anything is written; may refuse it with an error.

        Raises:
            UsageError: the run cannot be resumed. Nothing is changed on the disk then.
        """
        if not self.metadata.has_state and not has_started(self.directory):
            files.write_text(state_path(self.directory, 0), codec.to_json(initial))
        history = load_resume_history(self.directory)
        self._check_tables(history)
        unwritten = {  # their process died before it wrote them
            path: history.groups(step)
            for step in history.steps
            if not (path := table_path(self.directory, step)).exists()
        }
        replay(history)
        self.metadata.has_state = True
        self.metadata.begin()
        self._decode = decode
        for path, groups in unwritten.items():
            table.write(path, groups, decode=decode)
        self.step = history.step
        self._journal = Journal(self.directory / "journal", segment=history.step + 1)
        # All of the outstanding draws were made after the state that the sources are set back to.
        self._drawn_in = dict.fromkeys(history.outstanding, history.state_step + 1)
        self._draws = dict(history.outstanding)
        self._attempts = {draw: list(history.attempts.get(draw, [])) for draw in history.outstanding}
        return history

    def _check_tables(self, history: History) -> None:
        """Check the tables of the steps that are trained on again, as far as the recorded checkpoints say."""
        measured, now_s = self.find_last_measured_step(history.step), time.time()
        kept = (saved.step for saved in self.checkpoints() if saved.expires is None or saved.expires > now_s)
        begin = max((step for step in kept if step <= measured), default=0)
        for step in range(begin + 1, history.step + 1):
            if step not in history.steps or table_path(self.directory, step).exists():
                check_table(table_path(self.directory, step))

    def record_draw(self, task: Task) -> None:
        """Record that a task was drawn. What is recorded later is not on the disk before this."""
        self._draws[task.draw] = DrawRecord(task.draw, task.name, task.id)
        self._drawn_in[task.draw] = self.step + 1
        record = {"draw": task.draw, "env": task.name, "task": task.id}
        self._writer.append(RecordKind.DRAW, codec.to_json(record).encode())

    def record_episode(self, task: Task, episode: Episode) -> None:
        """Record that an episode ended, or has its reward now that its group is complete.

        The end of the process cannot undo that any more, and after `sync` nor can a power cut. Only the tokens of the
        model are written as they are; all other text is written without secrets.
        """
        episode = redact_episode(episode, self.metadata.make_redactor)
        upsert_attempt(self._attempts.setdefault(task.draw, []), episode)
        draw = task.draw.to_bytes(DRAW_BYTES, "little")
        self._writer.append(RecordKind.EPISODE, draw + codec.encode(episode))

    async def sync(self) -> None:
        """Return when all that was recorded is on the disk."""
        await self._writer.sync()

    def record_step(self, groups: Sequence[GroupRecord], state: Mapping[str, Json]) -> Awaitable[None]:
        """Record that the groups of the next step are complete; the result is awaited until that is on the disk.

        Their table, and the state of the task sources, are written in the background.

        Args:
            groups: the groups, in the order in which the step takes them.
            state: state of the task sources after they observed these groups.

        Raises:
            RunFailed: this, or an earlier step's table, cannot be written.
        """
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()  # what cannot be written ends the run, and not only at its end
        self.step += 1
        kept = list[StepGroup]()
        for member in groups:
            kept.append(make_step_group(self._draws.pop(member.draw), self._attempts.pop(member.draw, []), member))
            del self._drawn_in[member.draw]
        record = {
            "step": self.step,
            "groups": [{"draw": g.draw, "counts": g.is_trained, "size": g.size} for g in groups],
        }
        self._writer.append(RecordKind.STEP, codec.to_json(record).encode())
        retried = self.metadata.retry_failed
        self.metadata.retry_failed = False
        written = asyncio.create_task(self._writer.sync())
        written.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        oldest = min(self._drawn_in.values(), default=self.step + 1)
        self._keeping = asyncio.create_task(
            self._keep(self._keeping, written, self.step, kept, codec.to_json(state), before=oldest, retried=retried)
        )
        return written

    async def read_groups(self, step: int) -> Sequence[StepGroup]:
        """Return the groups of an earlier step."""
        await self.flush()
        return await in_thread(read_groups, table_path(self.directory, step))

    async def flush(self) -> None:
        """Wait until everything is on the disk, the tables too."""
        if self._keeping is not None:
            await self._keeping

    async def close(self) -> None:
        """Write what is left, and stop writing."""
        if self._journal is not None:
            try:
                await asyncio.gather(self.flush(), return_exceptions=True)
            finally:
                journal, self._journal = self._journal, None
                await journal.close()

    async def write_evaluation(self, step: int, tried: Sequence[tuple[Group, Sequence[Episode]]]) -> None:
        """Write the episodes that measured the weights of a step: of each group, all its attempts."""
        kept = [
            make_step_group(
                DrawRecord(group.draw, group.env, group.task),
                [redact_episode(episode, self.metadata.make_redactor) for episode in attempts],
                GroupRecord(group.draw, True, len(group.episodes)),
            )
            for group, attempts in tried
        ]
        with report_write_errors(self.directory):
            await in_thread(lambda: table.write(evaluation_path(self.directory, step), kept, decode=self._decode))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line to metrics.jsonl: `{"step": 3, "env/arithmetic/reward/mean": 0.5, …}`; null where not finite."""
        written = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, **written})
        self._measured.add(step)

    def read_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return the steps and metrics that were added so far, without values that are not finite."""
        return jsonl.read_metrics(self.directory / "metrics.jsonl")

    def has_metrics(self, step: int) -> bool:
        """Whether a step's line is written."""
        return step in self._measured

    @property
    def first_metrics_step(self) -> int | None:
        """The first step whose line is written."""
        return min(self._measured, default=None)

    def find_last_measured_step(self, step: int) -> int:
        """The last step up to `step` before which no line is missing; 0 for none."""
        first = min(
            self.first_metrics_step or 0, 1
        )  # step 0 has a line where weights are evaluated before the first step
        gaps = (number for number in range(first, step + 1) if number not in self._measured)
        return max(next(gaps, step + 1) - 1, 0)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a line to checkpoints.jsonl."""
        self._append("checkpoints.jsonl", asdict(checkpoint))

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a line to checkpoints.jsonl that says that a checkpoint was deleted."""
        self._append("checkpoints.jsonl", {"step": checkpoint.step, "deleted": checkpoint.state})

    def checkpoints(self) -> list[Checkpoint]:
        """Return all that were written and not deleted, oldest first, whether or not the service still has them."""
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
        with report_write_errors(self.directory):
            await in_thread(self._write_step, step, groups, state)
            if retried:
                self.metadata.write()
        # What was drawn in segment n is drawn again from the state after step n − 1.
        known = list_state_steps(self.directory)
        needed = max(kept for kept in known if kept < before)
        for kept in known:
            if kept < needed:
                state_path(self.directory, kept).unlink(missing_ok=True)
        self._writer.drop_through(needed)

    def _write_step(self, step: int, groups: Sequence[StepGroup], state: str) -> None:
        table.write(table_path(self.directory, step), groups, decode=self._decode)
        files.write_text(state_path(self.directory, step), state)

    def _append(self, name: str, record: Mapping[str, Json]) -> None:
        with report_write_errors(self.directory):
            jsonl.append(self.directory / name, record)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run that were written and not deleted, oldest first.

    A later line of the same checkpoint says when it expires now.

    Raises:
        UsageError: the file is damaged.
    """
    path = directory / "checkpoints.jsonl"
    saved, deleted = dict[str, Checkpoint](), set[str]()
    for line in jsonl.read(path):
        match line:
            case {"deleted": state}:
                deleted.add(str(state))
            case {"step": int(step), "state": str(state), "sampler": str(sampler), "expires": float() | None as expiry}:
                saved[state] = Checkpoint(step, state, sampler, expiry)
            case _:
                raise UsageError(f"{path} is damaged: a line is no checkpoint")
    return [checkpoint for state, checkpoint in saved.items() if state not in deleted]
