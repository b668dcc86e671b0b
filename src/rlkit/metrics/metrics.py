"""Metrics of a step.

Invariant: every metric is a function of the batch's episodes, of the service's replies and of time, so it can be
recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import comb, isfinite
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.datums import PreparedGroup, StepGroup, UpdateResult
from rlkit.algorithms.reward_scale import EQUAL, has_spread
from rlkit.types import Bools, Episode, Group, Turn

if TYPE_CHECKING:
    from rlkit.config.schema import Config

HEALTHY_KL = 0.01
"""Largest KL(sampler‖trainer) of a stable run, in nats a token, by Tinker's documentation."""

SOLVED = 1 - EQUAL
"""Smallest reward that counts as full marks: 1, less rounding error."""

_PERCENTILES = (10, 50, 90)
_PASS_AT = re.compile(r"pass_at_(\d{1,9})")


def group_metrics(groups: Sequence[Group], *, prefix: str) -> dict[str, float]:
    """Return rewards and outcomes by environment and over all, under `<prefix>/<env>/…` and `<prefix>/all/…`.

    Failed episodes count only in `failed`, and failed attempts in `retries`; all other metrics are of the episodes with
    a reward. Of n values in ascending order, the percentile `p10` is the ⌈n/10⌉-th, and so on. An episode is `solved`
    if its reward is at least 1. Of the groups with a reward, `groups/mixed` is the share with different rewards, which
    have a gradient; the others are `all_good` if solved and `all_bad` if not, so that the three add up to 1.
    `rlkit.algorithms.reward_scale` defines which rewards differ.

    `pass_at_<k>` is the unbiased chance that one of k episodes solves a task: with c of the n episodes of a group
    solved, 1 − C(n − c, k) / C(n, k), in the mean over the groups with n ≥ k (Chen et al. 2021, arXiv:2107.03374), for
    the powers of two from 2 to the largest n. `unique_bigrams` is the share of an episode's pairs of adjacent sampled
    tokens that are distinct, in the mean over the episodes with a pair: low where the model repeats itself.
    `retried/gap` is the mean reward of retried episodes less that of the others of their group, in the mean over the
    `retried/groups` groups that have both.

    `budget_forced` is the share of turns with a forced end (`BudgetForcing`), present if there is one.

    Sorting the tokens takes long, so callers compute it in a thread.
    """
    metrics = dict[str, float]()
    names = list(dict.fromkeys(group.env for group in groups))
    for name in names:
        metrics |= _env_metrics(f"{prefix}/{name}", [group for group in groups if group.env == name])
    if len(names) == 1:  # its metrics are those of all environments
        env = f"{prefix}/{names[0]}"
        return metrics | {f"{prefix}/all{key.removeprefix(env)}": value for key, value in metrics.items()}
    return metrics | _env_metrics(f"{prefix}/all", groups)


def _env_metrics(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.reward is not None]
    metrics = {
        f"{prefix}/groups": float(len(groups)),
        f"{prefix}/episodes": float(len(episodes)),
        f"{prefix}/failed": float(len(episodes) - len(valid)),
        f"{prefix}/retries": float(sum(episode.attempt for episode in episodes)),
    }
    if not valid:
        return metrics
    turns = [turn for episode in valid for turn in episode.turns]
    rewards = np.array([episode.reward for episode in valid], dtype=np.float64)
    mean, deviation = _mean_and_deviation(rewards)
    metrics |= {
        f"{prefix}/reward/mean": mean,
        f"{prefix}/reward/std": deviation,
        f"{prefix}/reward/min": float(rewards.min()),
        f"{prefix}/reward/max": float(rewards.max()),
        **_percentiles(f"{prefix}/reward", rewards),
        f"{prefix}/solved": float((rewards >= SOLVED).mean()),
        **_group_outcomes(prefix, [group.rewards[group.valid_mask] for group in groups if group.valid_mask.any()]),
        f"{prefix}/truncated": _mean(float(episode.status == "truncated") for episode in valid),
        f"{prefix}/masked": _mean(float(episode.masked) for episode in valid),
        f"{prefix}/turns": _mean(float(len(episode.turns)) for episode in valid),
        f"{prefix}/segments": _mean(float(episode.segment_count) for episode in valid),
        **_lengths(f"{prefix}/tokens", [episode.sampled_tokens for episode in valid]),
        **_lengths(f"{prefix}/turn_tokens", [int(np.count_nonzero(turn.sampled_mask)) for turn in turns]),
        **_stops(prefix, turns),
        **_unique_bigrams(prefix, valid),
        **_retried(prefix, groups),
    }
    return {f"{prefix}/{key}": value for key, value in _reported(valid).items()} | metrics  # rlkit's own metrics win


