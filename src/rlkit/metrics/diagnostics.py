"""Diagnosis of a run from its metrics: each finding has a name, its evidence and one action.

Invariant: findings depend only on the lines of metrics, so a running run and its folder report the same. Steady,
healthy metrics have no findings. `rlkit.metrics.env_reports` reports code that blocks the event loop, which
metrics do not show.

A rule looks at the last `WINDOW` steps that have a metric, and needs at least `ENOUGH` of them. It uses the mean of a
share, because a step may have few groups of an environment, and the median of KL and entropy, because these can jump in
a single step. It compares them with the first `ENOUGH` steps. A non-finite KL is a finding immediately.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlkit.metrics.metrics import HEALTHY_KL, departure

type Line = tuple[int, Mapping[str, float]]  # a step and its metrics

WINDOW = 10
ENOUGH = 5
MEMORY = 100
"""Number of recent steps in memory, for rare events. An environment that is absent for longer is forgotten."""

MIXED_MIN = 0.2
"""Minimum share of groups with different rewards. Below it, four of five rollouts cost money and give no gradient."""

SOLVED_MIN = 1 - MIXED_MIN  # share of groups with only solved episodes from which an environment counts as solved

CUT_MAX = 0.2
"""Maximum share of episodes or turns that end at a limit. Above it, the limit often determines the reward."""

FAILED_MAX = 0.1
"""Maximum share of failed rollouts. Above it, every second group of 8 has a retry or fewer episodes."""

ENTROPY_MIN = 0.2
"""Minimum entropy, as a share of the initial entropy. Below it, the rollouts of a group are nearly equal and cannot be
compared. Rewards rise at the cost of entropy, and stop rising without it (Cui et al. 2025, arXiv:2505.22617)."""

ENTROPY_NEGLIGIBLE = 0.05
"""Entropy in nats per token. A model that starts below it, as with single-word answers, has no diversity to lose."""

CERTAIN_MAX = 0.5
"""Share of groups that are all good. Above it, low entropy means that the tasks are learned."""

KL_GROWTH = 3.0  # growth factor of KL(sampler‖trainer) since the beginning of the run
KL_NEGLIGIBLE = HEALTHY_KL / 10  # KL(sampler‖trainer) below which growth is rounding error
ERRORS = 2.0  # standard errors by which two means must differ, at two evaluations in a row
BUSY_MAX = 0.5
"""Maximum share of a step's time in which the run's own process runs code of environments: above it, a second process
can nearly double the speed."""

WORKERS_BUSY_MAX = 0.9
"""Maximum processor use of workers. Above it, rollouts wait for each other's code."""

