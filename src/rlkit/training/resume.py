"""Resumption of a run: restore its weights, its tasks and its finished episodes.

Invariant: a resumed run has the weights and draws the tasks that it would have without the interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkit._util.seeds import derive_seed
from rlkit.config.schema import Config
from rlkit.env import Task
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.rollout.player import GroupProgress
from rlkit.service import Learner, Service
from rlkit.store import RunStore, checkpoints
from rlkit.store.history import DrawRecord, History, StepRecord, state_path
from rlkit.tasks.sources import Mixture


@dataclass(frozen=True, slots=True)
class Resumption:
    """State of an interrupted run; empty for a new run."""

    step: int  # last step whose groups are on the disk
    waiting: Sequence[Task]  # drawn tasks that are in no step yet
    interrupted: Mapping[int, GroupProgress]  # finished episodes of these tasks, by draw
    task_metrics: Mapping[int, Mapping[str, float]]  # metrics of the task sources by step, for steps that are replayed


def redraw_tasks(history: History, sources: Mixture) -> list[Task]:
    """Repeat the draws and steps after the recorded state of the task sources; return the tasks that are in no step.

    The metrics of the sources after each step are added to `history.task_metrics`. Draws that a damaged journal has
    lost are repeated and added to `history`; if a repeated draw may be another task, its episodes are removed.

    Raises:
        UsageError: the sources draw other tasks than before.
    """
    if not history.state_step and not history.events:
        return []
    try:
        sources.load_state_dict(history.state)
    except (EnvironmentFault, UsageError):
        raise
    except Exception as error:  # the source rejects its recorded state
        path = state_path(history.directory, history.state_step)
        raise UsageError(f"{path}: the task sources cannot load it: {type(error).__name__}: {error}") from error
    history.task_metrics[history.state_step] = sources.metrics()
    replay = _TaskReplay(history, sources)
    for _, event in history.events:
        if isinstance(event, DrawRecord):
            replay.repeat_draw(event)
        else:
            replay.repeat_step(event)
    return replay.waiting


class _TaskReplay:
    """Repetition of the recorded draws and steps by the task sources."""

    def __init__(self, history: History, sources: Mixture) -> None:
        self.waiting = list[Task]()
        self._history = history
        self._sources = sources
        self._lost = dict[int, DrawRecord]()
        self._trained = {group.draw for record in history.steps.values() for group in record.groups}
        self._has_changed = False  # a step has changed the sources since the last recorded draw

    def repeat_draw(self, record: DrawRecord) -> None:
        """Repeat a recorded draw."""
        history = self._history
        self._redraw_lost(record.draw)
        task, self._has_changed = self._sources.draw(), False
        if task is None or (task.draw, task.name, task.id) != (record.draw, record.env, record.task):
            if history.damaged:
                raise self._damage_error()
            name = "nothing" if task is None else f"{task.id} of {task.name}"
            raise UsageError(
                f"{history.directory}: draw {record.draw} was {record.task} of {record.env} and is {name} now; "
                "resume the run with the tasks that it was started with"
            )
        if record.draw in history.outstanding:
            self.waiting.append(task)

    def repeat_step(self, record: StepRecord) -> None:
        """Let the sources observe the groups of a recorded step."""
        history, sources = self._history, self._sources
        self._redraw_lost(max((group.draw for group in record.groups), default=-1) + 1)
        state = sources.state_dict() if history.damaged else None
        for recorded in history.groups(record.step):
            group = recorded.group
            if group.draw in self._lost and group.task != self._lost[group.draw].task:
                raise self._damage_error()
            sources.observe(group)
        history.task_metrics[record.step] = sources.metrics()
        self._has_changed |= state is not None and sources.state_dict() != state

    def _redraw_lost(self, end: int) -> None:
        """Repeat the draws before `end` whose records are lost."""
        history, sources = self._history, self._sources
        while history.damaged and sources.draws < end and (task := sources.draw()):
            self._lost[task.draw] = history.draws[task.draw] = DrawRecord(task.draw, task.name, task.id)
            if task.draw not in self._trained:
                if self._has_changed:  # the lost draw may have preceded the step, and may be another task
                    history.attempts.pop(task.draw, None)
                history.outstanding[task.draw] = self._lost[task.draw]
                self.waiting.append(task)

    def _damage_error(self) -> UsageError:
        return UsageError(f"{self._history.damaged[0]} is damaged: its draws are unreadable")


def interrupted_groups(history: History, config: Config, *, retry_failed: bool) -> dict[int, GroupProgress]:
    """Return the episodes of interrupted groups by draw, but not stale ones; `retry_failed` renews all retries."""
    oldest, groups = config.schedule.oldest_version(history.step), dict[int, GroupProgress]()
    for draw in history.outstanding:
        recorded = sorted(history.attempts.get(draw, []), key=lambda episode: episode.attempt)
        last = {episode.member: episode for episode in recorded}
        failed = sum(episode.status == "failed" for episode in recorded if episode is not last[episode.member])
        groups[draw] = GroupProgress(
            episodes={
                member: episode
                for member, episode in last.items()
                if all(turn.version >= oldest or turn.frozen for turn in episode.turns)
                and not (retry_failed and episode.status == "failed")
            },
            attempts={member: episode.attempt + 1 for member, episode in last.items()},
            failed=0 if retry_failed else failed,
        )
    return groups


@dataclass(frozen=True, slots=True)
class WeightsLoader:
    """Loader of the weights from which a run is resumed."""

    config: Config
    service: Service
    store: RunStore
    note: Callable[[str], None]

    async def load(self, last_step: int) -> tuple[Learner, int]:
        """Load the newest checkpoint up to `last_step`, or the initial weights; return the learner and their step."""
        config, seed = self.config, derive_seed(self.config.seed, "adapter")
        candidates = [saved for saved in checkpoints(self.store.directory) if saved.step <= last_step]
        candidates.sort(key=lambda saved: saved.step)
        for saved in reversed(candidates):  # the last checkpoint of a step replaces unusable checkpoints of it
            if saved.expires is not None and saved.expires < time.time():
                self.note(f"the checkpoint of step {saved.step} has expired")
                continue
            try:
                return await self._learner(seed, saved.state), saved.step
            except UsageError as error:
                self.note(f"the checkpoint of step {saved.step} cannot be used: {error}")
        return await self._learner(seed, config.load_checkpoint), 0

    async def _learner(self, seed: int, checkpoint: str | None) -> Learner:
        config = self.config
        return await self.service.learner(model=config.model, lora=config.lora, seed=seed, checkpoint=checkpoint)
