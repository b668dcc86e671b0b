"""Metrics of a step.

Invariant: a metric depends only on the episodes of the batch, the replies of the service, and time, so it can be
recomputed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from math import comb, isfinite

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.datums import PreparedGroup, StepGroup, UpdateResult
from rlkit.algorithms.losses import Loss
from rlkit.algorithms.references import Reference
from rlkit.algorithms.reward_scale import EQUAL, exponent, merge_equal
from rlkit.config.schema import Config
from rlkit.config.schema.metric_names import REWARD_METRICS
from rlkit.types import Bools, Datum, Episode, Floats, Group, Turn

HEALTHY_KL = 0.01
"""Largest KL(sampler‖trainer) of a stable run, in nats per token (Tinker's documentation)."""

SOLVED = 1 - EQUAL
"""Smallest reward that counts as solved: 1, minus rounding error."""

_PERCENTILES = (10, 50, 90)
_PASS_AT = re.compile(r"pass_at_(\d{1,9})")


def group_metrics(
    groups: Sequence[Group], *, prefix: str, supervised: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return rewards and outcomes per environment (`<prefix>/<env>/…`) and of all environments (`<prefix>/all/…`).

    `failed` counts failed episodes and `retries` failed attempts. All other metrics are over episodes with a reward:

    - `p10`: the ⌈n/10⌉-th of n values in ascending order; `p50` and `p90` likewise.
    - `solved`: share of episodes with a reward of at least 1; `solved_at_limit`: share of solved episodes in which the
      token limit ended a turn.
    - `groups/mixed`, `all_good`, `all_bad`: shares of groups with different rewards, of a role too (only these have a
      gradient), with equal rewards of at least 1, and with equal lower rewards (see `rlkit.algorithms.reward_scale`).
    - `pass_at_<k>`: unbiased probability that one of k episodes solves a task, 1 − C(n − c, k) / C(n, k) if c of the n
      episodes of a group are solved (Chen et al. 2021, arXiv:2107.03374). It is the mean over groups with n ≥ k, for
      each power of two k from 2 to the largest n.
    - `unique_bigrams`: share of distinct pairs among an episode's pairs of adjacent sampled tokens, as the mean over
      episodes with a pair. A low share means that the model repeats itself.
    - `retried/gap`: mean reward of retried episodes minus that of the other episodes of their group, as the mean over
      the `retried/groups` groups with both.
    - `budget_forced`: share of turns with a forced end (`BudgetForcing`); missing if no turn has one.

    Environments of conversations (`supervised`) have no metric of rewards, and count as all only where all are such.

    Sorting the tokens is slow, so call it in a thread.
    """
    metrics, env = dict[str, float](), dict[str, float]()
    names = list(dict.fromkeys(group.env for group in groups))
    for name in names:
        env = _env_metrics([group for group in groups if group.env == name])
        if name in supervised:
            env = {key: value for key, value in env.items() if not key.startswith(REWARD_METRICS)}
        metrics |= {f"{prefix}/{name}/{key}": value for key, value in env.items()}
    played = [group for group in groups if group.env not in supervised]
    every = env if len(names) == 1 or not played else _env_metrics(played)
    return metrics | {f"{prefix}/all/{key}": value for key, value in every.items()}


def _env_metrics(groups: Sequence[Group]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.reward is not None]
    metrics = {
        "groups": float(len(groups)),
        "episodes": float(len(episodes)),
        "failed": float(len(episodes) - len(valid)),
        "retries": float(sum(episode.attempt for episode in episodes)),
    }
    if not valid:
        return metrics
    turns = [turn for episode in valid for turn in episode.turns if not turn.frozen]
    rewards = np.array([episode.reward for episode in valid], dtype=np.float64)
    mean, deviation = _mean_and_deviation(rewards)
    metrics |= {
        "reward/mean": mean,
        "reward/std": deviation,
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **_percentiles("reward", rewards),
        "solved": float((rewards >= SOLVED).mean()),
        "solved_at_limit": _mean(reward >= SOLVED and _is_cut(e) for reward, e in zip(rewards, valid, strict=True)),
        **_group_outcomes([group for group in groups if group.valid_mask.any()]),
        "truncated": _mean(episode.status == "truncated" for episode in valid),
        "masked": _mean(episode.masked for episode in valid),
        "turns": _mean(len(episode.turns) for episode in valid),
        "segments": _mean(episode.segment_count for episode in valid),
        "forks": _mean(episode.fork_count for episode in valid),
        **_lengths("tokens", [episode.sampled_tokens for episode in valid]),
        **_lengths("turn_tokens", [int(np.count_nonzero(turn.sampled_mask)) for turn in turns]),
        **_stops(turns),
        **_mean_by_key([{"unique_bigrams": share} for group in groups for share in _shares_of_unique_bigrams(group)]),
        **_retried(groups),
    }
    rewards = [{f"reward/{role}/mean": reward for role, reward in episode.rewards.items()} for episode in valid]
    # rlkit's own metrics win
    return _mean_by_key([episode.metrics for episode in valid]) | _mean_by_key(rewards) | metrics


def _is_cut(episode: Episode) -> bool:
    return any(turn.stop == "length" for turn in episode.turns if not turn.frozen)


def _mean_and_deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of [n] finite values, without overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(values.mean()), float(values.std())
    if isfinite(deviation):
        return mean, deviation
    scale = float(np.abs(values).max())
    scaled = values / scale  # a sum or square overflows near the ends of the float range
    return float(scaled.mean()) * scale, min(float(scaled.std()), 1.0) * scale


def _percentiles(prefix: str, values: NDArray[np.float64]) -> dict[str, float]:
    ascending = np.sort(values)
    # An element rather than an interpolation: exact, and without overflow.
    return {f"{prefix}/p{p}": float(ascending[-(-len(values) * p // 100) - 1]) for p in _PERCENTILES}


def _group_outcomes(groups: Sequence[Group]) -> dict[str, float]:
    """Return the shares of groups by outcome, and `pass_at_<k>`; each group has a valid episode."""
    rewards = [group.rewards[group.valid_mask] for group in groups]
    solved = [np.count_nonzero(values >= SOLVED) for values in rewards]
    outcomes = [
        "mixed" if _is_mixed(group) else "all_good" if count else "all_bad"
        for group, count in zip(groups, solved, strict=True)
    ]
    metrics = {f"groups/{kind}": outcomes.count(kind) / len(outcomes) for kind in ("mixed", "all_good", "all_bad")}
    sizes = [len(values) for values in rewards]
    for k in [2**power for power in range(1, max(sizes).bit_length())]:
        pairs = zip(sizes, solved, strict=True)
        metrics[f"pass_at_{k}"] = _mean(1 - comb(n - c, k) / comb(n, k) for n, c in pairs if n >= k)
    return metrics


def _is_mixed(group: Group) -> bool:
    """Return whether the rewards of the episodes or of a role differ; in a zero-sum game, only those of roles do."""
    rows = [{"": episode.reward, **episode.rewards} for episode in group.episodes if episode.reward is not None]
    columns = [np.array([row[role] for row in rows if role in row]) for role in dict.fromkeys(chain(*rows))]
    merged = [merge_equal(np.ldexp(values, -exponent(values))) for values in columns]
    return any(values.min() < values.max() for values in merged)


def _lengths(prefix: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    values = np.array(lengths, dtype=np.float64)
    ends = {f"{prefix}/mean": float(values.mean()), f"{prefix}/max": float(values.max())}
    return ends | _percentiles(prefix, values)


def _stops(turns: Sequence[Turn]) -> dict[str, float]:
    if not turns:
        return {}
    stops = {f"stop/{why}": _mean(turn.stop == why for turn in turns) for why in ("stop", "length")}
    mixed = [turn.sampled_mask for turn in turns if np.count_nonzero(turn.sampled_mask) < len(turn.completion)]
    forced = sum(bool((mask[:-1] > mask[1:]).any()) for mask in mixed)
    return {**stops, "budget_forced": forced / len(turns)} if forced else stops


def _shares_of_unique_bigrams(group: Group) -> list[float]:
    """Return the shares of the valid episodes with a pair; a group at once, because a call takes longer than a turn."""
    episodes = [episode for episode in group.episodes if episode.reward is not None]
    if not (turns := [turn for episode in episodes for turn in episode.turns]):
        return []
    tokens = np.concatenate([turn.completion for turn in turns], dtype=np.int64)
    starts_pair = np.concatenate([turn.sampled_mask for turn in turns])
    starts_pair[:-1] &= starts_pair[1:]
    turn_ends = np.cumsum([len(turn.completion) for turn in turns])
    starts_pair[turn_ends[turn_ends > 0] - 1] = False  # no pair across turns
    pairs = tokens << 32
    pairs[:-1] |= tokens[1:]
    shares, ends = list[float](), np.cumsum([sum(len(turn.completion) for turn in e.turns) for e in episodes])[:-1]
    for episode_pairs, is_pair in zip(np.split(pairs, ends), np.split(starts_pair, ends), strict=True):
        ascending = np.sort(episode_pairs[is_pair])  # sorting, unlike hashing, lets other threads run
        if len(ascending):
            shares.append((1 + np.count_nonzero(ascending[1:] != ascending[:-1])) / len(ascending))
    return shares


def _retried(groups: Sequence[Group]) -> dict[str, float]:
    gaps = list[float]()
    for group in groups:
        is_retried = np.array([episode.attempt > 0 for episode in group.episodes], dtype=np.bool_)
        retried, first = group.rewards[group.valid_mask & is_retried], group.rewards[group.valid_mask & ~is_retried]
        if len(retried) and len(first):
            with np.errstate(over="ignore", invalid="ignore"):
                gaps.append(float(retried.mean() - first.mean()))
    return {"retried/groups": float(len(gaps)), **_mean_by_key([{"retried/gap": gap} for gap in gaps])}


def _mean_by_key(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: _mean(float(row[key]) for row in rows if key in row) for key in keys}


def step_metrics(groups: Sequence[StepGroup], *, version: int, supervised: frozenset[str]) -> dict[str, float]:
    """Return the metrics of the groups of a step: those of `group_metrics` under `env/…`, and others of the batch.

    - `replaced`: number of groups that were replaced because their rewards were equal.
    - `dropped`: number of groups with too few episodes with a reward.
    - `excess`: number of sequences that were too long.
    - `sampled_tokens`: sampled tokens of all these groups, including failed episodes, but no conversations
      (`supervised`).
    - `staleness`: `version` minus the version that sampled a turn.
    - `length_penalty`, `clipped`: mean penalty of an episode and share of clipped advantages, as means over groups;
      missing if the setting is off.
    - `kl_reference/v1`, `v2`: estimates of KL(q‖p_ref) over all sampled tokens, as in `update_metrics`.
    - `teacher/v1`, `v2`: the same of the teachers; `teacher/quarter/1` to `4` are `v1` of each quarter of the sampled
      tokens of a sequence; `env/<name>/teacher/kl` is `v1` of an environment, and `env/<name>/teacher/<teacher>/kl`
      of one of its `teachers`.

    Args:
        version: version of the weights that train on the groups.
    """
    trained = [group.prepared for group in groups if group.is_trained]
    sampled = [group.prepared.group for group in groups if group.prepared.group.env not in supervised]
    played = [group.group for group in trained if group.group.env not in supervised]
    episodes = [episode for group in played for episode in group.episodes if episode.reward is not None]
    ages = [version - turn.version for episode in episodes for turn in episode.turns if not turn.frozen]
    return {
        **group_metrics([group.prepared.group for group in groups], prefix="env", supervised=supervised),
        "batch/groups": float(len(trained)),
        "batch/replaced": float(sum(group.prepared.is_usable and not group.is_trained for group in groups)),
        "batch/dropped": float(sum(not group.prepared.is_usable for group in groups)),
        "batch/excess": float(sum(group.overlong for group in trained)),
        "batch/sampled_tokens": float(sum(group.sampled_tokens for group in sampled)),
        "batch/staleness/mean": _mean(ages),
        "batch/staleness/max": float(max(ages, default=0)),
        **_shaping_metrics(trained),
        **_estimator_metrics([group.prepared for group in groups]),
    }


def _estimator_metrics(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    """Return the metrics of the estimators, each as the mean over the groups that have it."""
    pairs = [(env, group.estimator_metrics) for group in prepared for env in (group.group.env, "all")]
    return _mean_by_key([{f"env/{env}/advantage/{name}": row[name] for name in row} for env, row in pairs])


def _shaping_metrics(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    shaping = [{"batch/length_penalty": group.length_penalty, "batch/clipped": group.clipped} for group in prepared]
    metrics = _mean_by_key([{key: value for key, value in row.items() if value is not None} for row in shaping])
    columns = defaultdict[str, list[NDArray[np.float64]]](list)
    for env, reference, answers in [(group.group.env, *pair) for group in prepared for pair in group.drifts]:
        prefix, drifts = "teacher" if reference.is_teacher else "kl_reference", [drift.ratios for drift in answers]
        columns[f"{prefix}/v1"] += drifts
        columns[f"{prefix}/v2"] += [np.square(drift) / 2 for drift in drifts]
        if reference.is_teacher:
            for key in teacher_keys(f"env/{env}", reference):
                columns[key] += drifts
            for drift, quarter in product(drifts, range(4)):
                is_inside = np.arange(len(drift)) * 4 // max(len(drift), 1) == quarter
                columns[f"teacher/quarter/{quarter + 1}"].append(drift[is_inside])
    return metrics | mean_by_token(columns)


def teacher_keys(prefix: str, teacher: Reference) -> tuple[str, ...]:
    """Return the metrics of the divergence from a teacher: of all teachers of an environment, and of this one."""
    together = f"{prefix}/teacher/kl"
    return (together, f"{prefix}/teacher/{teacher.name}/kl") if teacher.name else (together,)


def mean_by_token(columns: Mapping[str, Sequence[NDArray[np.float64]]]) -> dict[str, float]:
    """Return the mean of each column over the tokens of all sequences; leave out a column without tokens."""
    values = {key: np.concatenate([np.empty(0), *rows]) for key, rows in columns.items()}
    return {key: float(tokens.mean()) for key, tokens in values.items() if len(tokens)}


def update_metrics(update: UpdateResult) -> dict[str, float]:
    """Return the divergence of sampler and trainer on the sampled tokens, and the metrics that the service reported.

    q is the probability of a token by the sampler, p by the trainer, d = log q − log p, and w = p/q; N tokens were
    sampled.

    - `kl_sample_train_v1`, `v2`: mean d and ½ mean d², two estimates of KL(q‖p) (Schulman, "Approximating KL
      divergence", 2020).
    - `entropy`: −mean log q.
    - `ratio/effective`: effective sample size as a share, (Σw)² / (N Σw²), from 1/N to 1 (Kong 1992).
    - `ratio/clipped`: share of tokens that the loss clips; missing if the loss does not clip.
    - `nll`: −mean log p of the tokens of conversations, which were not sampled and count in no other metric of these.
    """
    data = [(datum, group.group.env in update.supervised) for group in update.groups for datum in group.data]
    rows = list(zip(data, update.logprobs, strict=True))
    sampled = [(datum, row) for (datum, is_supervised), row in rows if not is_supervised]
    conversations = [-row[datum.mask].astype(np.float64) for (datum, is_supervised), row in rows if is_supervised]
    return {
        **(_divergence(sampled) | _clipping_metrics(update.loss, sampled) if sampled else {}),
        **mean_by_token({"optim/nll": conversations}),
        "optim/sequences": float(len(data)),
        "optim/tokens": float(sum(int(np.count_nonzero(datum.mask)) for datum, _ in data)),
        "optim/learning_rate": update.learning_rate,
        **{f"service/{key}": float(value) for key, value in update.metrics.items()},
    }


def _divergence(pairs: Sequence[tuple[Datum, Floats]]) -> dict[str, float]:
    """Return the divergence of sampler and trainer on sequences with their log-probabilities by the trainer."""
    sampled = np.concatenate([datum.logprobs[datum.mask] for datum, _ in pairs], dtype=np.float64)
    trained = np.concatenate([logprobs[datum.mask] for datum, logprobs in pairs], dtype=np.float64)
    # The trainer's probability of a token may be 0 or NaN; a finding then reports the non-finite metric.
    # In place, because page faults of new arrays would take longer than the arithmetic.
    with np.errstate(invalid="ignore", over="ignore"):
        entropy = float(-sampled.mean())
        difference = np.subtract(sampled, trained, out=trained)
        v1, v2 = float(difference.mean()), float(np.square(difference, out=sampled).mean() / 2)
        ratios = _ratios(np.negative(difference, out=difference)) if len(difference) else dict[str, float]()
    return {"optim/kl_sample_train_v1": v1, "optim/kl_sample_train_v2": v2, "optim/entropy": entropy} | ratios


def departure(metrics: Mapping[str, float]) -> float | None:
    """Return the divergence of sampler and trainer, max(|v1|, v2); None if the step trained on nothing."""
    distances = [abs(metrics[key]) for v in ("v1", "v2") if (key := f"optim/kl_sample_train_{v}") in metrics]
    return max(distances, default=None)


class DivergenceMonitor:
    """Notice when sampler and trainer begin to differ too much. A step that trains on nothing changes nothing."""

    def __init__(self) -> None:
        self._is_diverged = False

    def add(self, metrics: Mapping[str, float]) -> str | None:
        """Add the metrics of a step; return a message for people if the divergence begins with it."""
        kl, was_diverged = departure(metrics), self._is_diverged
        if kl is None:
            return None
        self._is_diverged = kl > HEALTHY_KL
        if was_diverged or not self._is_diverged:
            return None
        fix = "lower the learning rate, schedule.max_staleness or batch.substeps"
        return f"KL(sampler‖trainer) is {kl:.2g} nats per token, but healthy runs stay below {HEALTHY_KL}: {fix}"


def _ratios(log_ratios: NDArray[np.float64]) -> dict[str, float]:
    largest, smallest = log_ratios.max(), log_ratios.min()
    weights = np.subtract(log_ratios, largest, out=log_ratios)  # scaled to a maximum of 1, to avoid overflow
    np.exp(weights, out=weights)
    total = weights.sum()
    return {
        "optim/ratio/max": float(np.exp(largest)),
        "optim/ratio/min": float(np.exp(smallest)),
        "optim/ratio/effective": float(total**2 / (len(weights) * np.square(weights, out=weights).sum())),
    }


def _clipping_metrics(loss: Loss, pairs: Sequence[tuple[Datum, Floats]]) -> dict[str, float]:
    clips = list[Bools | None]()
    for datum, logprobs in pairs:
        differences = (logprobs[datum.mask] - datum.logprobs[datum.mask]).astype(np.float64)
        clips.append(loss.clips(differences, datum.advantages[datum.mask].astype(np.float64)))
    return mean_by_token({"optim/ratio/clipped": [mask.astype(np.float64) for mask in clips if mask is not None]})


def has_by_chance(metric: str, config: Config) -> bool:
    """Return whether a real run may have an episode metric that its dry run lacked by chance."""
    of, _, rest = metric.partition("/")
    env, _, name = rest.partition("/")
    if name == "retried/gap":
        return True
    specs = [spec for key, spec in config.envs.items() if env in (key, "all")] if of == "env" else []
    if name.startswith("advantage/"):
        key = name.removeprefix("advantage/")
        return any(key in (spec.advantage or config.advantage).metric_names for spec in specs)
    largest = max((spec.group_size or config.batch.group_size for spec in specs), default=0)
    k = int(match[1]) if (match := _PASS_AT.fullmatch(name)) else 0
    return 2 <= k <= largest and k.bit_count() == 1


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return float(np.mean(collected)) if collected else 0.0
