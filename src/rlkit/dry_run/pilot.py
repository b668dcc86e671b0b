"""Pilot: a few rollouts and one optimiser step on the run's real service, to measure its speed.

Invariant: the trained weights are not saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from rlkit._util.priority_semaphore import Slots
from rlkit._util.seeds import derive_seed
from rlkit._util.threads import run_together
from rlkit.algorithms.advantages import estimate_advantages
from rlkit.algorithms.datums import PreparedGroup
from rlkit.algorithms.estimator import Advantages, Estimator
from rlkit.chat.format import ChatFormat
from rlkit.config.loading.objects import load_estimators, load_loss
from rlkit.config.schema import Config
from rlkit.cost.estimate import Band, Pair, Rollout, Speed
from rlkit.cost.usage import Usage
from rlkit.env import Task
from rlkit.errors import RolloutsFailed
from rlkit.rollout.opponents import Opponents
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import make_env_settings
from rlkit.service import Learner
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.serving.references import load_references
from rlkit.tasks.from_config import task_source
from rlkit.tasks.sources import Tasks
from rlkit.tinker_client.connect import ServiceChoice, connect, describe_service
from rlkit.training.from_config import make_learning_rate, make_preparation
from rlkit.types import Datum, Group
from rlkit.workers.from_config import open_runner

_SHORTER, _LONGER = 0.75, 1.5
"""Assumed range of rollout lengths in training, relative to the pilot; replies grow more often than they shrink."""

_BATCHING_GAIN = 3.0
"""Maximum gain in sampling throughput of a machine that samples all rollouts of a step concurrently."""

_UNCERTAINTY = 1.5  # uncertainty of a single measurement, as a factor
_NUDGE = 1e-3  # advantage of a rollout in a group with zero advantages, so that the pilot can train on the group


@dataclass(frozen=True, slots=True)
class Pilot:
    """The result of a few rollouts and an optimiser step."""

    rollouts: Mapping[str, Pair]  # mean rollout by environment, scaled to be shorter and longer
    speed: Speed | None  # measured speed; None if nothing was sampled or trained on
    rollout_count: int
    seconds: float
    usage: Usage


async def run_pilot(
    config: Config,
    tasks: Mapping[str, Tasks],
    chat: ChatFormat,
    choice: ServiceChoice,
    *,
    groups: int,
    note: Callable[[str], None],
) -> Pilot:
    """Play `groups` groups of each environment on the run's service, and train on them once.

    Raises:
        RolloutsFailed: an environment has no valid rollout with a turn.
        UsageError: the service does not have a reference.
        ServiceError: the service failed after retries.
    """
    note(f"a pilot, {groups} group{'s' * (groups != 1)} of each environment, on {describe_service(choice)}")
    clock = asyncio.get_running_loop().time
    began_s = clock()
    env_tasks = [task for name in config.envs for task in draw_tasks(config, name, tasks[name], groups)]
    watch = ServiceWatch(note, config.service.timeout_s, seed=config.seed)
    opening = open_runner(config, LocalRunner(chat), tasks, {})
    async with watch.watch_silence(), opening as runner, connect(config.service, choice=choice, note=note) as service:
        start = partial(service.learner, model=config.model, lora=config.lora, seed=config.seed)
        start = partial(start, checkpoint=config.load_checkpoint)
        learner = await watch.call(start, "starting a training session", retry=True)
        context = await watch.call(lambda: service.context_tokens(config.model), "asking for the context", retry=True)
        weights = await watch.call(lambda: learner.sampler(0), "transferring weights", retry=True)
        sampler = PatientSampler(weights, watch, 0)
        settings, slots = make_env_settings(config, context=context), Slots(config.rollouts.max_concurrent)
        opponents = Opponents(config, service, watch).find
        player = Player(runner, settings, seed=config.seed, slots=slots, purpose="pilot", opponents=opponents)
        played_groups, rollouts_s = await _timed(run_together(player.play(task, lambda: sampler) for task in env_tasks))
        rollouts = {name: _mean_rollouts(name, played_groups) for name in config.envs}
        estimators = {name: NudgedEstimator(inner=estimator) for name, estimator in load_estimators(config, {}).items()}
        references = await load_references(config, service, watch, chat, price=None)
        preparation = make_preparation(config, estimators, load_loss(config.loss), references=references)
        prepared_groups, scored_s = await _timed(run_together(preparation.prepare(group) for group in played_groups))
        data = _select_data(config, preparation.prepare_step(prepared_groups))
        trained_s, step_s = await _train(config, learner, data, watch) if data else (0.0, 0.0)
        usage = service.usage
    episodes = [episode for group in played_groups for episode in group.episodes]
    sampled = sum(group.sampled_tokens for group in played_groups if group.env in config.reinforced_envs)
    scored = sum(prepared.tokens * len(prepared.drifts) for prepared in prepared_groups)
    sampling_s = sum(turn.seconds for episode in episodes for turn in episode.turns)
    speed = make_speed(
        stream=tokens_per_second(sampled, sampling_s),
        total=tokens_per_second(sampled, rollouts_s),
        trained=tokens_per_second(sum(len(datum.targets) for datum in data), trained_s),
        reference=tokens_per_second(scored, scored_s),
        step_s=step_s,
        is_local=choice.kind == "engine",
    )
    return Pilot(rollouts, speed, len(episodes), clock() - began_s, usage)


def draw_tasks(config: Config, name: str, tasks: Tasks, count: int) -> list[Task]:
    """Return the first tasks of an environment, at most `count`."""
    seed = derive_seed(config.seed, "tasks", name)
    source = task_source(tasks, config.envs[name].curriculum, field=f"envs.{name}.curriculum", seed=seed)
    return [Task(draw, name, env) for draw in range(count) if (env := source.next()) is not None]


def _select_data(config: Config, groups: Sequence[PreparedGroup]) -> list[Datum]:
    """Return the data of rollouts, or of conversations if there are no rollouts, because a request has one loss."""
    envs = config.reinforced_envs or config.envs
    return [datum for group in groups if group.group.env in envs for datum in group.data]


async def _train(config: Config, learner: Learner, data: Sequence[Datum], watch: ServiceWatch) -> tuple[float, float]:
    """Train once; return the seconds of the gradient, and of the optimiser step with the transfer of weights."""
    objective, rate = load_loss(config.loss), make_learning_rate(config).at(1)

    async def step() -> None:
        await watch.call(lambda: learner.step(config.optimizer, learning_rate=rate), "taking a step", retry=False)
        await watch.call(lambda: learner.sampler(1), "transferring weights", retry=True)

    gradient = watch.call(lambda: learner.gradient(data, objective), "computing a gradient", retry=False)
    return (await _timed(gradient))[1], (await _timed(step()))[1]


async def _timed[T](work: Awaitable[T]) -> tuple[T, float]:
    clock = asyncio.get_running_loop().time
    began_s = clock()
    return await work, clock() - began_s


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Return a speed; 0 if it could not be measured."""
    return tokens / seconds if seconds > 0 else 0.0


