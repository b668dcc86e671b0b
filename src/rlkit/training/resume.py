"""Resumption of a run: restore its weights, its tasks and its finished episodes.

Invariant: a resumed run has the weights and draws the tasks that it would have without the interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rlkit._util.seeds import derive_seed
from rlkit.config.schema import Config
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.rollout.player import GroupProgress
from rlkit.service import Learner, Service
from rlkit.store import RunStore, checkpoints
from rlkit.store.history import DrawRecord, History, StepRecord, state_path
from rlkit.tasks.sources import Mixture


def redraw_tasks(history: History, *, sources: Mixture) -> None:
    """Repeat the draws and steps after the recorded state of the task sources.

    The tasks that are in no step, and the metrics of the sources after each step, are added to `history`. So are draws
    that a damaged journal has lost; if a repeated draw may be another task, its episodes are removed.

    Raises:
        UsageError: the sources draw other tasks than before.
    """
    if not history.state_step and not history.events:
        return
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


@dataclass(slots=True, eq=False)
class _TaskReplay:
    """Repetition of the recorded draws and steps by the task sources."""

    history: History
    sources: Mixture
    _lost: dict[int, DrawRecord] = field(default_factory=dict[int, DrawRecord])
    _has_changed: bool = False  # a step has changed the sources since the last recorded draw

    def repeat_draw(self, record: DrawRecord) -> None:
        """Repeat a recorded draw."""
        history = self.history
        self._redraw_lost(record.draw)
        task, self._has_changed = self.sources.draw(), False
        if task is None or (task.draw, task.name, task.id) != (record.draw, record.env, record.task):
            if history.damaged:
                raise self._damage_error()
            name = "nothing" if task is None else f"{task.id} of {task.name}"
            problem = f"draw {record.draw} was {record.task} of {record.env} and is {name} now"
            fix = "resume the run with the tasks that it was started with"
            raise UsageError(f"{history.directory}: {problem}; {fix}")
        if record.draw in history.outstanding:
            history.waiting.append(task)

    def repeat_step(self, record: StepRecord) -> None:
        """Let the sources observe the groups of a recorded step."""
        history, sources = self.history, self.sources
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
        history, sources = self.history, self.sources
        while history.damaged and sources.draws < end and (task := sources.draw()):
            self._lost[task.draw] = history.draws[task.draw] = DrawRecord(task.draw, task.name, task.id)
            if not any(group.draw == task.draw for record in history.steps.values() for group in record.groups):
                if self._has_changed:  # the lost draw may have preceded the step, and may be another task
                    history.attempts.pop(task.draw, None)
                history.outstanding[task.draw] = self._lost[task.draw]
                history.waiting.append(task)

    def _damage_error(self) -> UsageError:
        return UsageError(f"{self.history.damaged[0]} is damaged: its draws are unreadable")


def interrupted_groups(history: History, config: Config, *, retry_failed: bool) -> dict[int, GroupProgress]:
    """Return the episodes of interrupted groups by draw, but not stale ones; `retry_failed` renews all retries."""
    oldest, groups = config.schedule.oldest_version(history.step), dict[int, GroupProgress]()
    for draw in history.outstanding:
        recorded = sorted(history.attempts.get(draw, []), key=lambda episode: episode.attempt)
        last = {episode.member: episode for episode in recorded}
        failed = sum(episode.status == "failed" for episode in recorded if episode is not last[episode.member])
        fresh = [e for e in last.values() if all(turn.version >= oldest or turn.frozen for turn in e.turns)]
        episodes = {e.member: e for e in fresh if not (retry_failed and e.status == "failed")}
        attempts = {member: episode.attempt + 1 for member, episode in last.items()}
        groups[draw] = GroupProgress(episodes, attempts, 0 if retry_failed else failed)
    return groups


async def load_weights(
    last_step: int, *, config: Config, service: Service, store: RunStore, note: Callable[[str], None]
) -> tuple[Learner, int]:
    """Load the newest checkpoint up to `last_step`, or the initial weights; return the learner and their step."""
    seed = derive_seed(config.seed, "adapter")
    make_learner = partial(service.learner, model=config.model, lora=config.lora, seed=seed)
    candidates = [saved for saved in checkpoints(store.directory) if saved.step <= last_step]
    candidates.sort(key=lambda saved: saved.step)
    for saved in reversed(candidates):  # the last checkpoint of a step replaces unusable checkpoints of it
        if saved.expires is not None and saved.expires < time.time():
            note(f"the checkpoint of step {saved.step} has expired")
            continue
        try:
            return await make_learner(checkpoint=saved.state), saved.step
        except UsageError as error:
            note(f"the checkpoint of step {saved.step} cannot be used: {error}")
    return await make_learner(checkpoint=config.load_checkpoint), 0
