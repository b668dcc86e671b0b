"""Training sequences made from groups and their advantages.

Invariants: a datum's tokens are the exact tokens of one conversation; a token that the model did not sample has
advantage 0; a sampled token is trained in exactly one datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.advantages import AnyEstimator, as_estimator, estimate_advantages, estimate_metrics
from rlkit.algorithms.kl_penalty import Drifts, KLPenalty
from rlkit.algorithms.losses import Loss
from rlkit.algorithms.shaping import LengthPenalty, Normalization, clip_advantages
from rlkit.errors import RunFailed
from rlkit.types import Datum, Episode, Floats, Group, Prompt, join

type Excess = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """A group with its training sequences.

    Args:
        advantages: for each episode, [turns] float64.
        data: the sequences that have something to teach.
        excess: number of sequences that were too long.
        length_penalty: mean that was subtracted from the rewards of valid episodes; None without a penalty.
        clipped: share of the advantages that were clipped; None without a limit.
        drifts: drifts from the reference of the KL penalty; None without one.
        report: metrics of the estimator.
    """

    group: Group
    advantages: list[NDArray[np.float64]]
    data: tuple[Datum, ...]
    excess: int = 0
    length_penalty: float | None = None
    clipped: float | None = None
    drifts: Drifts | None = None
    report: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def tokens(self) -> int:
        """Tokens of the sequences, as a service counts what it trains on."""
        return sum(len(datum.targets) for datum in self.data)

    @property
    def has_signal(self) -> bool:
        """True if an episode has an advantage; a KL penalty or a local loss may train without one."""
        return bool(self.data) and any(row.any() for row in self.advantages)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The way from groups to training sequences.

    A length penalty changes the rewards that the estimator sees. The advantages are clipped, the KL penalty is added,
    and the sum is normalised.

    Args:
        estimators: by name of the environment.
        every_sequence: keep sequences whose advantages are all 0. Under the service's own losses their gradient is 0,
            so they are left out and cost nothing.
        max_tokens: longest sequence that is trained on; None for any.
        excess: treatment of a longer one: keep its beginning, drop it, or end the run.
        length_penalty: by name of the environment.
        clip: largest absolute advantage of an episode; None for any.
        kl_penalty: penalty of single tokens; with one, every sequence has something to teach.
        normalization: None leaves the advantages as they are.
    """

    estimators: Mapping[str, AnyEstimator]
    every_sequence: bool = False
    max_tokens: int | None = None
    excess: Excess = "truncate"
    length_penalty: Mapping[str, LengthPenalty] = field(default_factory=dict[str, LengthPenalty])
    clip: float | None = None
    kl_penalty: KLPenalty | None = None
    normalization: Normalization | None = None

    async def prepare(self, group: Group) -> PreparedGroup:
        """Estimate a group's advantages and assemble its sequences; a step estimator sees the group as a whole step.

        Raises:
            EnvironmentFault: the estimator raised, or gave advantages of the wrong number or value.
            RunFailed: a sequence is too long, and `excess` is `error`.
            ServiceError: the reference of the KL penalty failed.
        """
        ((draft, members),) = self._draft([group])
        drifts = None if self.kl_penalty is None else await self.kl_penalty.drifts(draft.data)
        return self._finish(draft, members, drifts)

    @property
    def needs_whole_steps(self) -> bool:
        """True if the advantages of a group may depend on the others of its step."""
        return any(as_estimator(estimator).sees_steps for estimator in self.estimators.values())

    def prepare_step(self, groups: Sequence[PreparedGroup]) -> list[PreparedGroup]:
        """Return the groups of a step, those of each step estimator estimated together; errors as in `prepare`."""
        step = list(groups)
        for name, estimator in self.estimators.items():
            places = [place for place, prepared in enumerate(groups) if prepared.group.env == name]
            if places and as_estimator(estimator).sees_steps:
                drafts = self._draft([groups[place].group for place in places])
                for place, (draft, members) in zip(places, drafts, strict=True):
                    # The tokens of its sequences are the same, so the drifts from the reference are, too.
                    step[place] = self._finish(draft, members, groups[place].drifts)
        return step

    def _draft(self, groups: Sequence[Group]) -> list[tuple[PreparedGroup, list[int]]]:
        """Estimate groups of one environment; return each with its unweighted sequences, and the member of each."""
        env = groups[0].env
        estimator, penalty = self.estimators[env], self.length_penalty.get(env)
        shaped = [(group, None) if penalty is None else penalty.apply(group) for group in groups]
        estimates = estimate_advantages(estimator, [group for group, _ in shaped])
        drafts = list[tuple[PreparedGroup, list[int]]]()
        for group, (shaped_group, subtracted), advantages in zip(groups, shaped, estimates, strict=True):
            report = estimate_metrics(estimator, shaped_group)
            rows, share = (advantages, None) if self.clip is None else clip_advantages(advantages, self.clip)
            data, members, excess = self._assemble(group, rows)
            drafts.append((PreparedGroup(group, rows, data, excess, subtracted, share, report=report), members))
        return drafts

    def _assemble(
        self, group: Group, advantages: Sequence[NDArray[np.float64]]
    ) -> tuple[tuple[Datum, ...], list[int], int]:
        """Return the sequences to train on, the member of each, and how many were too long."""
        data, members, excess = list[Datum](), list[int](), 0
        for member, (episode, row) in enumerate(zip(group.episodes, advantages, strict=True)):
            for datum in episode_data(episode, row) if _is_trainable(episode) else ():
                is_trained = self._keeps_every or bool(datum.advantages.any())
                fitting = self._fit(datum, group, is_trained=is_trained)
                excess += is_trained and fitting is not datum
                if fitting is not None:
                    data.append(fitting)
                    members.append(member)
        return tuple(data), members, excess

    def _finish(self, draft: PreparedGroup, members: Sequence[int], drifts: Drifts | None) -> PreparedGroup:
        """Apply the KL penalty and the normalisation to the sequences, and drop those without an advantage."""
        data: Sequence[Datum] = draft.data
        if self.kl_penalty is not None and drifts is not None:
            data = self.kl_penalty.apply(data, drifts)
        if self.normalization is not None:
            trainable = [member for member, episode in enumerate(draft.group.episodes) if _is_trainable(episode)]
            data = _normalize(data, members, self.normalization, trainable)
        trained = tuple(datum for datum in data if self._keeps_every or datum.advantages.any())
        return replace(draft, data=trained, drifts=drifts)

    @property
    def _keeps_every(self) -> bool:
        return self.every_sequence or self.kl_penalty is not None

    def _fit(self, datum: Datum, group: Group, *, is_trained: bool) -> Datum | None:
        """Return a sequence within the limit; None if it is dropped."""
        if self.max_tokens is None or len(datum.targets) < self.max_tokens:
            return datum
        if self.excess == "error" and is_trained:
            raise RunFailed(
                f"a sequence of {len(datum.targets) + 1} tokens of {group.env}, task {group.task}, is longer than "
                f"batch.max_tokens = {self.max_tokens}"
            )
        cut = _cut(datum, self.max_tokens - 1)
        return None if self.excess == "drop" or not cut.mask.any() else cut