def make_speed(
    *, stream: float, total: float, trained: float, reference: float, step_s: float, is_local: bool
) -> Speed | None:
    """Return a `Speed` with its uncertainty from measured values; None if nothing was sampled or trained on.

    Args:
        is_local: the service runs on this machine, so its total throughput is limited; a hosted service scales.
    """
    if not (stream and total and trained):
        return None
    source = f"measured: {total:,.0f} tokens a second sampled, {trained:,.0f} trained on"
    return Speed(
        stream=_make_band(stream),
        total=Band(total / _UNCERTAINTY, total * _BATCHING_GAIN) if is_local else None,
        trained=_make_band(trained),
        step_s=_make_band(step_s),
        source=source + (f", {reference:,.0f} by the reference" if reference else ""),
        reference=_make_band(reference) if reference else None,
    )


def _make_band(value: float) -> Band:
    return Band(value / _UNCERTAINTY, value * _UNCERTAINTY)


def _mean_rollouts(name: str, groups: Sequence[Group]) -> Pair:
    groups = [group for group in groups if group.env == name]
    mean = Rollout.of(groups)
    if mean is None:
        errors = [episode.error for group in groups for episode in group.episodes if episode.error is not None]
        raise RolloutsFailed(f"envs.{name}: the pilot has no valid rollout with a turn: {errors[0] if errors else ''}")
    return mean.scaled(_SHORTER), mean.scaled(_LONGER)


class NudgedEstimator(Estimator):
    """Estimator with tiny advantages for groups of equal rewards, which are common with random replies."""

    name: ClassVar = "nudged"
    inner: Estimator

    @property
    def title(self) -> str:  # noqa: D102  inherited
        return self.inner.title

    @property
    def needs_whole_steps(self) -> bool:  # noqa: D102  inherited
        return self.inner.needs_whole_steps

    def step_advantages(self, groups: Sequence[Group]) -> Sequence[Advantages]:  # noqa: D102  inherited
        advantages = estimate_advantages(self.inner, groups)
        return [rows if any(map(np.any, rows)) else np.resize([-_NUDGE, _NUDGE], len(rows)) for rows in advantages]

    def metrics(self, group: Group) -> Mapping[str, float]:  # noqa: D102  inherited
        return self.inner.metrics(group)
