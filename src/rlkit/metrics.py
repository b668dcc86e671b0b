"""What a step is measured by.

Invariant: every number is a function of the batch's episodes and of what the service answered, so it can be recounted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlkit.batch import Prepared
from rlkit.schedule import Taken
from rlkit.types import Bools, Episode, Group
from rlkit.update import Update


def group_metrics(groups: Sequence[Group], *, prefix: str) -> dict[str, float]:
    """Rewards and outcomes, by environment and over all, under `<prefix>/<env>/…` and `<prefix>/all/…`.

    Failed episodes count only in `failed`. `groups/mixed` is the share of groups with different rewards, which teach.
    """
    metrics = dict[str, float]()
    names = list(dict.fromkeys(group.env for group in groups))
    for name in names:
        metrics |= _named(f"{prefix}/{name}", [group for group in groups if group.env == name])
    return metrics | _named(f"{prefix}/all", groups)


def _named(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.reward is not None]
    metrics = {
        f"{prefix}/groups": float(len(groups)),
        f"{prefix}/episodes": float(len(episodes)),
        f"{prefix}/failed": float(len(episodes) - len(valid)),
    }
    if not valid:
        return metrics
    rewards = np.array([episode.reward for episode in valid], dtype=np.float64)
    with np.errstate(over="ignore"):  # rewards near the ends of the float range; the store writes null for infinity
        mean, deviation = float(rewards.mean()), float(rewards.std())
    metrics |= {
        f"{prefix}/reward/mean": mean,
        f"{prefix}/reward/std": deviation,
        f"{prefix}/reward/min": float(rewards.min()),
        f"{prefix}/reward/max": float(rewards.max()),
        f"{prefix}/groups/mixed": _mean(float(np.ptp(g.rewards[g.valid]) > 0) for g in groups if g.valid.any()),
        f"{prefix}/truncated": _mean(float(episode.status == "truncated") for episode in valid),
        f"{prefix}/turns": _mean(float(len(episode.turns)) for episode in valid),
        f"{prefix}/segments": _mean(float(episode.segments) for episode in valid),
        f"{prefix}/tokens": _mean(float(episode.sampled_tokens) for episode in valid),
        f"{prefix}/cut_turns": _mean(float(t.stop == "length") for episode in valid for t in episode.turns),
    }
    return {f"{prefix}/{key}": value for key, value in _own(valid).items()} | metrics  # ours are not replaced


def _own(episodes: Sequence[Episode]) -> dict[str, float]:
    keys = dict.fromkeys(key for episode in episodes for key in episode.metrics)
    return {key: _mean(float(e.metrics[key]) for e in episodes if key in e.metrics) for key in keys}


def batch_metrics(taken: Sequence[Taken], *, version: int) -> dict[str, float]:
    """What a step was given.

    `replaced` groups taught nothing and were played anew, `dropped` ones had too few episodes with a reward, `excess`
    counts sequences that were too long. `staleness` is in steps, from the weights that sampled a turn to those that it
    trains, of version `version`. Where they are set, `length_penalty` is what an episode's reward was lessened by
    and `clipped` the share of advantages that were clipped, both in the mean over groups; `kl_reference/v1` and `v2`
    are estimates of KL(q‖p_ref) as in `update_metrics`, over all sampled tokens.
    """
    own = [one.played for one in taken if one.counts]
    episodes = [e for p in own for e in p.prepared.group.episodes if e.reward is not None]
    ages = [version - turn.version for episode in episodes for turn in episode.turns]
    return {
        "batch/groups": float(len(own)),
        "batch/replaced": float(sum(one.played.usable and not one.counts for one in taken)),
        "batch/dropped": float(sum(not one.played.usable for one in taken)),
        "batch/excess": float(sum(p.prepared.excess for p in own)),
        "batch/staleness/mean": _mean(float(age) for age in ages),
        "batch/staleness/max": float(max(ages, default=0)),
        **_shaped([p.prepared for p in own]),
    }


def _shaped(prepared: Sequence[Prepared]) -> dict[str, float]:
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


def update_metrics(update: Update) -> dict[str, float]:
    """How far the sampler and the trainer agree on the sampled tokens, and what the service reported.

    With d = log q(sampler) − log p(trainer): `kl_sample_train_v1` is mean d and `v2` is ½ mean d², both estimates of
    KL(q‖p) (Schulman, "Approximating KL divergence", 2020); `entropy` is −mean log q. With the importance weights
    w = p/q of N sampled tokens, `ratio/effective` is the effective sample size (Σw)² / (N Σw²), from 1/N to 1 (Kong
    1992), and `ratio/clipped` the share of tokens that the loss clips, for one that does.
    """
    sampled = np.concatenate([datum.logprobs[datum.mask] for datum in update.data]).astype(np.float64)
    pairs = zip(update.data, update.logprobs, strict=True)
    trained = np.concatenate([logprobs[datum.mask] for datum, logprobs in pairs]).astype(np.float64)
    difference = sampled - trained
    ratios = _ratios(-difference) if len(difference) else dict[str, float]()
    return {
        "optim/kl_sample_train_v1": float(difference.mean()),
        "optim/kl_sample_train_v2": float(np.square(difference).mean() / 2),
        "optim/entropy": float(-sampled.mean()),
        **ratios,
        **_clipped(update),
        "optim/sequences": float(len(update.data)),
        "optim/tokens": float(len(sampled)),
        "optim/learning_rate": update.learning_rate,
        **{f"service/{key}": float(value) for key, value in update.metrics.items()},
    }


def _ratios(log_ratios: NDArray[np.float64]) -> dict[str, float]:
    weights = np.exp(log_ratios - log_ratios.max())  # the largest is 1, so that none is infinite
    with np.errstate(over="ignore"):
        extremes = {"max": float(np.exp(log_ratios.max())), "min": float(np.exp(log_ratios.min()))}
    effective = float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))
    return {**{f"optim/ratio/{key}": value for key, value in extremes.items()}, "optim/ratio/effective": effective}


def _clipped(update: Update) -> dict[str, float]:
    found = list[Bools]()
    for datum, logprobs in zip(update.data, update.logprobs, strict=True):
        differences = (logprobs[datum.mask] - datum.logprobs[datum.mask]).astype(np.float64)
        clips = update.loss.clips(differences, datum.advantages[datum.mask].astype(np.float64))
        if clips is not None:
            found.append(clips)
    return {"optim/ratio/clipped": float(np.concatenate(found).mean())} if found else {}


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return float(np.mean(collected)) if collected else 0.0