def _mean_and_deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of [n] finite values; both are finite."""
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


def _group_outcomes(prefix: str, rewards: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Return the outcomes of groups by their rewards, [n ≥ 1] each."""
    mixed = [has_spread(values) for values in rewards]
    solved = [int((values >= SOLVED).sum()) for values in rewards]
    good = [not different and count > 0 for different, count in zip(mixed, solved, strict=True)]
    metrics = {
        f"{prefix}/groups/mixed": _mean(map(float, mixed)),
        f"{prefix}/groups/all_good": _mean(map(float, good)),
        f"{prefix}/groups/all_bad": _mean(
            float(not (different or all_good)) for different, all_good in zip(mixed, good, strict=True)
        ),
    }
    sizes = [len(values) for values in rewards]
    k = 2
    while k <= max(sizes):
        pairs = zip(sizes, solved, strict=True)
        metrics[f"{prefix}/pass_at_{k}"] = _mean(1 - comb(n - c, k) / comb(n, k) for n, c in pairs if n >= k)
        k *= 2
    return metrics


def _lengths(prefix: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    values = np.array(lengths, dtype=np.float64)
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        **_percentiles(prefix, values),
    }


def _stops(prefix: str, turns: Sequence[Turn]) -> dict[str, float]:
    if not turns:
        return {}
    stops = {f"{prefix}/stop/{why}": _mean(float(turn.stop == why) for turn in turns) for why in ("stop", "length")}
    forced = [
        not turn.sampled_mask.all() and bool((turn.sampled_mask[:-1] & ~turn.sampled_mask[1:]).any()) for turn in turns
    ]
    return {**stops, f"{prefix}/budget_forced": _mean(map(float, forced))} if any(forced) else stops


