"""Metrics of a step.

Invariant: every number is a function of the batch's episodes, of what the service answered and of how long it took, so
it can be recounted.
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
"""Largest KL(sampler‖trainer), in nats a token, of a run that is stable; from Tinker's documentation of reinforcement
learning, where runs below it were."""

SOLVED = 1 - EQUAL
"""Rewards from this on are full marks: 1, up to what rounding changes."""

_PERCENTILES = (10, 50, 90)
_PASS_AT = re.compile(r"pass_at_(\d{1,9})")


def group_metrics(groups: Sequence[Group], *, prefix: str) -> dict[str, float]:
    """Return rewards and outcomes by environment and over all, under `<prefix>/<env>/…` and `<prefix>/all/…`.

    Failed episodes count only in `failed`, and plays that were repeated in `retries`; all else is of the episodes with
    a reward. Of n values in ascending order, the percentile `p10` is the ⌈n/10⌉-th, and so on. An episode is `solved`
    if its reward is at least 1. Of the groups with a reward, `groups/mixed` is the share with different ones, which
    teach; the others are `all_good` if they are solved and `all_bad` if not, so that the three add up to 1. Which
    rewards differ is said in `rlkit.algorithms.reward_scale`.

    `pass_at_<k>` is the chance that one of k episodes solves a task, without bias: with c of the n episodes of a group
    solved, 1 − C(n − c, k) / C(n, k), in the mean over the groups with n ≥ k (Chen et al. 2021, arXiv:2107.03374), for
    the powers of two from 2 to the largest n. `unique_bigrams` is the share of an episode's pairs of adjacent sampled
    tokens that are distinct, in the mean over the episodes with a pair: low where the model repeats itself.
    `retried/gap` is how much more episodes whose place was played before get than the others of their group, in the
    mean over the `retried/groups` groups that have both.

    `budget_forced` is the share of turns that were forced to come to an end, where there is one (`BudgetForcing`).

    It takes as long as sorting the tokens does, so it is computed in a thread.
    """
    metrics = dict[str, float]()
    names = list(dict.fromkeys(group.env for group in groups))
    for name in names:
        metrics |= _named(f"{prefix}/{name}", [group for group in groups if group.env == name])
    if len(names) == 1:  # what holds of it holds of all
        own = f"{prefix}/{names[0]}"
        return metrics | {f"{prefix}/all{key.removeprefix(own)}": value for key, value in metrics.items()}
    return metrics | _named(f"{prefix}/all", groups)


def _named(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
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
        **_by_group(prefix, [group.rewards[group.valid] for group in groups if group.valid.any()]),
        f"{prefix}/truncated": _mean(float(episode.status == "truncated") for episode in valid),
        f"{prefix}/masked": _mean(float(episode.masked) for episode in valid),
        f"{prefix}/turns": _mean(float(len(episode.turns)) for episode in valid),
        f"{prefix}/segments": _mean(float(episode.segments) for episode in valid),
        **_lengths(f"{prefix}/tokens", [episode.sampled_tokens for episode in valid]),
        **_lengths(f"{prefix}/turn_tokens", [int(np.count_nonzero(turn.sampled)) for turn in turns]),
        **_stops(prefix, turns),
        **_unique_bigrams(prefix, valid),
        **_retried(prefix, groups),
    }
    return {f"{prefix}/{key}": value for key, value in _own(valid).items()} | metrics  # ours are not replaced


def _mean_and_deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of [n] finite values; both are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(values.mean()), float(values.std())
    if isfinite(deviation):
        return mean, deviation
    scale = float(np.abs(values).max())
    scaled = values / scale  # near the ends of the float range a sum, or a square, overflows
    return float(scaled.mean()) * scale, min(float(scaled.std()), 1.0) * scale


def _percentiles(prefix: str, values: NDArray[np.float64]) -> dict[str, float]:
    ascending = np.sort(values)
    # Whole numbers, and nothing between two values: exact, and no overflow.
    return {f"{prefix}/p{p}": float(ascending[-(-len(values) * p // 100) - 1]) for p in _PERCENTILES}


def _by_group(prefix: str, rewards: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Of groups that have a reward each."""
    mixed = [has_spread(one) for one in rewards]
    solved = [int((one >= SOLVED).sum()) for one in rewards]
    good = [not different and count > 0 for different, count in zip(mixed, solved, strict=True)]
    metrics = {
        f"{prefix}/groups/mixed": _mean(map(float, mixed)),
        f"{prefix}/groups/all_good": _mean(map(float, good)),
        f"{prefix}/groups/all_bad": _mean(
            float(not (different or all_good)) for different, all_good in zip(mixed, good, strict=True)
        ),
    }
    sizes = [len(one) for one in rewards]
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
    forced = [not turn.sampled.all() and bool((turn.sampled[:-1] & ~turn.sampled[1:]).any()) for turn in turns]
    return {**stops, f"{prefix}/budget_forced": _mean(map(float, forced))} if any(forced) else stops


