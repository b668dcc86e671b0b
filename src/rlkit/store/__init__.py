"""The run directory: the complete record of a run, in files that other tools can read.

Invariant: a finished episode or step survives the process, and is on the disk before the run trains on it. A reader
sees complete files, except for the last line of a `.jsonl` file. One process at a time writes to a run.
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
from rlkit._util.files import json_lines
from rlkit._util.files.lock import LockFile, find_holder
from rlkit._util.threads import in_thread, start_task
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.run_config import is_run_directory
from rlkit.env import Task
from rlkit.errors import UsageError
from rlkit.metrics.rewards import drop_copies
from rlkit.store import codec, history, table
from rlkit.store.history import DrawRecord, GroupRecord, History
from rlkit.store.journal import Journal, RecordKind
from rlkit.store.metadata import RunMetadata
from rlkit.store.table import RecordedGroup
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.types import Checkpoint, Episode, Group, Json, TokenPiece


class RunStore:
    """The directory of one run, locked by one process at a time.

    A failed write raises `RunFailed`, at once or when its result is awaited.

    Args:
        directory: created if missing. A run without results is replaced; a run with results is an error.
        resolved: configuration, written without its secrets and with the origin of each value.
        resume: continue the run in the directory; an error if there is none.

    Raises:
        UsageError: the directory is not as `resume` requires, or another process writes to it.
    """

    def __init__(self, directory: Path, *, resolved: ResolvedConfig, resume: bool = False) -> None:
        self.directory = directory
        if resume and not is_run_directory(directory):
            raise UsageError(f"{directory} holds no run to resume: it has no run.json")
        self._lock = acquire_lock(directory)
        try:
            self.metadata = RunMetadata(directory, resolved, resume=resume)
            self.measured_steps = {step for step, _ in self.read_metrics()}
            """Steps whose metrics are written."""
            checkpoints(directory)  # report a damaged file before anything is written
        except BaseException:
            self._lock.close()
            raise
        sizes = {"env": len(resolved.config.envs), "eval": len(resolved.config.eval.envs)}
        self._single_envs = [family for family, size in sizes.items() if size == 1]
        self._journal: Journal | None = None
        self.step = 0  # last step whose groups are complete
        self._step_writes: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def open(
        self,
        initial: Mapping[str, Json],
        *,
        piece: Callable[[int], TokenPiece],
        replay: Callable[[History], None] = lambda history: None,
    ) -> History:
        """Open the journal for writing, and return the history of the run so far.

        Args:
            initial: state of the task sources before the first draw of a new run.
            piece: returns the text of a single token, for people who read the tables.
            replay: called with the history before anything is written; may reject it with an error.

        Raises:
            UsageError: the run cannot be resumed; the disk is unchanged.
        """
        if not self.metadata.has_state and not history.has_started(self.directory):
            files.write_text(history.state_path(self.directory, 0), codec.to_json(initial))
        past = history.load_resume_history(self.directory)
        self._check_tables(past)
        missing_tables = {  # the process died before it wrote these
            path: past.groups(step)
            for step in past.steps
            if not (path := history.table_path(self.directory, step)).exists()
        }
        replay(past)
        self.metadata.mark_running(has_state=True)
        self._pieces = PieceWriter(pieces_path(self.directory), piece)
        for path, groups in missing_tables.items():
            self._write_table(path, groups)
        self.step = past.step
        self._journal = Journal(self.directory / "journal", segment=past.step + 1)
        # Draw → segment of the journal that records it; here at least the first after the state that is restored.
        self._segments = dict.fromkeys(past.outstanding, past.state_step + 1)
        self._draws = dict(past.outstanding)
        self._attempts = {draw: list(past.attempts.get(draw, [])) for draw in past.outstanding}
        return past

    def _check_tables(self, past: History) -> None:
        """Check the tables of the steps after the last usable checkpoint, which a resumed run replays."""
        measured, now_s = self.find_last_measured_step(past.step), time.time()
        usable = (saved.step for saved in checkpoints(self.directory) if saved.expires is None or saved.expires > now_s)
        first = max((step for step in usable if step <= measured), default=0) + 1
        for step in range(first, past.step + 1):
            path = history.table_path(self.directory, step)
            if step not in past.steps or path.exists():
                history.check_table(path)

    def record_draw(self, task: Task) -> None:
        """Record the draw of a task; later records reach the disk after this one."""
        self._draws[task.draw] = DrawRecord(task.draw, task.name, task.id)
        self._segments[task.draw] = self.step + 1
        self._writer.append(RecordKind.DRAW, codec.to_json(asdict(self._draws[task.draw])).encode())

    def record_episode(self, task: Task, episode: Episode) -> None:
        """Record a finished episode, or the reward that it got once its group was complete.

        The record survives the process, and after `sync` a power cut. Secrets are removed from all text but the tokens.
        """
        episode = self.metadata.redact_episode(episode)
        history.upsert_attempt(self._attempts.setdefault(task.draw, []), episode)
        draw = task.draw.to_bytes(history.DRAW_BYTES, "little")
        self._writer.append(RecordKind.EPISODE, draw + codec.encode(episode))

    async def sync(self) -> None:
        """Wait until every record is on the disk."""
        await self._writer.sync()

    def record_step(self, groups: Sequence[GroupRecord], state: Mapping[str, Json]) -> Awaitable[None]:
        """Record the complete groups of the next step, and return an awaitable that waits for the disk.

        The table of the groups and the state of the task sources are written in the background. A failure to write
        the table of an earlier step is raised here.

        Args:
            state: state of the task sources after they observed these groups.
        """
        if self._step_writes is not None and self._step_writes.done():
            self._step_writes.result()
        self.step += 1
        recorded = list[RecordedGroup]()
        for group in groups:
            recorded.append(history.make_group(self._draws.pop(group.draw), self._attempts.pop(group.draw, []), group))
            del self._segments[group.draw]
        group_fields = [{"draw": group.draw, "counts": group.is_trained, "size": group.size} for group in groups]
        self._writer.append(RecordKind.STEP, codec.to_json({"step": self.step, "groups": group_fields}).encode())
        was_retrying, self.metadata.retry_failed = self.metadata.retry_failed, False  # retries end with the step
        synced = start_task(self._writer.sync())
        step, state_text, earlier_writes = self.step, codec.to_json(state), self._step_writes
        oldest_segment = min(self._segments.values(), default=step + 1)

        async def write_files() -> None:
            if earlier_writes is not None:
                await asyncio.shield(earlier_writes)
            await asyncio.shield(synced)
            with files.report_write_errors(self.directory):
                await in_thread(self._write_table, history.table_path(self.directory, step), recorded)
                await in_thread(files.write_text, history.state_path(self.directory, step), state_text)
                if was_retrying:
                    self.metadata.write()
            self._delete_before(oldest_segment)

        self._step_writes = asyncio.create_task(write_files())
        return synced

    def _delete_before(self, segment: int) -> None:
        """Delete the states and segments that are not needed to repeat the draws from `segment` on."""
        state_steps = history.list_state_steps(self.directory)
        # A draw in segment n is repeated from the state after step n − 1.
        needed = max(step for step in state_steps if step < segment)
        for step in state_steps:
            if step < needed:
                history.state_path(self.directory, step).unlink(missing_ok=True)
        self._writer.drop_through(needed)

    async def read_groups(self, step: int) -> Sequence[RecordedGroup]:
        """Return the groups of an earlier step."""
        await self.flush()
        return await in_thread(history.read_groups, history.table_path(self.directory, step))

    async def flush(self) -> None:
        """Wait until all tables are on the disk."""
        if self._step_writes is not None:
            await self._step_writes

    async def close(self) -> None:
        """Write the remaining records and close the journal."""
        if self._journal is not None:
            try:
                await asyncio.gather(self.flush(), return_exceptions=True)  # a resumed run writes missing tables
            finally:
                journal, self._journal = self._journal, None
                await journal.close()

    async def write_evaluation(self, step: int, groups: Sequence[tuple[Group, Sequence[Episode]]]) -> None:
        """Write the groups of the evaluation of a step's weights, each with all its attempts."""
        recorded = list[RecordedGroup]()
        for group, attempts in groups:
            draw = DrawRecord(group.draw, group.env, group.task)
            record = GroupRecord(group.draw, True, len(group.episodes))
            redacted = [self.metadata.redact_episode(episode) for episode in attempts]
            recorded.append(history.make_group(draw, redacted, record))
        with files.report_write_errors(self.directory):
            await in_thread(self._write_table, history.table_path(self.directory, step, kind="evaluation"), recorded)

    def _write_table(self, path: Path, groups: Sequence[RecordedGroup]) -> None:
        turns = [turn for group in groups for episode in group.attempts for turn in episode.turns]
        self._pieces.add(tokens for turn in turns for tokens in (turn.prompt.tokens, turn.completion))
        table.write(path, groups)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line to metrics.jsonl, without the copies `…/all/…` of one environment; NaN and infinity are null."""
        own = drop_copies(metrics, self._single_envs)
        values = {name: value if math.isfinite(value) else None for name, value in own.items()}
        self._append("metrics.jsonl", {"step": step, **values})
        self.measured_steps.add(step)

    def read_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return the steps and their finite metrics, read from the disk."""
        return history.read_metrics(self.directory / "metrics.jsonl")

    def find_last_measured_step(self, step: int) -> int:
        """Return the last step, at most `step`, up to which every step has metrics; 0 for none."""
        first = min({1} | self.measured_steps)  # step 0 has metrics if the initial weights are evaluated
        gaps = (number for number in range(first, step + 1) if number not in self.measured_steps)
        return max(next(gaps, step + 1) - 1, 0)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint to checkpoints.jsonl."""
        self._append("checkpoints.jsonl", asdict(checkpoint))

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record in checkpoints.jsonl that a checkpoint was deleted."""
        self._append("checkpoints.jsonl", {"step": checkpoint.step, "deleted": checkpoint.state})

    @property
    def _writer(self) -> Journal:
        if self._journal is None:
            raise RuntimeError("the store is not open")
        return self._journal

    def _append(self, name: str, record: Mapping[str, Json]) -> None:
        with files.report_write_errors(self.directory):
            json_lines.append(self.directory / name, record)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run that were not deleted, oldest first; the service may have dropped some.

    A later line of the same checkpoint replaces its expiry. A damaged file is a `UsageError`.
    """
    path = directory / "checkpoints.jsonl"
    saved, deleted = dict[str, Checkpoint](), set[str]()
    for line in json_lines.read_lines(path):
        match line:
            case {"deleted": state}:
                deleted.add(str(state))
            case {"step": int(step), "state": str(state), "sampler": str(sampler), "expires": float() | None as expiry}:
                saved[state] = Checkpoint(step, state, sampler, expiry)
            case _:
                raise UsageError(f"{path} is damaged: a line is not a checkpoint")
    return [checkpoint for state, checkpoint in saved.items() if state not in deleted]


def acquire_lock(directory: Path) -> LockFile:
    """Create and lock a run's directory, and return the file that releases the lock when it is closed.

    Raises:
        UsageError: another process holds the lock, or the directory cannot be written.
    """
    try:
        files.make_folder(directory)
        file = LockFile(directory / "lock")
        holder = file.acquire()
    except FileExistsError as error:
        raise UsageError(f"{directory} is a file, but a run needs a folder: choose another `name` (--name)") from error
    except OSError as error:
        remedy = "set RLKIT_RUNS_DIR to a writable folder"
        raise UsageError(f"cannot write to {directory}: {error.strerror}; {remedy}") from error
    if holder is not None:
        file.close()
        raise UsageError(f"another process is writing to {directory}: process {holder}")
    return file


def find_lock_holder(directory: Path) -> str | None:
    """Return the id of the process that holds the lock of a run's directory, or None if the lock is free."""
    return find_holder(directory / "lock")
