"""Estimates of the tokens, the price and the time of a run, from a few of its rollouts.

Invariant: a bound follows from measurements and documented assumptions; an unknown quantity is None, never a guess.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from rlkit._util import files
from rlkit._util.paths import runs_dir
from rlkit.algorithms.datums import sequence_lengths
from rlkit.config.schema import Config
from rlkit.config.schema.teacher import TeacherConfig
from rlkit.cost.usage import Price, Usage
from rlkit.types import Episode, Group

_IRRELEVANT_FIELDS = {"name", "budget_usd", "budget_tokens", "max_hours"}
"""Configuration fields that do not change an estimate."""


@dataclass(frozen=True, slots=True)
class Band:
    """A lower and an upper bound."""

    low: float
    high: float

    def end(self, *, high: bool) -> float:
        """Return one of the bounds."""
        return self.high if high else self.low


@dataclass(frozen=True, slots=True)
class Rollout:
    """Mean rollout of an environment."""

    turns: float  # requests for a completion
    first: float  # tokens of the first prompt, which the rollouts of a task share
    later: float  # tokens of all later prompts together
    repeated: float  # tokens of later prompts that repeat the previous turn, which a cache may contain
    sampled: float
    trained: float  # tokens of the training sequences
    own_s: float  # seconds other than waiting for completions

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self | None:
        """Average the valid episodes; None if no valid episode has a turn."""
        episodes = [episode for group in groups for episode in group.episodes if episode.reward is not None]
        rows = [_row(episode) for episode in episodes if episode.turns]
        return cls(*np.mean(rows, axis=0).tolist()) if rows else None

    def scaled(self, factor: float) -> Rollout:
        """Multiply all lengths, except the first prompt and the number of turns."""
        return replace(
            self,
            later=self.later * factor,
            repeated=self.repeated * factor,
            sampled=self.sampled * factor,
            trained=self.first + (self.trained - self.first) * factor,
        )

    def extended(self, turns: float) -> Rollout:
        """Extrapolate to at least `turns` turns like the mean one, each with the conversation so far as its prompt."""
        if turns <= self.turns:
            return self
        factor = turns / self.turns
        end = self.first + (self.trained + 1 - self.first) * factor  # the last token of a sequence is only a target
        later, own_s = (turns - 1) * (self.first + end) / 2, self.own_s * factor
        return replace(self.scaled(factor), turns=turns, later=later, trained=end - 1, own_s=own_s)


def _row(episode: Episode) -> tuple[float, ...]:
    turns, seconds = episode.turns, episode.seconds
    repeats, prompts, ends = list[int](), list[int](), list[int]()
    for turn in turns:
        repeats.append(0 if turn.parent is None else ends[turn.parent])
        prompts.append(repeats[-1] + len(turn.prompt))
        ends.append(prompts[-1] + len(turn.completion))
    sampled = sum(len(turn.completion) if turn.frozen else int(np.count_nonzero(turn.sampled_mask)) for turn in turns)
    # Concurrent turns take less time than their sum.
    waited = min(seconds, sum(turn.seconds for turn in turns))
    trained = sum(length - 1 for length in sequence_lengths(episode))  # as services count: the last is only predicted
    return len(turns), prompts[0], sum(prompts[1:]), sum(repeats), sampled, trained, seconds - waited


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a service."""

    stream: Band  # sampled tokens a second in one completion
    total: Band | None  # sampled tokens a second in all completions together; None for no limit
    trained: Band  # tokens of training sequences a second
    step_s: Band  # seconds of an optimiser step and the transfer of its weights to a sampler
    source: str  # origin of these values, as a phrase for people
    reference: Band | None = None  # tokens a second that the reference of a KL penalty scores; None for `trained`


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
    """Bounds of the tokens, the price and the time of a whole run.

    Args:
        tokens: tokens of all kinds, as the service bills them.
        usd: US dollars; None if no price is known.
        seconds: None if no speed is known.
        speed: origin of the speed, as in `Speed.source`.
    """

    tokens: Band
    usd: Band | None
    seconds: Band | None
    speed: str = ""


