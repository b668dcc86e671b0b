"""What a run will use and how long it will take, from a few of its rollouts.

Invariant: a bound is a sum of what was measured and of what is said to be assumed; what is not known is None, and
never a guess that looks like a number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlkit._util import files
from rlkit._util.paths import runs_dir
from rlkit.algorithms.datums import trained_tokens
from rlkit.algorithms.losses import loss
from rlkit.types import Episode, Group

if TYPE_CHECKING:
    from rlkit.config.schema import Config
    from rlkit.cost.prices import Price

_NOT_WHAT_IS_RUN = ("name", "budget_usd", "budget_tokens", "max_hours")
"""Fields of a configuration that change nothing about what a whole run takes."""


@dataclass(frozen=True, slots=True)
class Band:
    """A lower and an upper bound."""

    low: float
    high: float

    def __add__(self, other: Band) -> Band:
        return Band(self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one rollout of an environment takes, on average over those that were played.

    Args:
        turns: completions that it asked for.
        first: tokens of its first prompt, which the rollouts of a task have in common.
        later: tokens of its other prompts in all.
        repeated: of these, the tokens that the turn before ended with, which a cache may have.
        sampled: tokens that the model sampled.
        trained: tokens of its sequences.
        own_s: seconds that it took besides waiting for completions.
    """

    turns: float
    first: float
    later: float
    repeated: float
    sampled: float
    trained: float
    own_s: float

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self | None:
        """The mean over the episodes that did not fail; None if all did, or none asked for anything."""
        played = [episode for group in groups for episode in group.episodes if episode.reward is not None]
        rows = [_row(episode) for episode in played if episode.turns]
        return cls(*np.mean(rows, axis=0).tolist()) if rows else None

    def scaled(self, factor: float) -> Rollout:
        """With everything but the first prompt and the turns so many times as long."""
        return replace(
            self,
            later=self.later * factor,
            repeated=self.repeated * factor,
            sampled=self.sampled * factor,
            trained=self.first + (self.trained - self.first) * factor,
        )


def _row(episode: Episode) -> tuple[float, ...]:
    turns, seconds = episode.turns, episode.seconds
    ends, first, later, repeated = list[int](), 0, 0, 0
    for number, turn in enumerate(turns):
        known = 0 if turn.parent is None else ends[turn.parent]
        prompt = known + len(turn.prompt)
        ends.append(prompt + len(turn.completion))
        if number == 0:
            first = prompt
        else:
            later, repeated = later + prompt, repeated + known
    sampled = sum(int(np.count_nonzero(turn.sampled)) for turn in turns)
    # Turns may be asked for at once, and then take less time than their sum.
    waited = min(seconds, sum(turn.seconds for turn in turns))
    return len(turns), first, later, repeated, sampled, trained_tokens(episode), seconds - waited


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a service is.

    Args:
        stream: sampled tokens of one completion, a second.
        total: sampled tokens of all completions together, a second; None for as many as are asked for.
        trained: tokens of training sequences, a second.
        step_s: seconds of an optimiser step and the hand-over of its weights.
        source: where this is known from, as a phrase for people.
        reference: tokens that the reference of a KL penalty gives log-probabilities of, a second; None takes as many as
            are trained on.
    """

    stream: Band
    total: Band | None
    trained: Band
    step_s: Band
    source: str
    reference: Band | None = None


HOSTED = Speed(
    stream=Band(20, 120),
    total=None,
    trained=Band(3_000, 30_000),
    step_s=Band(5, 40),
    source="assumed of a hosted service: 20 to 120 tokens a second in each completion, a step every 5 to 40 s",
)
"""Wide enough for models of 1 to 400 billion parameters and for a service that works in cycles of about 10 s."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a whole run takes.

    Args:
        tokens: of all kinds, as the service bills them.
        usd: US dollars; None where no price is known.
        seconds: None where no speed is known.
        speed: where the speed is known from.
    """

    tokens: Band
    usd: Band | None
    seconds: Band | None
    speed: str = ""

    def to_json(self) -> dict[str, Any]:
        """As nested mappings of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        bands = {name: None if held[name] is None else Band(**held[name]) for name in ("usd", "seconds")}
        return cls(Band(**held["tokens"]), **bands, speed=held["speed"])


type Pair = tuple[Rollout, Rollout]
"""Short rollouts, and long ones."""

type Tests = Mapping[str, tuple[Pair, int]]
"""Of each environment that is evaluated: its rollouts, and how many tasks there are."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a whole run plays.

    Args:
        steps: that it takes.
        groups: by environment, those that its steps are made of.
        replaced: groups that are played besides, for each of these.
    """

    steps: int
    groups: Mapping[str, float]
    replaced: float = 0.0