@dataclass(frozen=True, slots=True, eq=False)
class PlayedGroup:
    """A group as it comes out of play.

    Args:
        is_usable: enough of its episodes have a reward.
    """

    prepared: PreparedGroup
    is_usable: bool

    @property
    def has_signal(self) -> bool:
        """True if the group is usable and its episodes have advantages."""
        return self.is_usable and self.prepared.has_signal


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """A group that a step got; one that is not trained on was replaced or dropped."""

    played: PlayedGroup
    is_trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """Result of the optimiser steps of a step.

    Args:
        data: the sequences that were trained on.
        logprobs: for each datum, [N] float32, the trainer's log-probabilities before the optimiser step.
        metrics: metrics that the service reported, merged over its answers.
    """

    data: Sequence[Datum]
    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]
    loss: Loss
    learning_rate: float


def _is_trainable(episode: Episode) -> bool:
    return episode.reward is not None and not episode.masked


def _normalize(
    data: Sequence[Datum], owners: Sequence[int], normalization: Normalization, trainable: Sequence[int]
) -> list[Datum]:
    """Return the sequences with normalised advantages.

    Args:
        owners: the member of each sequence.
        trainable: members that are trained on, those without a sequence included.
    """
    tokens = dict.fromkeys(trainable, 0)
    for datum, owner in zip(data, owners, strict=True):
        tokens[owner] += int(np.count_nonzero(datum.mask))
    weights = dict(zip(tokens, normalization.weights(np.array([*tokens.values()], np.int64)), strict=True))
    return [
        replace(datum, advantages=datum.advantages * np.float32(weights[owner]))
        for datum, owner in zip(data, owners, strict=True)
    ]


