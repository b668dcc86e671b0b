"""What the training loop is made of.

Invariant: nothing here does anything; `rlkit.training.trainer` makes the parts, and `rlkit.training.loop` uses them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rlkit._util.activity import Activity
from rlkit._util.priority_semaphore import Slots
from rlkit.algorithms.datums import Preparation
from rlkit.cost.budget import Budget
from rlkit.evaluation.evaluate import Evaluation
from rlkit.rollout.player import Player
from rlkit.service import Learner
from rlkit.service.watch import Watch
from rlkit.store import RunStore
from rlkit.tasks.sources import Mixture
from rlkit.trackers import Broadcast
from rlkit.training.checkpoints import Saver
from rlkit.training.model_selection import Selection
from rlkit.training.schedule import Supply
from rlkit.training.step import Recipe
from rlkit.training.stop import StopSignal

type Restore = Callable[[int], Awaitable[tuple[Learner, int]]]
"""Gives the weights of the newest checkpoint up to a step, and the step that it is of; fresh ones are of step 0."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of.

    Args:
        restore: gives the weights to train.
        supply: gives each step its groups.
        tasks: are told of the groups of each step.
        player: whose counts are shown while it plays.
        preparation: makes training sequences of groups.
        recipe: makes requests of training sequences.
        min_valid: by environment, episodes with a reward that a group must have.
        evaluation: what is measured.
        saver: saves the weights.
        selection: told of each step; says which weights are the best.
        steps: of the run in all.
        store: of the run.
        trackers: told of every step; what they raise is noted and dropped.
        watch: over the calls to the service.
        stop: looked at between steps.
        slots: of all rollouts; they give no more places once the budget is used up.
        budget: of the run.
        activity: counts of the work under way.
        of_tasks: by step, what the task sources said after it, of the last steps before the run was interrupted.
    """

    restore: Restore
    supply: Supply
    tasks: Mixture
    player: Player
    preparation: Preparation
    recipe: Recipe
    min_valid: Mapping[str, int]
    evaluation: Evaluation
    saver: Saver
    selection: Selection
    steps: int
    store: RunStore
    trackers: Broadcast
    watch: Watch
    stop: StopSignal
    slots: Slots
    budget: Budget
    activity: Activity
    of_tasks: Mapping[int, Mapping[str, float]]