def estimate(
    config: Config,
    rollouts: Mapping[str, Pair],
    evaluated: Tests,
    *,
    price: Price | None,
    speed: Speed | None,
    draws: Mapping[str, int] | None = None,
) -> Estimate:
    """Bounds for a run that takes all its steps.

    The lower bound takes short rollouts with nothing to teach, as those of a model that has learned all there is, and a
    cache that knows all that a conversation repeats. The upper one takes long rollouts, all of which are trained on, as
    many more as `batch.max_replaced` allows, and no cache but that of the requests for several samples.

    Args:
        config: of the run.
        rollouts: by environment.
        evaluated: likewise, of `eval.envs`.
        price: of the model's tokens.
        speed: of the service.
        draws: tasks that are drawn of each environment, where `epochs` says so.
    """
    extents = [extent(config, draws, long=long) for long in (False, True)]
    ends = [_used(config, rollouts, evaluated, extents[long], long=long) for long in (False, True)]
    tokens = Band(*(sum(used) for used in ends))
    usd = None
    if price is not None:
        per_token = np.array([price.prefill, price.cached, price.sample, price.train]) / 1e6
        usd = Band(*(float(per_token @ used) for used in ends))
    if speed is None:
        return Estimate(tokens, usd, None)
    seconds = Band(*(_seconds(config, rollouts, evaluated, speed, extents[long], long=long) for long in (False, True)))
    return Estimate(tokens, usd, seconds, speed.source)


def extent(config: Config, draws: Mapping[str, int] | None, *, long: bool) -> Extent:
    """How much a run plays at least, or with `long` at most.

    Without `epochs`, what replaces a group is one more draw. With them the draws are what they are, and the more are
    replaced, the fewer are the steps.

    Args:
        config: of the run.
        draws: tasks that are drawn of each environment, where `epochs` says so.
        long: at most.
    """
    batch = config.batch
    replaced_max = (batch.max_replaced or 4 * batch.groups) if batch.replace_uninformative else 0
    if draws is None:
        groups = {name: config.step_count * batch.groups * share for name, share in shares(config).items()}
        return Extent(config.step_count, groups, replaced_max / batch.groups if long else 0.0)
    fewest = math.ceil(sum(draws.values()) / (batch.groups + replaced_max))
    return Extent(config.step_count if long else fewest, draws)


def _used(
    config: Config, rollouts: Mapping[str, Pair], evaluated: Tests, run: Extent, *, long: bool
) -> tuple[float, float, float, float]:
    """Tokens of a run: of prompts, of prompts from a cache, sampled, trained on."""
    total, batch, more = np.zeros(4), config.batch, 1 + run.replaced
    for name, groups in run.groups.items():
        size = config.envs[name].group_size or batch.group_size
        one = rollouts[name][long]
        total += groups * more * _sampled(one, size, shared=_shared(config, one), cached=not long)
        total += [0.0, 0.0, 0.0, groups * _taught(config, long=long) * size * one.trained]
        if config.kl_penalty.coefficient:
            total += [groups * more * size * one.trained, 0.0, 0.0, 0.0]
    for name, spec in config.eval.envs.items():
        pair, tasks = evaluated[name]
        one, groups = pair[long], evaluations(config, run.steps) * tasks
        total += groups * _sampled(one, spec.attempts, shared=_shared(config, one), cached=not long)
    prefill, cached, sampled, trained = total.tolist()
    return prefill, cached, sampled, trained


def _taught(config: Config, *, long: bool) -> float:
    """How often a played sequence is computed for training, on average."""
    objective = loss(config.loss)
    all_of_them = config.batch.replace_uninformative or config.kl_penalty.coefficient or objective.needs_every_sequence
    return objective.passes * (1.0 if long or all_of_them else 0.0)


def _shared(config: Config, one: Rollout) -> bool:
    """Whether the first turns of a group are one request."""
    return config.rollouts.coalesce == "always" or (config.rollouts.coalesce == "single_turn" and one.turns == 1)


def _sampled(one: Rollout, size: int, *, shared: bool, cached: bool) -> np.ndarray[Any, Any]:
    """Tokens of a group of `size` rollouts, without training."""
    computed = one.first * (1 if shared or cached else size)
    repeated = one.repeated if cached else 0.0
    prompts = (one.first + one.later) * size
    prefill = computed + (one.later - repeated) * size
    return np.array([prefill, prompts - prefill, one.sampled * size, 0.0])