type Pair = tuple[Rollout, Rollout]
"""Short rollouts and long ones."""

type Tests = Mapping[str, tuple[Pair, int]]
"""Rollouts and number of tasks of each evaluation."""

type Contexts = Mapping[tuple[str, str], float]
"""Tokens that a teacher's prompt adds to a rollout, by `envs.<name>` or `eval.envs.<name>` and the teacher's field."""

type _Counted = Sequence[tuple[Rollout, float]]  # kinds of rollouts, each with its number of rollouts


@dataclass(frozen=True, slots=True)
class Extent:
    """The steps and groups of a whole run."""

    steps: int
    groups: Mapping[str, float]  # number of groups that are trained on, by environment
    replaced: float = 0.0  # additional groups to play for each of these


def estimate(
    config: Config,
    rollouts: Mapping[str, Pair],
    evaluated: Tests,
    contexts: Contexts = MappingProxyType({}),
    *,
    price: Price | None,
    speed: Speed | None,
    draws: Mapping[str, int] | None = None,
) -> Estimate:
    """Estimate tokens, price and time of a complete run.

    The lower bound assumes short rollouts without a gradient, as for a model that solves all tasks, and a cache of all
    repeated prompt tokens. The upper bound assumes that long rollouts are all trained on, the maximum number of
    replacements, and no cache except within requests for several samples.

    Args:
        evaluated: rollouts and number of tasks, by environment of `eval.envs`.
        draws: number of tasks to draw from each environment, with `epochs`.
    """
    for name in rollouts.keys() - config.reinforced_envs.keys():  # conversations are not sampled
        short, long = (Rollout(0, 0, 0, 0, 0, rollout.trained, rollout.own_s) for rollout in rollouts[name])
        rollouts = {**rollouts, name: (short, long)}
    extents = [extent(config, draws, long=long) for long in (False, True)]
    ends = [_End(config, rollouts, evaluated, contexts, *end) for end in zip(extents, (False, True), strict=True)]
    usages = [end.usage(price) for end in ends]
    tokens = Band(*(float(usage.tokens) for usage in usages))
    usd = None if price is None else Band(*(price.usd(usage) for usage in usages))
    seconds = None if speed is None else Band(*(end.seconds(speed) for end in ends))
    return Estimate(tokens, usd, seconds, speed.source if speed else "")


def extent(config: Config, draws: Mapping[str, int] | None, *, long: bool) -> Extent:
    """Return the smallest extent of a run, or with `long` the largest.

    Without `epochs`, a replacement is one more draw. With `epochs`, the number of draws is fixed, so more replacements
    mean fewer steps.
    """
    batch = config.batch
    replaced_max = batch.replaced_groups_limit
    first = config.warm_start_steps
    conversations = {"warm_start": float(first * batch.groups)} if first else dict[str, float]()
    if draws is None:
        groups = {name: (config.step_count - first) * batch.groups * share for name, share in shares(config).items()}
        return Extent(config.step_count, groups | conversations, replaced_max / batch.groups if long else 0.0)
    fewest = math.ceil(sum(draws.values()) / (batch.groups + replaced_max)) + first
    return Extent(config.step_count if long else fewest, {**draws, **conversations})


