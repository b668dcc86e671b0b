"""Going on with a run: its weights, its tasks and its finished episodes.

Invariant: a run that goes on has the weights, and draws the tasks, that it would have had without the interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlkit._util.seeds import derive
from rlkit.config.schema import Config
from rlkit.env import Task
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.rollout.player import Earlier
from rlkit.service import Learner, Service
from rlkit.store.history import Draw, History, StepRecord, state_path
from rlkit.tasks.sources import Mixture
from rlkit.training.from_config import pace
from rlkit.types import Checkpoint


def drawn_again(history: History, tasks: Mixture) -> list[Task]:
    """Take the task sources through what happened since their state was kept; the tasks that are in no step yet.

    What the sources say after each step is put into `history.of_tasks`, for steps whose numbers were not written down.
    Draws that a damaged journal has lost are made again, and `history` knows them from then on. Where these may now be
    of other tasks, it forgets what was played of them.

    Raises:
        UsageError: the sources do not repeat themselves.
    """
    if not history.since and not history.events:
        return []
    try:
        tasks.load_state_dict(history.state)
    except (EnvironmentFault, UsageError):
        raise
    except Exception as error:  # it is not what they wrote
        path = state_path(history.directory, history.since)
        raise UsageError(f"{path}: the task sources cannot take it up: {type(error).__name__}: {error}") from error
    history.of_tasks[history.since] = tasks.metrics()
    waiting = list[Task]()
    lost = dict[int, Draw]()
    trained = {one.draw for record in history.steps.values() for one in record.groups}
    moved = False  # whether the sources are changed by a step since the last draw that is known

    def draw_what_is_lost(before: int) -> None:
        while history.damaged and tasks.drawn < before and (drawn := tasks.draw(1)):
            task = drawn[0]
            lost[task.draw] = history.draws[task.draw] = Draw(task.draw, task.name, task.id)
            if task.draw not in trained:
                if moved:  # it was made before that or after
                    history.attempts.pop(task.draw, None)
                history.outstanding[task.draw] = lost[task.draw]
                waiting.append(task)

    for event in history.events:
        match event:
            case Draw():
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
                history.of_tasks[event.step] = tasks.metrics()
                moved = moved or (before is not None and tasks.state_dict() != before)
    return waiting


def earlier(history: History, draw: int, config: Config, *, forgive: bool) -> Earlier:
    """What was played of a task and is fresh enough to train on.

    Args:
        history: of the run.
        draw: of the task.
        config: says what is fresh enough.
        forgive: play what failed again, as if for the first time.
    """
    recorded = sorted(history.attempts.get(draw, []), key=lambda episode: episode.attempt)
    last = {episode.member: episode for episode in recorded}
    failed = sum(episode.status == "failed" for episode in recorded if episode is not last[episode.member])
    paced = config.schedule.mode == "async" and config.schedule.staleness == "paced"
    oldest = 0 if paced else history.step - pace(config).max_staleness
    return Earlier(
        episodes={
            member: episode
            for member, episode in last.items()
            if all(turn.version >= oldest for turn in episode.turns) and not (forgive and episode.status == "failed")
        },
        attempts={member: episode.attempt + 1 for member, episode in last.items()},
        failed=0 if forgive else failed,
    )


async def restored(
    config: Config, service: Service, checkpoints: Sequence[Checkpoint], upto: int, note: Callable[[str], None]
) -> tuple[Learner, int]:
    """The weights of the newest checkpoint up to a step that the service still has, or those that the run began with.

    Raises:
        ServiceError: the service failed.
    """
    seed = derive(config.seed, "adapter")
    in_order = sorted((one for one in checkpoints if one.step <= upto), key=lambda one: one.step)
    for saved in reversed(in_order):  # of two of one step, the later was saved when the earlier was of no use any more
        if saved.expires is not None and saved.expires < time.time():
            note(f"the checkpoint of step {saved.step} has expired")
            continue
        try:
            learner = await service.learner(model=config.model, lora=config.lora, seed=seed, checkpoint=saved.state)
        except UsageError as error:
            note(f"the checkpoint of step {saved.step} cannot be used: {error}")
            continue
        return learner, saved.step
    learner = await service.learner(model=config.model, lora=config.lora, seed=seed, checkpoint=config.load_checkpoint)
    return learner, 0
