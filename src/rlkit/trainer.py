"""The training loop: one loop for every schedule, from tasks to better weights.

Invariant: a step is finished, on disk and told to the trackers before the next one begins; whatever ends the run, the
directory says how it ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rlkit.advantages import AdvantageEstimator
from rlkit.batch import make_batch
from rlkit.concurrency import together
from rlkit.config.schema import CheckpointConfig, OptimizerConfig
from rlkit.env import Env
from rlkit.errors import RlkitError, RunFailed
from rlkit.losses import Loss
from rlkit.metrics import group_metrics, update_metrics
from rlkit.policy import Sampler
from rlkit.rollouts import Player
from rlkit.schedule import Schedule
from rlkit.service import Learner
from rlkit.sources import Task
from rlkit.store import RunStore
from rlkit.trackers import Broadcast, Checkpoint, Phase, Progress, RunResult
from rlkit.types import Group

DAY_S = 24 * 3600


class Trainer(Protocol):
    """Makes a model better.

    ::

        result = await rlkit.RLTrainer(config, envs=tasks).train()
        print(result.metrics["env/all/reward/mean"])
    """

    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop."""
        ...


class StopSignal:
    """Asks a run, from any thread, to finish its step, save and end."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def request(self) -> None:
        """Ask. Asking twice is asking once."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether someone asked."""
        return self._event.is_set()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured, never trained on.

    Args:
        tasks: by name of the environment, always the same ones.
        player: plays them.
        every: steps between evaluations; 0 for only the first and the last.
    """

    tasks: Mapping[str, Sequence[Env]]
    player: Player
    every: int

    async def run(self, sampler: Sampler) -> Mapping[str, float]:
        """Play every task with these weights; metrics under `eval/…`."""
        drawn = [Task(draw, name, env) for name, envs in self.tasks.items() for draw, env in enumerate(envs)]
        groups = await together(self.player.play(task, lambda: sampler) for task in drawn)
        return group_metrics(groups, prefix="eval")


class Loop:
    """The loop itself, over parts that are given.

    Args:
        learner: the weights that are trained.
        schedule: gives each step its groups.
        player: whose counts are shown while it plays.
        estimators: by name of the environment.
        steps: optimiser steps in all.
        store: of the run.
        trackers: told of every step; what they raise is noted and dropped.
        stop: looked at between steps.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        schedule: Schedule,
        player: Player,
        estimators: Mapping[str, AdvantageEstimator],
        loss: Loss,
        optimizer: OptimizerConfig,
        steps: int,
        evaluation: Evaluation,
        checkpoints: CheckpointConfig,
        store: RunStore,
        trackers: Broadcast,
        stop: StopSignal,
    ) -> None:
        self._learner = learner
        self._schedule = schedule
        self._player = player
        self._estimators = estimators
        self._loss = loss
        self._optimizer = optimizer
        self._steps = steps
        self._evaluation = evaluation
        self._checkpoints = checkpoints
        self._store = store
        self._trackers = trackers
        self._stop = stop
        self._started = time.monotonic()
        self._phase: Phase = "preparing"
        self._step = 0
        self._saved: Checkpoint | None = None

    async def run(self) -> RunResult:
        """Train until the steps are done, the tasks run out or someone asks to stop, and save what was learned.

        Raises:
            RunFailed: no rollout of a step could be used.
            EnvironmentFault: the advantage estimator failed.
            ServiceError: the service failed after retries.
        """
        try:
            metrics = await self._train()
        except Exception:
            with suppress(RlkitError, OSError):  # what ended the run matters more than that it cannot be saved either
                if self._step:
                    await self._save()
            raise
        await self._save()
        self._enter("done")
        status = "interrupted" if self._stop.requested and self._step < self._steps else "completed"
        directory = self._store.directory
        return RunResult(directory.name, directory, status, self._step, metrics, self._saved)

    async def _train(self) -> Mapping[str, float]:
        sampler = await self._learner.sampler()
        self._report(await self._evaluated(sampler))
        metrics: Mapping[str, float] = {}
        while self._step < self._steps and not self._stop.requested:
            started = time.monotonic()
            self._enter("sampling")
            groups = await self._schedule.groups(sampler)
            if not groups and not self._step:
                raise RunFailed("the environments gave no tasks at all")
            if not groups:
                self._trackers.note(f"the tasks have run out after {self._step} steps")
                break
            sampled = time.monotonic()
            self._enter("training")
            metrics = {**group_metrics(groups, prefix="env"), **await self._learn(groups)}
            sampler = await self._learner.sampler()
            trained = time.monotonic()
            self._step += 1
            metrics |= await self._evaluated(sampler)
            metrics |= {
                "time/sample_s": sampled - started,
                "time/train_s": trained - sampled,
                "time/step_s": time.monotonic() - started,
            }
            self._report(metrics)
            if self._checkpoints.every and self._step % self._checkpoints.every == 0:
                await self._save()
        return metrics

    def progress(self) -> Progress:
        """Where the run stands; may be called from any thread."""
        evaluating = self._phase == "evaluating"
        counts = (self._evaluation.player if evaluating else self._player).counts
        return Progress(
            step=self._step,
            steps=self._steps,
            phase=self._phase,
            queued=counts.queued,
            live=counts.live,
            done=counts.done,
            failed=counts.failed,
            tokens=self._player.counts.tokens + self._evaluation.player.counts.tokens,
            seconds=time.monotonic() - self._started,
        )

    async def _learn(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """One optimiser step; none when every advantage is 0, since there is no gradient then."""
        _require_some_valid(groups, step=self._step + 1)
        batch = make_batch(groups, self._estimators, every_sequence=self._loss.needs_every_sequence)
        if not batch.data:
            self._trackers.note(f"step {self._step + 1}: every group's rewards are equal, so there is nothing to learn")
            return {"optim/skipped": 1.0}
        update = await self._learner.update(batch.data, self._loss, self._optimizer)
        return {"optim/skipped": 0.0, **update_metrics(batch, update)}

    async def _evaluated(self, sampler: Sampler) -> Mapping[str, float]:
        due = self._step in (0, self._steps) or (self._evaluation.every and self._step % self._evaluation.every == 0)
        if not self._evaluation.tasks or not due:
            return {}
        self._enter("evaluating")
        return await self._evaluation.run(sampler)

    async def _save(self) -> None:
        if self._saved is not None and self._saved.step == self._step:
            return
        self._enter("saving")
        ttl_s = None if self._checkpoints.ttl_days is None else round(self._checkpoints.ttl_days * DAY_S)
        state, sampler = await self._learner.save(f"step-{self._step:06d}", ttl_s=ttl_s)
        expires = None if ttl_s is None else time.time() + ttl_s
        self._saved = Checkpoint(self._step, state, sampler, expires)
        self._store.add_checkpoint(self._saved)
        self._trackers.checkpoint(self._saved)

    def _report(self, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._store.add_metrics(self._step, metrics)
            self._trackers.step(self._step, metrics)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        player = self._evaluation.player if phase == "evaluating" else self._player
        if phase in ("sampling", "evaluating"):
            player.counts.done = player.counts.failed = 0


def _require_some_valid(groups: Sequence[Group], *, step: int) -> None:
    episodes = [episode for group in groups for episode in group.episodes]
    if all(episode.status == "failed" for episode in episodes):
        raise RunFailed(f"all {len(episodes)} rollouts of step {step} failed; the first: {episodes[0].error}")
