"""Going on with a run: its weights, its tasks and its finished episodes.

Invariant: a run that goes on has the weights, and draws the tasks, that it would have had without the interruption.
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
from rlkit.store import RunStore
from rlkit.store.history import DrawRecord, History, StepRecord, state_path
from rlkit.tasks.sources import Mixture


@dataclass(frozen=True, slots=True)
class Resumption:
    """Remains of an interrupted run, to go on with; empty for a new run.

    Args:
        step: the last one whose groups are on the disk.
        waiting: tasks that were drawn and are in no step yet.
        interrupted: by draw, the episodes of these tasks that were finished.
        task_metrics: by step, what the task sources said, for steps whose metrics were not written down.
    """

    step: int
    waiting: Sequence[Task]
    interrupted: Mapping[int, GroupProgress]
    task_metrics: Mapping[int, Mapping[str, float]]


def redraw_tasks(history: History, tasks: Mixture) -> list[Task]:
    """Take the task sources through what happened since their state was kept; the tasks that are in no step yet.

    The metrics of the sources after each step are put into `history.task_metrics`, for steps without a line of metrics.
    Draws that a damaged journal has lost are made again, and `history` knows them from then on. Where these may now be
    of other tasks, it forgets what was played of them.

    Raises:
        UsageError: the sources do not repeat themselves.
    """
    if not history.state_step and not history.events:
        return []
    try:
        tasks.load_state_dict(history.state)
    except (EnvironmentFault, UsageError):
        raise
    except Exception as error:  # it is not what they wrote
        path = state_path(history.directory, history.state_step)
        raise UsageError(f"{path}: the task sources cannot take it up: {type(error).__name__}: {error}") from error
    history.task_metrics[history.state_step] = tasks.metrics()
    waiting = list[Task]()
    lost = dict[int, DrawRecord]()
    trained = {one.draw for record in history.steps.values() for one in record.groups}
    moved = False  # whether the sources are changed by a step since the last draw that is known

    def draw_what_is_lost(before: int) -> None:
        while history.damaged and tasks.draws < before and (drawn := tasks.draw(1)):
            task = drawn[0]
            lost[task.draw] = history.draws[task.draw] = DrawRecord(task.draw, task.name, task.id)
            if task.draw not in trained:
                if moved:  # it was made before that or after
                    history.attempts.pop(task.draw, None)
                history.outstanding[task.draw] = lost[task.draw]
                waiting.append(task)

    for _, event in history.events:
        match event:
            case DrawRecord():
                draw_what_is_lost(event.draw)
                drawn, moved = tasks.draw(1), False
                if not drawn or (drawn[0].draw, drawn[0].name, drawn[0].id) != (event.draw, event.env, event.task):
                    if history.damaged:
                        raise UsageError(f"{history.damaged[0]} is damaged where it says what was drawn")
                    now = f"{drawn[0].id} of {drawn[0].name}" if drawn else "nothing"
                    raise UsageError(
                        f"{history.directory}: draw {event.draw} was {event.task} of {event.env} and is {now} now; a "
                        "run is resumed with the tasks that it was started with"
                    )
                if event.draw in history.outstanding:
                    waiting.append(drawn[0])
            case StepRecord():
                draw_what_is_lost(max((one.draw for one in event.groups), default=-1) + 1)
                before = tasks.state_dict() if history.damaged else None
                for kept in history.groups(event.step):
                    if kept.group.draw in lost and kept.group.task != lost[kept.group.draw].task:
                        raise UsageError(f"{history.damaged[0]} is damaged where it says what was drawn")
                    tasks.observe(kept.group)
                history.task_metrics[event.step] = tasks.metrics()
                moved = moved or (before is not None and tasks.state_dict() != before)
    return waiting


def interrupted_groups(history: History, config: Config, *, forgive: bool) -> dict[int, GroupProgress]:
    """Return, by draw, what was played of the groups in no step and is fresh enough to train on.

    Args:
        history: of the run.
        config: says what is fresh enough.
        forgive: play what failed again, as if for the first time.
    """
    oldest = config.schedule.oldest_version(history.step)
    return {draw: _interrupted_group(history, draw, oldest, forgive=forgive) for draw in history.outstanding}


def _interrupted_group(history: History, draw: int, oldest: int, *, forgive: bool) -> GroupProgress:
    recorded = sorted(history.attempts.get(draw, []), key=lambda episode: episode.attempt)
    last = {episode.member: episode for episode in recorded}
    failed = sum(episode.status == "failed" for episode in recorded if episode is not last[episode.member])
    return GroupProgress(
        episodes={
            member: episode
            for member, episode in last.items()
            if all(turn.version >= oldest for turn in episode.turns) and not (forgive and episode.status == "failed")
        },
        attempts={member: episode.attempt + 1 for member, episode in last.items()},
        failed=0 if forgive else failed,
    )


@dataclass(frozen=True, slots=True)
class WeightsLoader:
    """Loads the weights that a run goes on from.

    Args:
        config: of the run.
        service: holds the checkpoints.
        store: knows them.
        note: told of a checkpoint that cannot be used.
    """

    config: Config
    service: Service
    store: RunStore
    note: Callable[[str], None]

    async def load(self, upto: int) -> tuple[Learner, int]:
        """Load the newest checkpoint up to a step that the service still has, or the weights that the run began with.

        Returns:
            The learner, and the step that its weights are of.

        Raises:
            ServiceError: the service failed.
        """
        config, seed = self.config, derive_seed(self.config.seed, "adapter")
        saved_steps = sorted(
            (saved for saved in self.store.checkpoints() if saved.step <= upto), key=lambda saved: saved.step
        )
        for saved in reversed(saved_steps):  # the later of two of one step replaces one that was of no use any more
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