def _unique_bigrams(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    shares = list[float]()
    for episode in episodes:
        pairs = np.sort(_bigrams(episode.turns))  # sorting, unlike hashing, lets other threads run
        if len(pairs):
            shares.append((1 + np.count_nonzero(pairs[1:] != pairs[:-1])) / len(pairs))
    return {f"{prefix}/unique_bigrams": _mean(shares)} if shares else {}


def _bigrams(turns: Sequence[Turn]) -> NDArray[np.int64]:
    """Both tokens of each pair in one number."""
    turns = [turn for turn in turns if len(turn.completion)]
    if not turns:
        return np.empty(0, np.int64)
    tokens = np.concatenate([turn.completion for turn in turns], dtype=np.int64)
    sampled = np.concatenate([turn.sampled for turn in turns])
    pair = sampled[:-1] & sampled[1:]
    ends = np.cumsum([len(turn.completion) for turn in turns[:-1]], dtype=np.int64)
    pair[ends - 1] = False  # what begins at the end of a turn
    return (tokens[:-1] << 32 | tokens[1:])[pair]


def _retried(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    gaps = list[float]()
    for group in groups:
        again = np.array([episode.attempt > 0 for episode in group.episodes], dtype=np.bool_)
        late, first = group.rewards[group.valid & again], group.rewards[group.valid & ~again]
        if len(late) and len(first):
            with np.errstate(over="ignore", invalid="ignore"):
                gaps.append(float(late.mean() - first.mean()))
    metrics = {f"{prefix}/retried/groups": float(len(gaps))}
    return {**metrics, f"{prefix}/retried/gap": _mean(gaps)} if gaps else metrics


def _own(episodes: Sequence[Episode]) -> dict[str, float]:
    keys = dict.fromkeys(key for episode in episodes for key in episode.metrics)
    return {key: _mean(float(e.metrics[key]) for e in episodes if key in e.metrics) for key in keys}


def batch_metrics(taken: Sequence[StepGroup], *, version: int) -> dict[str, float]:
    """Return the metrics of the groups of a step.

    `replaced` groups taught nothing and were played anew, `dropped` ones had too few episodes with a reward, `excess`
    counts sequences that were too long. `sampled_tokens` are those of the episodes of all these groups, failed ones
    included. `staleness` is in steps, from the weights that sampled a turn to those that it trains, of version
    `version`. Where they are set, `length_penalty` is what an episode's reward was lessened by and `clipped` the share
    of advantages that were clipped, both in the mean over groups; `kl_reference/v1` and `v2` are estimates of
    KL(q‖p_ref) as in `update_metrics`, over all sampled tokens.
    """
    own = [one.played for one in taken if one.is_trained]
    episodes = [e for p in own for e in p.prepared.group.episodes if e.reward is not None]
    ages = [version - turn.version for episode in episodes for turn in episode.turns]
    return {
        "batch/groups": float(len(own)),
        "batch/replaced": float(sum(one.played.is_usable and not one.is_trained for one in taken)),
        "batch/dropped": float(sum(not one.played.is_usable for one in taken)),
        "batch/excess": float(sum(p.prepared.excess for p in own)),
        "batch/sampled_tokens": float(
            sum(episode.sampled_tokens for one in taken for episode in one.played.prepared.group.episodes)
        ),
        "batch/staleness/mean": _mean(float(age) for age in ages),
        "batch/staleness/max": float(max(ages, default=0)),
        **_shaped([p.prepared for p in own]),
        **_estimated([one.played.prepared for one in taken]),
    }


def _estimated(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    """Return the metrics of the estimators, in the mean over the groups that have them."""
    reported = dict[str, list[float]]()
    for each in prepared:
        for name, value in each.report.items():
            for env in (each.group.env, "all"):
                reported.setdefault(f"env/{env}/advantage/{name}", []).append(value)
    return {key: _mean(values) for key, values in reported.items()}


def _shaped(prepared: Sequence[PreparedGroup]) -> dict[str, float]:
    penalties = [one.length_penalty for one in prepared if one.length_penalty is not None]
    shares = [one.clipped for one in prepared if one.clipped is not None]
    drifts = [drift for one in prepared if one.drifts is not None for drift in one.drifts]
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
    """Return how far the sampler and the trainer agree on the sampled tokens, and what the service reported.

    With d = log q(sampler) − log p(trainer): `kl_sample_train_v1` is mean d and `v2` is ½ mean d², both estimates of
    KL(q‖p) (Schulman, "Approximating KL divergence", 2020); `entropy` is −mean log q. With the importance weights
    w = p/q of N sampled tokens, `ratio/effective` is the effective sample size (Σw)² / (N Σw²), from 1/N to 1 (Kong
    1992), and `ratio/clipped` the share of tokens that the loss clips, for one that does.
    """
    sampled = np.concatenate([datum.logprobs[datum.mask] for datum in update.data]).astype(np.float64)
    pairs = zip(update.data, update.logprobs, strict=True)
    trained = np.concatenate([logprobs[datum.mask] for datum, logprobs in pairs]).astype(np.float64)
    # The trainer may give a token no probability, or no number; what comes of it is not finite, and told as a finding.
    with np.errstate(invalid="ignore", over="ignore"):
        difference = sampled - trained
        ratios = _ratios(-difference) if len(difference) else dict[str, float]()
        v1, v2 = float(difference.mean()), float(np.square(difference).mean() / 2)
    return {
        "optim/kl_sample_train_v1": v1,
        "optim/kl_sample_train_v2": v2,
        "optim/entropy": float(-sampled.mean()),
        **ratios,
        **_clipped(update),
        "optim/sequences": float(len(update.data)),
        "optim/tokens": float(len(sampled)),
        "optim/learning_rate": update.learning_rate,
        **{f"service/{key}": float(value) for key, value in update.metrics.items()},
    }


def departure(metrics: Mapping[str, float]) -> float | None:
    """Return the distance of sampler and trainer: the larger of |v1| and v2; None where nothing was trained."""
    apart = [abs(metrics[key]) for v in ("v1", "v2") if (key := f"optim/kl_sample_train_{v}") in metrics]
    return max(apart, default=None)


def throughput(metrics: Mapping[str, float], *, seconds: float, busy_s: float, slots: int) -> dict[str, float]:
    """Return the throughput of a step under `time/…`; nothing where no time passed.

    Args:
        metrics: metrics of the step, with its episodes and its sampled tokens.
        seconds: time from the end of the step before to its own.
        busy_s: time for which rollouts held a slot meanwhile, summed over the slots.
        slots: number of slots; `utilisation` is the mean share of them that was held.
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


def _clipped(update: UpdateResult) -> dict[str, float]:
    found = list[Bools]()
    for datum, logprobs in zip(update.data, update.logprobs, strict=True):
        differences = (logprobs[datum.mask] - datum.logprobs[datum.mask]).astype(np.float64)
        clips = update.loss.clips(differences, datum.advantages[datum.mask].astype(np.float64))
        if clips is not None:
            found.append(clips)
    return {"optim/ratio/clipped": float(np.concatenate(found).mean())} if found else {}


def has_by_chance(metric: str, config: Config) -> bool:
    """Say whether a step of a run may have a metric of its episodes though a run in small has none."""
    of, _, rest = metric.partition("/")
    env, _, name = rest.partition("/")
    if name == "retried/gap":
        return True
    specs = [spec for key, spec in config.envs.items() if env in (key, "all")] if of == "env" else []
    if name.startswith("advantage/"):
        key = name.removeprefix("advantage/")
        return any(key in (spec.advantage or config.advantage).metric_names for spec in specs)
    largest = max((spec.group_size or config.batch.group_size for spec in specs), default=0)
    k = int(found[1]) if (found := _PASS_AT.fullmatch(name)) else 0
    return 2 <= k <= largest and k.bit_count() == 1


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return float(np.mean(collected)) if collected else 0.0