def shares(config: Config) -> dict[str, float]:
    """Return each environment's share of the groups after the warm start; the shares sum to 1."""
    specs = {name: spec for name, spec in config.envs.items() if name != "warm_start"}
    largest = max(spec.weight for spec in specs.values())  # because the sum of large weights may overflow
    weights = {name: spec.weight / largest for name, spec in specs.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def evaluations(config: Config, steps: int) -> int:
    """Return the number of evaluations: before the first step, every `eval.every` steps, and after the last step."""
    every = config.eval.every
    between = (steps - 1) // every if every else 0
    return 2 + between if config.eval.envs else 0


@dataclass(frozen=True, slots=True)
class _End:
    """The lower end of an estimate, or with `long` the upper one."""

    config: Config
    rollouts: Mapping[str, Pair]
    evaluated: Tests
    contexts: Contexts
    run: Extent
    long: bool

    def usage(self, price: Price | None) -> Usage:
        """Count the tokens of the run; the price tells what those of teachers cost more."""
        config, played, taught = self.config, 1 + self.run.replaced, defaultdict[str, float](float)
        total, evaluated = np.zeros(4), evaluations(config, self.run.steps)
        for name, groups in self.run.groups.items():
            size, rollout = self._group_size(name), self.rollouts[name][self.long]
            trained = groups * size * rollout.trained
            if name not in config.reinforced_envs:
                total += [0, 0, 0, trained]
                continue
            total += groups * played * self._sampled(rollout, size)
            total += [played * trained * bool(config.kl_penalty.coefficient), 0, 0, self._passes() * trained]
            for field, teacher in config.find_teachers(name).items():
                tokens = groups * size * (rollout.trained + self.contexts.get((f"envs.{name}", field), 0.0))
                taught[teacher.model or config.model] += played * tokens * self._taught_share(teacher)
        for name, spec in config.eval.envs.items():
            pair, tasks = self.evaluated[name]
            total += evaluated * tasks * self._sampled(pair[self.long], spec.attempts)
            if spec.temperature == 1:  # the divergence from the teacher is measured
                for field, teacher in config.find_teachers(name).items():
                    context = self.contexts.get((f"eval.envs.{name}", field), 0.0)
                    tokens = evaluated * tasks * spec.attempts * (pair[self.long].trained + context)
                    taught[teacher.model or config.model] += tokens
        other_usd = 0.0
        for model, tokens in taught.items():
            total += [tokens, 0, 0, 0]
            other_usd += price.scoring_difference(model, tokens) if price else 0.0
        return Usage(0, *(round(count) for count in total.tolist()), other_usd=other_usd)

    def _taught_share(self, teacher: TeacherConfig) -> float:
        """Return the share of the steps after the warm start with a teacher."""
        steps, first = self.run.steps, self.config.warm_start_steps
        taught = min(steps, teacher.last_step or steps) - max(first, teacher.first_step - 1)
        return max(0, taught) / max(1, steps - first)

    def _has_references(self) -> bool:
        return bool(self.config.kl_penalty.coefficient) or any(map(self.config.find_teachers, self.config.envs))

    def _group_size(self, name: str) -> int:
        return self.config.envs[name].group_size or self.config.batch.group_size

    def _passes(self) -> float:
        """Return the mean number of training passes over a played sequence."""
        config, loss = self.config, self.config.loss
        is_every = config.batch.replace_uninformative or self._has_references() or loss.needs_every_sequence
        return loss.passes * (1.0 if self.long or is_every else 0.0)

    def _sampled(self, rollout: Rollout, size: int) -> np.ndarray[Any, Any]:
        """Count the tokens of a group of `size` rollouts without training, by kind as in `Usage`."""
        coalesce = self.config.rollouts.coalesce
        one_request = coalesce == "always" or (coalesce == "single_turn" and rollout.turns == 1)
        first = rollout.first * (size if self.long and not one_request else 1)
        prefill = first + (rollout.later - (0.0 if self.long else rollout.repeated)) * size
        return np.array([prefill, (rollout.first + rollout.later) * size - prefill, rollout.sampled * size, 0.0])

    def seconds(self, speed: Speed) -> float:
        """Return the time of all steps; evaluations run between steps (upper bound) or concurrently (lower bound)."""
        config, long, steps = self.config, self.long, self.run.steps
        in_step = [
            (self.rollouts[name][long], self._group_size(name) * groups / steps)
            for name, groups in self.run.groups.items()
        ]
        in_evaluation = [
            (self.evaluated[name][0][long], self.evaluated[name][1] * spec.attempts)
            for name, spec in config.eval.envs.items()
        ]
        ahead, played = config.schedule.steps_ahead, 1 + self.run.replaced
        # A replacement begins after the group that it replaces has ended.
        played_s = played * self._played_s(in_step, speed, steps_at_once=1 + ahead)
        tokens = sum(rollout.trained * count for rollout, count in in_step)
        trained_s = self._passes() * tokens / speed.trained.end(high=not long)
        trained_s += speed.step_s.end(high=long) * config.batch.substeps
        if self._has_references():
            scored_s = played * tokens / (speed.reference or speed.trained).end(high=not long)
            # A group is scored while other rollouts run: at best all scoring overlaps with rollouts, at worst none.
            played_s = played_s + scored_s if long else max(played_s, scored_s)
        # With steps ahead, rollouts and training overlap, except the first rollouts and the last training.
        steps_s = steps * (played_s + trained_s)
        if ahead:
            steps_s = steps * max(played_s, trained_s) + min(played_s, trained_s)
        evaluated, evaluated_s = evaluations(config, steps), self._played_s(in_evaluation, speed, steps_at_once=1)
        if long:  # with the trial of the service before the first step
            return steps_s + evaluated * evaluated_s + speed.step_s.end(high=True)
        # The evaluation of the last weights overlaps with nothing. All rollouts share the slots and the machine.
        busy_s = steps * self._busy_s(in_step, speed) + evaluated * self._busy_s(in_evaluation, speed)
        return max(steps_s + evaluated_s, busy_s)

    def _played_s(self, rollouts: _Counted, speed: Speed, *, steps_at_once: int) -> float:
        """Return the time of concurrent rollouts; with several steps at once, none waits for the longest rollout."""
        count, slots = sum(number for _, number in rollouts), self.config.rollouts.max_concurrent
        if not count:
            return 0.0
        lengths_s = [self._length_s(rollout, speed) for rollout, _ in rollouts]
        total_s = sum(length_s * number for length_s, (_, number) in zip(lengths_s, rollouts, strict=True))
        played_s = max(total_s / min(slots, count * steps_at_once), self._busy_s(rollouts, speed))
        if steps_at_once > 1:
            return played_s
        if self.long and count > slots:  # Graham 1966: the last rollout to begin may be the longest
            played_s = max(played_s, total_s / slots + max(lengths_s) * (1 - 1 / slots))
        return max(played_s, *lengths_s)

    def _busy_s(self, rollouts: _Counted, speed: Speed) -> float:
        """Return the time for which rollouts occupy all slots, or the whole machine."""
        total_s = sum(self._length_s(rollout, speed) * number for rollout, number in rollouts)
        sampled = sum(rollout.sampled * number for rollout, number in rollouts)
        machine_s = 0.0 if speed.total is None else sampled / speed.total.end(high=not self.long)
        return max(total_s / self.config.rollouts.max_concurrent, machine_s)

    def _length_s(self, rollout: Rollout, speed: Speed) -> float:
        return rollout.sampled / speed.stream.end(high=not self.long) + rollout.own_s


def save_estimate(config: Config, expected: Estimate) -> Path:
    """Save an estimate for the comparison at the end of its run; return the path of the file."""
    path = _path(config)
    files.write_text(path, json.dumps(asdict(expected), indent=2) + "\n")
    return path


def load_estimate(config: Config) -> Estimate | None:
    """Return the estimate saved for the same configuration; None if there is no readable one."""
    try:
        return TypeAdapter(Estimate).validate_json(_path(config).read_bytes())
    except (OSError, ValueError):
        return None


def _path(config: Config) -> Path:
    identity = config.model_dump_json(exclude=_IRRELEVANT_FIELDS)
    return runs_dir() / ".estimates" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