def shares(config: Config) -> dict[str, float]:
    """Of each environment, the share of the groups that are its own; they sum to 1."""
    largest = max(spec.weight for spec in config.envs.values())  # or the sum of two large ones may be no number
    weights = {name: spec.weight / largest for name, spec in config.envs.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def evaluations(config: Config, steps: int) -> int:
    """How many times a run of so many steps is evaluated: before the first, at times, and after the last."""
    every = config.eval.every
    between = (steps - 1) // every if every else 0
    return 2 + between if config.eval.envs else 0


def _seconds(
    config: Config, rollouts: Mapping[str, Pair], evaluated: Tests, speed: Speed, run: Extent, *, long: bool
) -> float:
    """Of a run: its steps one after another, with its evaluations at worst between them, and at best beside them."""
    batch, ahead, more = config.batch, config.schedule.mode == "async", 1 + run.replaced
    in_step = [
        (rollouts[name][long], (config.envs[name].group_size or batch.group_size) * groups / run.steps)
        for name, groups in run.groups.items()
    ]
    in_evaluation = [
        (evaluated[name][0][long], evaluated[name][1] * spec.attempts) for name, spec in config.eval.envs.items()
    ]
    most = config.rollouts.max_live
    # What replaces a group is begun when that has ended.
    played_s = more * _played_s(
        in_step, speed, most=most, steps_at_once=1 + config.schedule.max_staleness * ahead, long=long
    )
    trained = _taught(config, long=long) * sum(one.trained * count for one, count in in_step)
    trained_s = trained / (speed.trained.low if long else speed.trained.high)
    trained_s += (speed.step_s.high if long else speed.step_s.low) * batch.substeps
    evaluated_s = _played_s(in_evaluation, speed, most=most, steps_at_once=1, long=long)
    if config.kl_penalty.coefficient:
        scored = more * sum(one.trained * count for one, count in in_step)
        reference = speed.reference or speed.trained
        # A group is scored while others are still in play: at best all of it is, and at worst it is waited for.
        scored_s = scored / (reference.low if long else reference.high)
        played_s = played_s + scored_s if long else max(played_s, scored_s)
    # Ahead of its training, only the first step is waited for, or after the last one its training.
    steps_s = run.steps * (played_s + trained_s)
    if ahead:
        steps_s = run.steps * max(played_s, trained_s) + min(played_s, trained_s)
    if long:
        return steps_s + evaluations(config, run.steps) * evaluated_s
    # Nothing is left for that of the last weights to be beside; and all share the slots, and the machine.
    held_s = run.steps * _held_s(in_step, speed, most=most, long=long)
    held_s += evaluations(config, run.steps) * _held_s(in_evaluation, speed, most=most, long=long)
    return max(steps_s + evaluated_s, held_s)


def _played_s(
    rollouts: Sequence[tuple[Rollout, float]], speed: Speed, *, most: int, steps_at_once: int, long: bool
) -> float:
    """Seconds that so many rollouts of each kind take, `most` at a time.

    With several steps at once, nobody waits for the longest rollout of one.
    """
    lengths_s = _lengths_s(rollouts, speed, long=long)
    count = sum(number for _, number in rollouts)
    if not count:
        return 0.0
    busy_s = sum(length_s * number for length_s, (_, number) in zip(lengths_s, rollouts, strict=True))
    played_s = max(busy_s / min(most, count * steps_at_once), _held_s(rollouts, speed, most=most, long=long))
    if steps_at_once > 1:
        return played_s
    if long and count > most:  # Graham 1966: the last to begin may be the longest, when all others have ended
        played_s = max(played_s, busy_s / most + max(lengths_s) * (1 - 1 / most))
    return max(played_s, *lengths_s)


def _held_s(rollouts: Sequence[tuple[Rollout, float]], speed: Speed, *, most: int, long: bool) -> float:
    """Seconds that so many rollouts of each kind leave nothing of, of the slots or of the machine."""
    lengths_s = _lengths_s(rollouts, speed, long=long)
    held_s = sum(length_s * number for length_s, (_, number) in zip(lengths_s, rollouts, strict=True)) / most
    if speed.total is not None:
        sampled = sum(one.sampled * number for one, number in rollouts)
        held_s = max(held_s, sampled / (speed.total.low if long else speed.total.high))
    return held_s


def _lengths_s(rollouts: Sequence[tuple[Rollout, float]], speed: Speed, *, long: bool) -> list[float]:
    """Seconds that a rollout of each kind takes."""
    stream = speed.stream.low if long else speed.stream.high
    return [one.sampled / stream + one.own_s for one, _ in rollouts]


def keep(config: Config, made: Estimate) -> Path:
    """Keep an estimate for the end of the run that it is of; the file that holds it."""
    path = _path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(made.to_json(), indent=2) + "\n")
    return path


def kept(config: Config) -> Estimate | None:
    """The estimate that was kept for a run like this; None if there is none that can be read."""
    try:
        return Estimate.from_json(json.loads(_path(config).read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _path(config: Config) -> Path:
    described = config.model_dump_json(exclude=set(_NOT_WHAT_IS_RUN))
    return runs_dir() / ".estimates" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"
