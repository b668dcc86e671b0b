"""Diagnosis of a run from its metrics: each finding has a name, its evidence and one action.

Invariant: these findings are a function of the lines of metrics alone, so that a run tells while it trains what its
folder tells later; metrics that stay as they are and are healthy give none. What metrics cannot say, as which line of
an environment holds the event loop, is found by `rlkit.metrics.blocking_findings`.

A rule looks at the last `WINDOW` steps that have a number, `ENOUGH` of them at least: at the mean of a share, since a
step may have few groups of an environment, and at the median of what can leap, KL and entropy, so that one odd step is
no finding. What it compares with are the first `ENOUGH`. A KL that is no number at all is a finding at once.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from rlkit.metrics.metrics import HEALTHY_KL, departure

type Line = tuple[int, Mapping[str, float]]
"""A step and its metrics."""

WINDOW = 10
ENOUGH = 5
MEMORY = 100
"""Steps that are looked at for what is rare; also how long an environment may be absent from the steps."""

MIXED_MIN = 0.2
"""Share of groups that teach: with fewer, four of five rollouts are paid for and give no gradient."""

CUT_MAX = 0.2
"""Share of episodes or turns that a limit ends: with more, the limit and not the answer makes the reward."""

FAILED_MAX = 0.1
"""Share of plays that fail: with more, every other group of 8 plays anew, or goes on with fewer."""

ENTROPY_MIN = 0.2
"""Of the entropy at the beginning: with less, the rollouts of a group are nearly the same, and there is nothing to
compare. Reward is bought with entropy, and ends where it ends (Cui et al. 2025, arXiv:2505.22617)."""

ENTROPY_NEGLIGIBLE = 0.05
"""Nats a token: a model that began with less, as one for tasks of a single answer, had no other choices to lose."""

CERTAIN_MAX = 0.5
"""Share of groups that are all good, from which on a model that is certain has learned what there was."""

KL_GROWTH = 3.0
"""Times the KL(sampler‖trainer) at the beginning."""

KL_NEGLIGIBLE = HEALTHY_KL / 10
"""Below this KL(sampler‖trainer) is rounding, and may grow."""

ERRORS = 2.0
"""Standard errors of a difference of two means that make it one, twice in a row."""

RETRY_GROUPS = 20
RETRY_ERRORS = 4.0
"""Likewise, of a difference that is looked for in each step, and so would be found by chance with fewer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run.

    Args:
        name: name of the rule.
        env: name of the environment; `all` for the run as a whole.
        first: step at which it was found.
        last: last step at which it held.
        evidence: numbers and steps, at `last`.
        action: first thing to do.
    """

    name: str
    env: str
    first: int
    last: int
    evidence: str
    action: str

    def __str__(self) -> str:
        where = "" if self.env == "all" else f" in {self.env}"
        return f"{self.name}{where}: {self.evidence}; {self.action}"


def findings(run: Iterable[Line]) -> list[Finding]:
    """Return all findings at any step of a run, given its lines in order, in the order in which they were found."""
    lookout = Lookout()
    for step, metrics in run:
        lookout.add(step, metrics)
    return lookout.findings


class Lookout:
    """Looks at a run step by step."""

    def __init__(self) -> None:
        self._seen = _Seen()
        self._found: dict[tuple[str, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings so far, in the order in which they were found."""
        return list(self._found.values())

    def add(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Look at one more step, and return what is found for the first time."""
        self._seen.add(step, metrics)
        new = list[Finding]()
        envs = [key[len("env/") : -len("/episodes")] for key in metrics if _EPISODES.fullmatch(key)]
        rules = [(rule, env) for env in envs if env != "all" for rule in _ENV_RULES]
        for rule, env in [*rules, *((rule, "all") for rule in _RULES)]:
            found = rule(self._seen, env)
            if found is None:
                continue
            key = (rule.__name__.removeprefix("_"), env)
            finding = Finding(*key, step, step, found.evidence, found.action)
            if key in self._found:
                self._found[key] = replace(finding, first=self._found[key].first)
            else:
                self._found[key] = finding
                new.append(finding)
        return new


class _Found(NamedTuple):
    evidence: str
    action: str


class _Mean(NamedTuple):
    """A mean, or a median, over the steps from `first` to `last`; `error` is the standard error of a mean reward."""

    value: float
    first: int
    last: int
    error: float = 0.0

    @property
    def steps(self) -> str:
        return f"in step {self.last}" if self.first == self.last else f"in steps {self.first} to {self.last}"


@dataclass(slots=True)
class _Seen:
    """The part of a run that the rules look at.

    Args:
        recent: the last lines.
        opening: the first lines with rewards.
        early: the first values of a metric, with their steps.
        evaluations: each with the mean of the rewards in training up to it; None before there is one.
    """

    recent: deque[Line] = field(default_factory=lambda: deque[Line](maxlen=MEMORY))
    opening: list[Line] = field(default_factory=list[Line])
    early: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    evaluations: list[tuple[_Mean, _Mean | None]] = field(default_factory=list[tuple[_Mean, _Mean | None]])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        if (kl := departure(finite)) is not None:
            finite[_KL] = kl
        self.recent.append((step, finite))
        if _REWARD in finite and len(self.opening) < ENOUGH:
            self.opening.append((step, finite))
        for key in (_KL, _ENTROPY):
            values = self.early.setdefault(key, [])
            if key in finite and len(values) < ENOUGH:
                values.append((step, finite[key]))
        if (measured := _reward([(step, finite)], "eval/all")) is not None:
            self.evaluations.append((measured, _reward(self.last(_REWARD), "env/all")))

    def last(self, key: str) -> list[Line]:
        """Return the last lines that have a metric, in order."""
        return [line for line in self.recent if key in line[1]][-WINDOW:]

    def mean(self, key: str) -> _Mean | None:
        """Return the mean over the last steps; None while there are too few."""
        values = [(step, metrics[key]) for step, metrics in self.last(key)]
        return None if len(values) < ENOUGH else _mean(values)

    def typical(self, key: str) -> _Mean | None:
        """Return the median likewise."""
        values = [(step, metrics[key]) for step, metrics in self.last(key)]
        return None if len(values) < ENOUGH else _median(values)

    def beginning(self, key: str, *, before: int) -> _Mean | None:
        """Return the median over the first steps; None while they are not all before a step."""
        values = self.early[key]
        return _median(values) if len(values) == ENOUGH and values[-1][0] < before else None


_KL = "departure"
_KLS = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
_TOKENS = "optim/tokens"
_REWARD = "env/all/reward/mean"
_ENTROPY = "optim/entropy"
_EPISODES = re.compile("env/.+/episodes")


def _dead_groups(seen: _Seen, env: str) -> _Found | None:
    """Nearly all groups have equal rewards, so that there is little to learn from; not where groups are of one."""
    mixed = seen.mean(f"env/{env}/groups/mixed")
    episodes, groups = seen.mean(f"env/{env}/episodes"), seen.mean(f"env/{env}/groups")
    good, bad = (seen.mean(f"env/{env}/groups/all_{kind}") for kind in ("good", "bad"))
    if mixed is None or episodes is None or groups is None or good is None or bad is None:
        return None
    if mixed.value >= MIXED_MIN or episodes.value <= groups.value:
        return None
    evidence = f"{mixed.steps}, {good.value:.0%} of the groups were all good and {bad.value:.0%} all bad"
    tasks = "harder" if good.value > bad.value else "easier"
    return _Found(evidence, f"give it {tasks} tasks, or larger groups (batch.group_size)")


def _truncation(seen: _Seen, env: str) -> _Found | None:
    """Limits end many episodes or turns."""
    length, truncated = seen.mean(f"env/{env}/stop/length"), seen.mean(f"env/{env}/truncated")
    if length is not None and length.value > CUT_MAX:
        evidence = f"{length.steps}, {length.value:.0%} of the turns were cut off at the limit of tokens"
        return _Found(evidence, f"raise envs.{env}.max_tokens, or set a length_penalty")
    if truncated is not None and truncated.value > CUT_MAX:
        evidence = f"{truncated.steps}, {truncated.value:.0%} of the episodes were cut short"
        return _Found(evidence, f"raise envs.{env}.max_turns, or the environment's own limit")
    return None


def _infrastructure_failures(seen: _Seen, env: str) -> _Found | None:
    """Many rollouts fail, whether or not they are played again."""
    keys = [f"env/{env}/{name}" for name in ("failed", "retries", "episodes")]
    counts = [(step, [metrics.get(key, 0.0) for key in keys]) for step, metrics in seen.last(keys[0])]
    failed = [(step, lost + again) for step, (lost, again, _) in counts]
    plays = [(step, again + kept) for step, (_, again, kept) in counts]
    shares = [(step, bad / every) for (step, bad), (_, every) in zip(failed, plays, strict=True) if every > 0]
    if len(shares) < ENOUGH or not (share := _mean(shares)).value > FAILED_MAX:
        return None
    lost, every = (sum(count for _, count in one) for one in (failed, plays))
    evidence = f"{share.steps}, {lost:.0f} of {every:.0f} rollouts failed"
    return _Found(evidence, "read why in the column `error` of the run's episodes, and mend that")


def _retry_bias(seen: _Seen, env: str) -> _Found | None:
    """Episodes whose place was played before get other rewards than the rest of their group.

    Plays of a task that are alike do not know of each other, so these are not: a failed one leaves something behind.
    That failing depends on the reply does not show here, since it chooses among first and later plays alike. The mean
    gap over N groups has a standard error of at most σ√(2/N): a group's has two means of one episode or more,
    and their deviation is at most that of all rewards, σ.
    """
    keys = [f"env/{env}/{name}" for name in ("retried/groups", "retried/gap", "reward/std")]
    lines = [(step, [metrics[key] for key in keys]) for step, metrics in seen.recent if metrics.keys() >= {*keys}]
    count = sum(groups for _, (groups, _, _) in lines)
    if not count >= RETRY_GROUPS:
        return None
    gap = sum(groups * gap for _, (groups, gap, _) in lines) / count
    error = sum(deviation for _, (_, _, deviation) in lines) / len(lines) * math.sqrt(2 / count)
    if not abs(gap) > RETRY_ERRORS * error > 0:
        return None
    evidence = (
        f"in {count:.0f} groups of steps {lines[0][0]} to {lines[-1][0]}, episodes that were played again got "
        f"{abs(gap):.3g} {'more' if gap > 0 else 'less'} than the others, {abs(gap) / error:.1f} standard errors"
    )
    return _Found(evidence, "find what a failed rollout leaves behind for the next: files, caches, a sandbox")


def _evaluation_diverges(seen: _Seen, _: str) -> _Found | None:
    """The reward in training rises, and the evaluation has fallen below its best, at two evaluations in a row."""
    if len(seen.evaluations) < 3:
        return None
    earlier = seen.evaluations[:-2]
    best, before = max(earlier, key=lambda one: one[0].value)
    # The best of n alike is by chance the better, the more there are: by at most √(2 ln n) standard errors on average.
    sure = best._replace(value=best.value - math.sqrt(2 * math.log(len(earlier))) * best.error)
    before = before or _reward(seen.opening, "env/all")
    now = _reward(seen.last(_REWARD), "env/all")
    if before is None or now is None or not _above(now, before):
        return None
    if not all(_above(sure, measured) for measured, _ in seen.evaluations[-2:]):
        return None
    last = seen.evaluations[-1][0]
    evidence = (
        f"the evaluation fell from {best.value:.3g} in step {best.last} to {last.value:.3g} in step {last.last}, "
        f"while the reward in training rose from {before.value:.3g} to {now.value:.3g}"
    )
    return _Found(evidence, f"go back to the checkpoint nearest to step {best.last}, and look at what is rewarded")


def _entropy_collapse(seen: _Seen, _: str) -> _Found | None:
    """The model has become nearly certain of what it says."""
    now = seen.typical(_ENTROPY)
    before = now and seen.beginning(_ENTROPY, before=now.first)
    if now is None or before is None or now.value >= ENTROPY_MIN * before.value or before.value < ENTROPY_NEGLIGIBLE:
        return None
    good = seen.mean("env/all/groups/all_good")
    if good is not None and good.value > CERTAIN_MAX:  # it is certain because it is right
        return None
    evidence = f"{now.steps}, the entropy was {now.value:.3g} nats a token, after {before.value:.3g} {before.steps}"
    return _Found(evidence, "lower the learning rate (optimizer.learning_rate)")


def _no_kl(seen: _Seen, _: str) -> _Found | None:
    """A step was trained on, and how far sampler and trainer are apart is no finite number; one such step is enough."""
    step, metrics = seen.recent[-1]
    if not metrics.get(_TOKENS, 0) > 0 or all(key in metrics for key in _KLS):
        return None
    evidence = (
        f"in step {step}, KL(sampler‖trainer) was no finite number: the trainer gave tokens that were sampled the "
        "probability 0, or none"
    )
    return _Found(evidence, "go back to a checkpoint before it, with a lower learning rate (optimizer.learning_rate)")


def _sampler_trainer_kl(seen: _Seen, _: str) -> _Found | None:
    """The sampler and the trainer grow apart, or are too far apart: what is trained on is not what was sampled."""
    now = seen.typical(_KL)
    if now is None:
        return None
    before = seen.beginning(_KL, before=now.first)
    grows = before is not None and now.value > max(KL_GROWTH * before.value, KL_NEGLIGIBLE)
    if not grows and now.value <= HEALTHY_KL:
        return None
    evidence = f"{now.steps}, KL(sampler‖trainer) was {now.value:.2g} nats a token"
    if grows and before is not None:
        evidence += f", after {before.value:.2g} {before.steps}"
    if now.value > HEALTHY_KL:
        evidence += f"; healthy runs stay below {HEALTHY_KL}"
    stale = seen.mean("batch/staleness/mean")
    old = stale is not None and stale.value > 0
    return _Found(evidence, "lower schedule.max_staleness" if old else "lower the learning rate or batch.substeps")


type _Rule = Callable[[_Seen, str], _Found | None]

_ENV_RULES: tuple[_Rule, ...] = (_dead_groups, _truncation, _infrastructure_failures, _retry_bias)
_RULES: tuple[_Rule, ...] = (_evaluation_diverges, _entropy_collapse, _no_kl, _sampler_trainer_kl)


def _mean(values: Sequence[tuple[int, float]]) -> _Mean:
    return _Mean(sum(value for _, value in values) / len(values), values[0][0], values[-1][0])


def _median(values: Sequence[tuple[int, float]]) -> _Mean:
    return _mean(values)._replace(value=median(value for _, value in values))


def _reward(lines: Sequence[Line], prefix: str) -> _Mean | None:
    """The mean reward over lines; its error is as if the episodes of a group were one, so rather too large."""
    keys = [f"{prefix}/{name}" for name in ("reward/mean", "reward/std", "groups")]
    kept = [(step, [metrics[key] for key in keys]) for step, metrics in lines if all(key in metrics for key in keys)]
    groups = sum(values[2] for _, values in kept)
    if not groups > 0:
        return None
    mean = _mean([(step, values[0]) for step, values in kept])
    deviation = sum(values[1] for _, values in kept) / len(kept)
    return mean._replace(error=deviation / math.sqrt(groups))


def _above(one: _Mean, other: _Mean) -> bool:
    return one.value - other.value > ERRORS * math.hypot(one.error, other.error)