def _unique_bigrams(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    shares = list[float]()
    for episode in episodes:
        pairs = np.sort(_bigrams(episode.turns))  # sorting, unlike hashing, lets other threads run
        if len(pairs):
            shares.append((1 + np.count_nonzero(pairs[1:] != pairs[:-1])) / len(pairs))
    return {f"{prefix}/unique_bigrams": _mean(shares)} if shares else {}


def _bigrams(turns: Sequence[Turn]) -> NDArray[np.int64]:
    """Return the adjacent pairs of sampled tokens, both tokens of a pair in one number."""
    turns = [turn for turn in turns if len(turn.completion)]
    if not turns:
        return np.empty(0, np.int64)
    tokens = np.concatenate([turn.completion for turn in turns], dtype=np.int64)
    sampled = np.concatenate([turn.sampled_mask for turn in turns])
    pair = sampled[:-1] & sampled[1:]
    ends = np.cumsum([len(turn.completion) for turn in turns[:-1]], dtype=np.int64)
    pair[ends - 1] = False  # no pair across turns
    return (tokens[:-1] << 32 | tokens[1:])[pair]


def _retried(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    gaps = list[float]()
    for group in groups:
        is_retried = np.array([episode.attempt > 0 for episode in group.episodes], dtype=np.bool_)
        retried, first = group.rewards[group.valid_mask & is_retried], group.rewards[group.valid_mask & ~is_retried]
        if len(retried) and len(first):
            with np.errstate(over="ignore", invalid="ignore"):
                gaps.append(float(retried.mean() - first.mean()))
    metrics = {f"{prefix}/retried/groups": float(len(gaps))}
    return {**metrics, f"{prefix}/retried/gap": _mean(gaps)} if gaps else metrics


def _reported(episodes: Sequence[Episode]) -> dict[str, float]:
    keys = dict.fromkeys(key for episode in episodes for key in episode.metrics)
    return {key: _mean(float(e.metrics[key]) for e in episodes if key in e.metrics) for key in keys}


def batch_metrics(groups: Sequence[StepGroup], *, version: int) -> dict[str, float]:
    """Return the metrics of the groups of a step.

    `replaced` groups had equal rewards and were replaced, `dropped` ones had too few episodes with a reward, `excess`
    counts sequences that were too long. `sampled_tokens` are those of the episodes of all these groups, failed ones
    included. `staleness` is in steps, from the weights that sampled a turn to version `version`, which trains on it.
    Where they are set, `length_penalty` is the mean penalty of an episode and `clipped` the share of advantages that
    were clipped, both in the mean over groups; `kl_reference/v1` and `v2` are estimates of KL(q‖p_ref) as in
    `update_metrics`, over all sampled tokens.
    """
    trained = [group.played.prepared for group in groups if group.is_trained]
    episodes = [episode for group in trained for episode in group.group.episodes if episode.reward is not None]
    ages = [version - turn.version for episode in episodes for turn in episode.turns]
    return {
        "batch/groups": float(len(trained)),
        "batch/replaced": float(sum(group.played.is_usable and not group.is_trained for group in groups)),
        "batch/dropped": float(sum(not group.played.is_usable for group in groups)),
        "batch/excess": float(sum(group.overlong for group in trained)),
        "batch/sampled_tokens": float(
            sum(episode.sampled_tokens for group in groups for episode in group.played.prepared.group.episodes)
        ),
        "batch/staleness/mean": _mean(float(age) for age in ages),
        "batch/staleness/max": float(max(ages, default=0)),
        **_shaping_metrics(trained),
        **_estimator_metrics([group.played.prepared for group in groups]),
    }


def _estimator_metrics(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    """Return the metrics of the estimators, in the mean over the groups that have them."""
    values = dict[str, list[float]]()
    for group in prepared:
        for name, value in group.estimator_metrics.items():
            for env in (group.group.env, "all"):
                values.setdefault(f"env/{env}/advantage/{name}", []).append(value)
    return {key: _mean(column) for key, column in values.items()}


def _shaping_metrics(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    penalties = [group.length_penalty for group in prepared if group.length_penalty is not None]
    shares = [group.clipped for group in prepared if group.clipped is not None]
    drifts = [drift for group in prepared if group.drifts is not None for drift in group.drifts]
    metrics = dict[str, float]()
    if penalties:
        metrics["batch/length_penalty"] = _mean(penalties)
    if shares:
        metrics["batch/clipped"] = _mean(shares)
    if tokens := sum(len(drift) for drift in drifts):
        metrics["kl_reference/v1"] = sum(float(drift.sum()) for drift in drifts) / tokens
        metrics["kl_reference/v2"] = sum(float(np.square(drift).sum()) for drift in drifts) / tokens / 2
    return metrics


def update_metrics(update: UpdateResult) -> dict[str, float]:
    """Return the agreement of sampler and trainer on the sampled tokens, and the metrics that the service reported.

    With d = log q(sampler) − log p(trainer): `kl_sample_train_v1` is mean d and `v2` is ½ mean d², both estimates of
    KL(q‖p) (Schulman, "Approximating KL divergence", 2020); `entropy` is −mean log q. With the importance weights
    w = p/q of N sampled tokens, `ratio/effective` is the effective sample size (Σw)² / (N Σw²), from 1/N to 1 (Kong
    1992), and `ratio/clipped` the share of tokens that the loss clips, for one that does.
    """
    sampled = np.concatenate([datum.logprobs[datum.mask] for datum in update.data]).astype(np.float64)
    pairs = zip(update.data, update.logprobs, strict=True)
    trained = np.concatenate([logprobs[datum.mask] for datum, logprobs in pairs]).astype(np.float64)
    # The trainer may give a token a probability of 0 or nan; a finding reports the metric that is not finite.
    with np.errstate(invalid="ignore", over="ignore"):
        difference = sampled - trained
        ratios = _ratios(-difference) if len(difference) else dict[str, float]()
        v1, v2 = float(difference.mean()), float(np.square(difference).mean() / 2)
    return {
        "optim/kl_sample_train_v1": v1,
        "optim/kl_sample_train_v2": v2,
        "optim/entropy": float(-sampled.mean()),
        **ratios,
        **_clipping_metrics(update),
        "optim/sequences": float(len(update.data)),
        "optim/tokens": float(len(sampled)),
        "optim/learning_rate": update.learning_rate,
        **{f"service/{key}": float(value) for key, value in update.metrics.items()},
    }


def departure(metrics: Mapping[str, float]) -> float | None:
    """Return the distance of sampler and trainer: the larger of |v1| and v2; None where nothing was trained."""
    distances = [abs(metrics[key]) for v in ("v1", "v2") if (key := f"optim/kl_sample_train_{v}") in metrics]
    return max(distances, default=None)


def throughput(metrics: Mapping[str, float], *, seconds: float, busy_s: float, slots: int) -> dict[str, float]:
    """Return the throughput of a step under `time/…`; nothing where no time passed.

    Args:
        metrics: those of the step, with its episodes and its sampled tokens.
        seconds: time since the end of the step before.
        busy_s: time for which rollouts occupied a slot meanwhile, summed over the slots.
        slots: number of slots; `utilisation` is the mean share of occupied ones.
    """
    if not seconds > 0:
        return {}
    return {
        "time/tokens_per_s": metrics["batch/sampled_tokens"] / seconds,
        "time/episodes_per_s": metrics["env/all/episodes"] / seconds,
        "time/utilisation": busy_s / (slots * seconds),
    }


def _ratios(log_ratios: NDArray[np.float64]) -> dict[str, float]:
    weights = np.exp(log_ratios - log_ratios.max())  # the largest is 1, so that none is infinite
    return {
        "optim/ratio/max": float(np.exp(log_ratios.max())),
        "optim/ratio/min": float(np.exp(log_ratios.min())),
        "optim/ratio/effective": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


def _clipping_metrics(update: UpdateResult) -> dict[str, float]:
    clipped = list[Bools]()
    for datum, logprobs in zip(update.data, update.logprobs, strict=True):
        differences = (logprobs[datum.mask] - datum.logprobs[datum.mask]).astype(np.float64)
        clips = update.loss.clips(differences, datum.advantages[datum.mask].astype(np.float64))
        if clips is not None:
            clipped.append(clips)
    return {"optim/ratio/clipped": float(np.concatenate(clipped).mean())} if clipped else {}


def has_by_chance(metric: str, config: Config) -> bool:
    """Return whether a step of a run may have a metric of its episodes that its rehearsal lacks."""
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
