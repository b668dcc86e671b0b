"""Going on with a run: its weights, its tasks and its finished episodes.

Invariant: a run that goes on has the weights, and draws the tasks, that it would have had without the interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlkit.config.schema import Config
from rlkit.errors import UsageError
from rlkit.seeds import derive
from rlkit.service import Learner, Service
from rlkit.settings import pace
from rlkit.sources import Mixture, Task
from rlkit.store.history import Draw, History, StepRecord
from rlkit.trackers import Checkpoint
from rlkit.types import Episode


def drawn_again(history: History, tasks: Mixture) -> list[Task]:
    """Take the task sources through what happened since their state was kept; the tasks that are in no step yet.

    Raises:
        UsageError: the sources do not repeat themselves.
    """
    if not history.since and not history.events:
        return []
    tasks.load_state_dict(history.state)
    waiting = list[Task]()
    for event in history.events:
        match event:
            case Draw():
                drawn = tasks.draw(1)
                if not drawn or (drawn[0].draw, drawn[0].name) != (event.draw, event.env):
                    raise UsageError(
                        f"{history.directory}: draw {event.draw} was of {event.env} and is another one now; a run is "
                        "resumed with the environments that it was started with"
                    )
                if event.draw in history.outstanding:
                    waiting.append(drawn[0])
            case StepRecord():
                for kept in history.groups(event.step):
                    tasks.observe(kept.group)
    return waiting


def reusable(history: History, draw: int, config: Config) -> Sequence[Episode]:
    """The finished episodes of a task that are fresh enough to train on."""
    episodes = history.attempts.get(draw, [])
    if config.schedule.mode == "async" and config.schedule.staleness == "paced":
        return episodes
    oldest = history.step - pace(config).max_staleness
    return [episode for episode in episodes if all(turn.version >= oldest for turn in episode.turns)]


async def restored(
    config: Config, service: Service, checkpoints: Sequence[Checkpoint], upto: int, note: Callable[[str], None]
) -> tuple[Learner, int]:
    """The weights of the newest checkpoint up to a step that the service still has, or those that the run began with.

    Raises:
        ServiceError: the service failed.
    """
    seed = derive(config.seed, "adapter")
    for saved in reversed([one for one in checkpoints if one.step <= upto]):
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