def _cut(datum: Datum, count: int) -> Datum:
    """Return the first `count` positions, or fewer: an image is not cut in two."""
    for image in datum.prompt.images:
        if image.start < count < image.start + image.length:
            count = image.start
    images = tuple(image for image in datum.prompt.images if image.start < count)
    return Datum(
        prompt=Prompt(datum.prompt.tokens[:count], images),
        targets=datum.targets[:count],
        logprobs=datum.logprobs[:count],
        advantages=datum.advantages[:count],
        mask=datum.mask[:count],
    )


def episode_data(episode: Episode, advantages: NDArray[np.float64]) -> Iterator[Datum]:
    """Yield one datum for each path from a segment's first turn to a last one.

    Args:
        advantages: [turns] float64.
    """
    parents = {turn.parent for turn in episode.turns}
    trained = set[int]()
    for last in range(len(episode.turns)):
        if last not in parents:
            path = _path(episode, last)
            yield _datum(episode, path, advantages, fresh=[index not in trained for index in path])
            trained.update(path)


def trained_tokens(episode: Episode) -> int:
    """Count the tokens of all sequences of an episode, as a service counts what it trains on."""
    return sum(length - 1 for length in sequence_lengths(episode))


def sequence_lengths(episode: Episode) -> list[int]:
    """Return the tokens of each sequence, the last of which is only predicted."""
    ends = list[int]()
    for turn in episode.turns:
        start = 0 if turn.parent is None else ends[turn.parent]
        ends.append(start + len(turn.prompt) + len(turn.completion))
    parents = {turn.parent for turn in episode.turns}
    return [end for index, end in enumerate(ends) if index not in parents]


def _path(episode: Episode, last: int) -> list[int]:
    """Return the indices of the turns from the first of a segment to `last`."""
    path = [last]
    while (parent := episode.turns[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _datum(episode: Episode, path: list[int], advantages: NDArray[np.float64], *, fresh: list[bool]) -> Datum:
    """Return the sequence of a path, in which only fresh turns are trained on."""
    turns = [episode.turns[index] for index in path]
    prompt = join([piece for turn in turns for piece in (turn.prompt, Prompt(turn.completion))])
    logprobs, weights = np.zeros(len(prompt), np.float32), np.zeros(len(prompt), np.float32)
    mask = np.zeros(len(prompt), np.bool_)
    end = 0
    for turn, index, is_fresh in zip(turns, path, fresh, strict=True):
        start = end + len(turn.prompt)
        end = start + len(turn.completion)
        if is_fresh:
            mask[start:end] = turn.sampled_mask
            np.copyto(logprobs[start:end], turn.logprobs, where=turn.sampled_mask)
            np.copyto(weights[start:end], np.float32(advantages[index]), where=turn.sampled_mask)
    images = tuple(image for image in prompt.images if image.start < len(prompt) - 1)
    return Datum(
        prompt=Prompt(prompt.tokens[:-1], images),
        targets=np.maximum(prompt.tokens[1:], 0),  # an image position predicts nothing, but must hold a token
        logprobs=logprobs[1:],
        advantages=weights[1:],
        mask=mask[1:],
    )