RETRY_GROUPS = 20
RETRY_ERRORS = 4.0
"""Standard errors of the retry gap. Larger than `ERRORS`, because this rule is tested at every step."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run.

    Args:
        name: name of the rule, such as `entropy_collapse`.
        env: name of the environment; `all` for the run as a whole.
        first: first step with this finding.
        last: latest step with this finding.
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


def find_problems(run: Iterable[Line], *, enough: int = ENOUGH) -> list[Finding]:
    """Return all findings at any step of a run, given its lines in order; the earliest finding comes first.

    Args:
        enough: number of steps that a rule needs; with fewer, chance causes more findings.
    """
    monitor = FindingMonitor(enough=enough)
    for step, metrics in run:
        monitor.add(step, metrics)
    return monitor.findings


class FindingMonitor:
    """Apply all rules to the metrics of a run, step by step."""

    def __init__(self, *, enough: int = ENOUGH) -> None:
        self._history = _History(enough)
        self._findings: dict[tuple[str, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, the earliest first."""
        return list(self._findings.values())

    def add(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Add a step, apply the rules, and return the new findings."""
        self._history.add(step, metrics)
        new = list[Finding]()
        envs = [key[len("env/") : -len("/episodes")] for key in metrics if _EPISODES.fullmatch(key)]
        rules = [(rule, env) for env in envs if env != "all" for rule in _ENV_RULES]
        for rule, env in [*rules, *((rule, "all") for rule in _RULES)]:
            if (diagnosis := rule(self._history, env)) is None:
                continue
            key = (rule.__name__.removeprefix("_"), env)
            earlier = self._findings.get(key)
            self._findings[key] = Finding(*key, earlier.first if earlier else step, step, *diagnosis)
            if earlier is None:
                new.append(self._findings[key])
        return new


type _Diagnosis = tuple[str, str]
"""Evidence and action of a finding."""


class _Mean(NamedTuple):
    """A mean, or a median, over the steps `first` to `last`; `error` is the standard error of a mean reward."""

    value: float
    first: int
    last: int
    error: float = 0.0

    @property
    def steps(self) -> str:
        return f"in step {self.last}" if self.first == self.last else f"in steps {self.first} to {self.last}"


def _mean(values: Sequence[tuple[int, float]]) -> _Mean:
    return _Mean(sum(value for _, value in values) / len(values), values[0][0], values[-1][0])


def _median(values: Sequence[tuple[int, float]]) -> _Mean:
    return _mean(values)._replace(value=statistics.median(value for _, value in values))


@dataclass(slots=True)
class _History:
    """Metrics of a run that the rules use."""

    enough: int  # number of steps that a rule needs
    recent: deque[Line] = field(default_factory=lambda: deque[Line](maxlen=MEMORY))  # last `MEMORY` lines
    opening: list[Line] = field(default_factory=list[Line])  # first `enough` lines with rewards
    # First `enough` values of KL and entropy, with their steps.
    early: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    # Mean reward of each evaluation, and mean training reward of the last `WINDOW` steps up to it.
    evaluations: list[tuple[_Mean, _Mean | None]] = field(default_factory=list[tuple[_Mean, _Mean | None]])

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        if (kl := departure(finite)) is not None:
            finite[_KL] = kl
        self.recent.append((step, finite))
        if _REWARD in finite and len(self.opening) < self.enough:
            self.opening.append((step, finite))
        for key in (_KL, _ENTROPY):
            values = self.early.setdefault(key, [])
            if key in finite and len(values) < self.enough:
                values.append((step, finite[key]))
        if (evaluation := _reward([(step, finite)], "eval/all")) is not None:
            self.evaluations.append((evaluation, _reward(self.last_lines(_REWARD), "env/all")))

    def last_lines(self, key: str) -> list[Line]:
        """Return the last `WINDOW` lines that have a metric, in order."""
        return [line for line in self.recent if key in line[1]][-WINDOW:]

    def mean(self, key: str, *, average: Callable[[Sequence[tuple[int, float]]], _Mean] = _mean) -> _Mean | None:
        """Return an average of a metric over its last lines; None if there are fewer than `enough`."""
        values = [(step, metrics[key]) for step, metrics in self.last_lines(key)]
        return None if len(values) < self.enough else average(values)

    def beginning(self, key: str, *, before: int) -> _Mean | None:
        """Return the median of a metric over its first `enough` steps; None unless all precede the step `before`."""
        values = self.early[key]
        return _median(values) if len(values) == self.enough and values[-1][0] < before else None


_KL = "departure"
_KLS = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
_TOKENS = "optim/tokens"
_REWARD = "env/all/reward/mean"
_ENTROPY = "optim/entropy"
_EPISODES = re.compile("env/.+/episodes")


def _dead_groups(history: _History, env: str) -> _Diagnosis | None:
    """Diagnose groups that mostly have equal rewards, and so no gradient; not groups of size 1, or with a teacher."""
    mixed = history.mean(f"env/{env}/groups/mixed")
    episodes, groups = history.mean(f"env/{env}/episodes"), history.mean(f"env/{env}/groups")
    good, bad = (history.mean(f"env/{env}/groups/all_{kind}") for kind in ("good", "bad"))
    if mixed is None or episodes is None or groups is None or good is None or bad is None:
        return None
    is_solved = good.value >= SOLVED_MIN  # `_solved` reports it
    if is_solved or mixed.value >= MIXED_MIN or episodes.value <= groups.value or history.mean(f"env/{env}/teacher/kl"):
        return None
    kinds = ((good.value, "all are 1 or more"), (bad.value, "all are equal and below 1"))
    parts = [f"the rewards differ in {mixed.value:.0%} of the groups"]
    parts += [f"{kind} in {share:.0%}" for share, kind in kinds if share > 0]
    evidence = f"{mixed.steps}, {', '.join(parts)}"
    tasks = "harder" if good.value > bad.value else "easier"
    return evidence, f"use {tasks} tasks, or larger groups (batch.group_size)"


def _solved(history: _History, env: str) -> _Diagnosis | None:
    """Diagnose tasks that nearly all groups solve in all their episodes; not with a teacher."""
    good, reward = history.mean(f"env/{env}/groups/all_good"), history.mean(f"env/{env}/reward/mean")
    if good is None or reward is None or good.value < SOLVED_MIN or history.mean(f"env/{env}/teacher/kl"):
        return None
    evidence = f"{good.steps}, {good.value:.0%} of the groups solved their task in each episode"
    return f"{evidence}; mean reward {reward.value:.2f}", "stop here, or use harder tasks"


def _truncation(history: _History, env: str) -> _Diagnosis | None:
    """Diagnose limits that truncate many episodes or turns, unless the token limit spoils no reply."""
    length, truncated = history.mean(f"env/{env}/stop/length"), history.mean(f"env/{env}/truncated")
    if length is not None and length.value > CUT_MAX and not _is_limit_by_design(env, length.value, history):
        evidence = f"{length.steps}, {length.value:.0%} of the turns were truncated at the token limit"
        return evidence, f"raise envs.{env}.max_tokens, or set a length_penalty"
    if truncated is not None and truncated.value > CUT_MAX:
        evidence = f"{truncated.steps}, {truncated.value:.0%} of the episodes were truncated"
        return evidence, f"raise envs.{env}.max_turns, or the environment's own limit"
    return None


def _is_limit_by_design(env: str, length: float, history: _History) -> bool:
    """Return whether all replies are one token, or are solved nearly as often if truncated: the answer comes first."""
    tokens = history.mean(f"env/{env}/turn_tokens/mean")
    if tokens is not None and tokens.value == 1:
        return True
    solved, at_limit = history.mean(f"env/{env}/solved"), history.mean(f"env/{env}/solved_at_limit")
    return solved is not None and at_limit is not None and at_limit.value >= length * solved.value / 2 > 0


def _infrastructure_failures(history: _History, env: str) -> _Diagnosis | None:
    """Diagnose many failing rollouts, retried or not."""
    keys = [f"env/{env}/{name}" for name in ("failed", "retries", "episodes")]
    counts = [(step, [metrics.get(key, 0.0) for key in keys]) for step, metrics in history.last_lines(keys[0])]
    rollouts = [(step, failed + retries, episodes + retries) for step, (failed, retries, episodes) in counts]
    shares = [(step, failures / attempts) for step, failures, attempts in rollouts if attempts > 0]
    if len(shares) < history.enough or not (share := _mean(shares)).value > FAILED_MAX:
        return None
    failures, attempts = sum(row[1] for row in rollouts), sum(row[2] for row in rollouts)
    evidence = f"{share.steps}, {failures:.0f} of {attempts:.0f} rollouts failed"
    return evidence, "read the reason in the column `error` of the run's episodes, and fix it"


def _retry_bias(history: _History, env: str) -> _Diagnosis | None:
    """Diagnose retried episodes whose rewards differ from the other rewards of their group.

    Independent rollouts of a task have the same expected reward, so a gap means that failed attempts have side effects.
    A reply that makes its rollout fail causes no gap, because it does so at every attempt. The gap of a group is a
    difference of two means over at least one episode each. With the standard deviation σ of all rewards, the mean gap
    over N groups has a standard error of at most σ√(2/N).
    """
    keys = [f"env/{env}/{name}" for name in ("retried/groups", "retried/gap", "reward/std")]
    lines = [(step, [metrics[key] for key in keys]) for step, metrics in history.recent if metrics.keys() >= {*keys}]
    count = sum(groups for _, (groups, _, _) in lines)
    if not count >= RETRY_GROUPS:
        return None
    gap = sum(groups * gap for _, (groups, gap, _) in lines) / count
    error = sum(deviation for _, (_, _, deviation) in lines) / len(lines) * math.sqrt(2 / count)
    if not abs(gap) > RETRY_ERRORS * error > 0:
        return None
    difference = f"{abs(gap):.3g} {'more' if gap > 0 else 'less'} reward than the others"
    where = f"in {count:.0f} groups of steps {lines[0][0]} to {lines[-1][0]}"
    evidence = f"{where}, retried episodes got {difference}, {abs(gap) / error:.1f} standard errors"
    return evidence, "find the side effects of failed rollouts on later rollouts: files, caches, a sandbox"


def _evaluation_diverges(history: _History, _: str) -> _Diagnosis | None:
    """Diagnose a rising training reward if the last two evaluations are below the best evaluation."""
    if len(history.evaluations) < 3:
        return None
    earlier = history.evaluations[:-2]
    best, before = max(earlier, key=lambda evaluation: evaluation[0].value)
    # The maximum of n equal evaluations exceeds their mean by at most √(2 ln n) standard errors on average.
    corrected = best._replace(value=best.value - math.sqrt(2 * math.log(len(earlier))) * best.error)
    before = before or _reward(history.opening, "env/all")
    now = _reward(history.last_lines(_REWARD), "env/all")
    is_lower = all(_is_above(corrected, evaluation) for evaluation, _ in history.evaluations[-2:])
    if not is_lower or before is None or now is None or not _is_above(now, before):
        return None
    last = history.evaluations[-1][0]
    fall = f"the evaluation fell from {best.value:.3g} in step {best.last} to {last.value:.3g} in step {last.last}"
    rise = f"the reward in training rose from {before.value:.3g} to {now.value:.3g}"
    return f"{fall}, while {rise}", f"return to the checkpoint nearest to step {best.last}, and check the reward"


def _entropy_collapse(history: _History, _: str) -> _Diagnosis | None:
    """Diagnose a median entropy far below its initial value, unless most tasks are solved."""
    now = history.mean(_ENTROPY, average=_median)
    before = now and history.beginning(_ENTROPY, before=now.first)
    if now is None or before is None or now.value >= ENTROPY_MIN * before.value or before.value < ENTROPY_NEGLIGIBLE:
        return None
    good = history.mean("env/all/groups/all_good")
    if good is not None and good.value > CERTAIN_MAX:  # certain because the tasks are learned
        return None
    evidence = f"{now.steps}, the entropy was {now.value:.3g} nats a token, after {before.value:.3g} {before.steps}"
    return evidence, "lower the learning rate (optimizer.learning_rate)"


def _no_kl(history: _History, _: str) -> _Diagnosis | None:
    """Diagnose a non-finite KL(sampler‖trainer) of the last step, if that step trained on samples."""
    step, metrics = history.recent[-1]
    is_supervised = "optim/nll" in metrics and _ENTROPY not in metrics
    if is_supervised or not metrics.get(_TOKENS, 0) > 0 or all(key in metrics for key in _KLS):
        return None
    reason = "the trainer's probability of sampled tokens is 0 or NaN"
    evidence = f"in step {step}, KL(sampler‖trainer) was not finite: {reason}"
    return evidence, "return to an earlier checkpoint, with a lower learning rate (optimizer.learning_rate)"


def _sampler_trainer_kl(history: _History, _: str) -> _Diagnosis | None:
    """Diagnose a large or growing KL(sampler‖trainer): training is off-policy."""
    if (now := history.mean(_KL, average=_median)) is None:
        return None
    before = history.beginning(_KL, before=now.first)
    grows = before is not None and now.value > max(KL_GROWTH * before.value, KL_NEGLIGIBLE)
    if not grows and now.value <= HEALTHY_KL:
        return None
    evidence = f"{now.steps}, KL(sampler‖trainer) was {now.value:.2g} nats a token"
    if grows and before is not None:
        evidence += f", after {before.value:.2g} {before.steps}"
    if now.value > HEALTHY_KL:
        evidence += f"; healthy runs stay below {HEALTHY_KL}"
    staleness = history.mean("batch/staleness/mean")
    is_stale = staleness is not None and staleness.value > 0
    return evidence, "reduce schedule.max_staleness" if is_stale else "reduce the learning rate or batch.substeps"


def _environment_cpu(history: _History, _: str) -> _Diagnosis | None:
    """Diagnose a run that is bound by the processor time of its environments."""
    busy, live = history.mean("time/env_busy"), history.mean("workers/live")
    if busy is not None and live is None and busy.value > BUSY_MAX:
        evidence = f"{busy.steps}, the code of environments ran for {busy.value:.0%} of the time, in the run's process"
        return evidence, "play rollouts in other processes: set rollouts.workers to auto"
    if busy is not None and live is not None and busy.value > WORKERS_BUSY_MAX:
        evidence = f"{busy.steps}, {live.value:.0f} workers were busy for {busy.value:.0%} of the time"
        return evidence, "add processors, or a Ray cluster (rollouts.workers), and raise their number"
    return None


type _Rule = Callable[[_History, str], _Diagnosis | None]

_ENV_RULES: tuple[_Rule, ...] = (_dead_groups, _solved, _truncation, _infrastructure_failures, _retry_bias)
_RULES: tuple[_Rule, ...] = (_evaluation_diverges, _entropy_collapse, _no_kl, _sampler_trainer_kl, _environment_cpu)


def _reward(lines: Sequence[Line], prefix: str) -> _Mean | None:
    """Return the mean reward over lines. Its error counts a group as one episode, so it is an upper estimate."""
    keys = [f"{prefix}/{name}" for name in ("reward/mean", "reward/std", "groups")]
    rows = [(step, [metrics[key] for key in keys]) for step, metrics in lines if metrics.keys() >= {*keys}]
    groups = sum(values[2] for _, values in rows)
    if not groups > 0:
        return None
    mean = _mean([(step, values[0]) for step, values in rows])
    deviation = sum(values[1] for _, values in rows) / len(rows)
    return mean._replace(error=deviation / math.sqrt(groups))


def _is_above(mean: _Mean, other: _Mean) -> bool:
    return mean.value - other.value > ERRORS * math.hypot(mean.error, other.error)
