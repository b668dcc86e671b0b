"""Training sequences made from groups and their advantages.

Invariants: a datum's tokens are the exact tokens of one conversation; a token that the model did not sample has
advantage 0; a sampled token is trained in exactly one datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit._util.threads import run_together
from rlkit.algorithms.advantages import estimate_advantages, estimate_metrics
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.losses import Loss
from rlkit.algorithms.references import Drifts, Reference
from rlkit.algorithms.shaping import LengthPenalty, Normalization, clip_advantages
from rlkit.errors import RunFailed
from rlkit.types import Datum, Episode, Floats, Group, Prompt, Turn, join

type EpisodeDrifts = Mapping[tuple[int, Reference], Drifts]
"""Drifts of the sequences of episodes, by the episode's number in its group and the reference."""

type OverlongAction = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """A group with its training sequences."""

    group: Group
    advantages: list[NDArray[np.float64]]  # [turns] float64 for each episode
    data: tuple[Datum, ...]  # training sequences
    paths: tuple[tuple[int, int], ...] = ()  # for each sequence its member, and the index of its last turn
    overlong: int = 0  # number of sequences that were too long
    length_penalty: float | None = None  # mean subtracted from the rewards of valid episodes; None without a penalty
    clipped: float | None = None  # share of the advantages that were clipped; None without a limit
    drifts: Sequence[tuple[Reference, Drifts]] = ()  # log-ratios to each reference whose term counts for the group
    estimator_metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # result of `Estimator.metrics`
    is_usable: bool = True  # enough episodes have a reward to train on the group

    @property
    def tokens(self) -> int:
        """Number of trained tokens, as services count them."""
        return sum(len(datum.targets) for datum in self.data)

    @property
    def has_signal(self) -> bool:
        """True if the group is usable, and a teacher counts or an episode has an advantage.

        A KL penalty or a local loss may train without.
        """
        is_taught = any(reference.is_teacher for reference, _ in self.drifts)
        return self.is_usable and bool(self.data) and (is_taught or any(row.any() for row in self.advantages))


@dataclass(frozen=True, slots=True)
class Preparation:
    """Settings that turn groups into training sequences.

    The length penalty is subtracted from rewards before the estimator runs. Then advantages are clipped, the terms of
    references are added, and the sum is normalised.
    """

    estimators: Mapping[str, Estimator]
    every_sequence: bool = False  # keep sequences whose advantages are all 0: a local loss may have a gradient on them
    max_tokens: int | None = None
    overlong: OverlongAction = "truncate"  # keep the beginning of longer sequences, drop them, or end the run
    length_penalty: Mapping[str, LengthPenalty] = field(default_factory=dict[str, LengthPenalty])
    clip: Mapping[str, float] = field(default_factory=dict[str, float])  # largest absolute advantage of an episode
    # KL penalty and teacher of each environment; they give every sequence advantages.
    references: Mapping[str, Sequence[Reference]] = field(default_factory=dict[str, "Sequence[Reference]"])
    normalization: Normalization | None = None

    async def prepare(self, group: Group, early: EpisodeDrifts = MappingProxyType({})) -> PreparedGroup:
        """Estimate a group's advantages and assemble its sequences, as if the group were the whole step.

        Args:
            early: answers of `ask_references` for some of the episodes; the others are requested now.

        Raises:
            EnvironmentFault: the estimator failed.
            RunFailed: a sequence is too long, and `overlong` is `error`.
            ServiceError: a reference failed.
        """
        (draft,) = self._draft([group])
        references = self._active_references(group)
        episodes = [episode for episode in group.episodes if _is_trainable(episode)] if references else []
        late = await run_together(
            self._request(episode, [reference for reference in references if (episode.member, reference) not in early])
            for episode in episodes
        )
        answers = {**early, **{pair: drifts for answer in late for pair, drifts in answer.items()}}
        rows = [[row for e in episodes for row in answers[e.member, reference]] for reference in references]
        return self._finish(draft, tuple(zip(references, rows, strict=True)))

    async def ask_references(self, env: str, episode: Episode) -> EpisodeDrifts:
        """Request the drifts of an episode before its group is complete, to save time; ServiceError as in `prepare`.

        A reference is asked if its term counts for a group without newer weights.
        """
        is_failed = episode.status == "failed" or episode.masked
        references = [] if is_failed else self._active_references(Group(env, "", 0, (episode,)))
        return await self._request(episode, references) if references else {}

    async def _request(self, episode: Episode, references: Sequence[Reference]) -> EpisodeDrifts:
        pairs = [(self._fit(datum), root) for datum, root in rooted_data(episode)]
        sequences = [(datum, root) for datum, root in pairs if datum is not None]
        drifts = await run_together(reference.drifts(sequences) for reference in references)
        return {(episode.member, reference): rows for reference, rows in zip(references, drifts, strict=True)}

    @property
    def needs_whole_steps(self) -> bool:
        """True if the advantages of a group may depend on other groups of its step."""
        return any(estimator.needs_whole_steps for estimator in self.estimators.values())

    def prepare_step(self, groups: Sequence[PreparedGroup]) -> list[PreparedGroup]:
        """Estimate groups of step estimators again, as a whole step; errors as in `prepare`."""
        step = list(groups)
        for name, estimator in self.estimators.items():
            places = [place for place, prepared in enumerate(groups) if prepared.group.env == name]
            if places and estimator.needs_whole_steps:
                drafts = self._draft([groups[place].group for place in places])
                for place, draft in zip(places, drafts, strict=True):
                    # the tokens did not change, so neither did the drifts
                    step[place] = self._finish(draft, groups[place].drifts)
        return step

    def _draft(self, groups: Sequence[Group]) -> list[PreparedGroup]:
        """Return groups of one environment with unweighted sequences."""
        env = groups[0].env
        estimator, penalty, limit = self.estimators[env], self.length_penalty.get(env), self.clip.get(env)
        shaped = [(group, None) if penalty is None else penalty.apply(group) for group in groups]
        estimates = estimate_advantages(estimator, [group for group, _ in shaped])
        drafts = list[PreparedGroup]()
        for group, (shaped_group, subtracted), advantages in zip(groups, shaped, estimates, strict=True):
            metrics = estimate_metrics(estimator, shaped_group)
            rows, clipped = (advantages, None) if limit is None else clip_advantages(advantages, limit)
            data, paths, overlong = list[Datum](), list[tuple[int, int]](), 0
            for member, (episode, row) in enumerate(zip(group.episodes, rows, strict=True)):
                for last, datum in episode_data(episode, row) if _is_trainable(episode) else ():
                    is_cut = self._is_overlong(datum) and self._is_trained(datum, group)
                    overlong += is_cut
                    if is_cut and self.overlong == "error":
                        sequence = f"a sequence of {len(datum.targets) + 1} tokens of {group.env}, task {group.task}"
                        raise RunFailed(f"{sequence}, is longer than batch.max_tokens = {self.max_tokens}")
                    if (fitting := self._fit(datum)) is not None:
                        data.append(fitting)
                        paths.append((member, last))
            sequences = tuple(data), tuple(paths)
            drafts.append(PreparedGroup(group, rows, *sequences, overlong, subtracted, clipped, (), metrics))
        return drafts

    def _finish(self, draft: PreparedGroup, drifts: Sequence[tuple[Reference, Drifts]]) -> PreparedGroup:
        """Apply references and the normalisation to the sequences, and drop those without an advantage."""
        data: Sequence[Datum] = draft.data
        for reference, reference_drifts in drifts:
            data = reference.apply(data, reference_drifts)
        if self.normalization is not None:
            # trained tokens of each member, including members without a sequence
            tokens = {member: 0 for member, episode in enumerate(draft.group.episodes) if _is_trainable(episode)}
            for datum, (member, _) in zip(data, draft.paths, strict=True):
                tokens[member] += int(np.count_nonzero(datum.mask))
            member_weights = self.normalization.weights(np.array([*tokens.values()], np.int64))
            weights = dict(zip(tokens, member_weights.astype(np.float32), strict=True))
            pairs = zip(data, draft.paths, strict=True)
            data = [_scale(datum, weights[member]) for datum, (member, _) in pairs]
        trained = [self._is_trained(datum, draft.group) for datum in data]
        data, paths = tuple(compress(data, trained)), tuple(compress(draft.paths, trained))
        return replace(draft, data=data, paths=paths, drifts=drifts)

    def _active_references(self, group: Group) -> list[Reference]:
        return [reference for reference in self.references.get(group.env, ()) if reference.is_active(group)]

    def _is_trained(self, datum: Datum, group: Group) -> bool:
        return self.every_sequence or bool(datum.advantages.any()) or bool(self._active_references(group))

    def _is_overlong(self, datum: Datum) -> bool:
        return self.max_tokens is not None and len(datum.targets) >= self.max_tokens

    def _fit(self, datum: Datum) -> Datum | None:
        """Return a sequence within the limit; None if it is dropped, or has nothing to train, as an opponent's."""
        if self.max_tokens is not None and self._is_overlong(datum):
            if self.overlong == "drop":
                return None
            datum = _cut(datum, self.max_tokens - 1)
        return datum if datum.mask.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """A group that was played for a step; an untrained group was replaced or dropped."""

    prepared: PreparedGroup
    is_trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """Result of the optimiser steps of a step."""

    groups: Sequence[PreparedGroup]  # groups whose sequences were trained, in order
    logprobs: Sequence[Floats]  # trainer's log-probabilities before the optimiser step, [N] float32 for each datum
    metrics: Mapping[str, float]  # metrics of the service, merged over its answers
    loss: Loss
    learning_rate: float
    supervised: frozenset[str] = frozenset()  # environments of conversations, which were not sampled


def _is_trainable(episode: Episode) -> bool:
    return episode.reward is not None and not episode.masked


def keep_first(prompt: Prompt, count: int) -> Prompt:
    """Return the first `count` positions of a prompt, or fewer if the limit is inside an image."""
    for image in prompt.images:
        if image.start < count < image.start + image.length:
            count = image.start
    return Prompt(prompt.tokens[:count], tuple(image for image in prompt.images if image.start < count))


def _scale(datum: Datum, weight: np.float32) -> Datum:
    """Return a sequence with its advantages and the weights of its likeliest tokens times a number."""
    top = datum.top and (*datum.top[:2], datum.top[2] * weight)
    return replace(datum, advantages=datum.advantages * weight, top=top)


def _cut(datum: Datum, count: int) -> Datum:
    """Return the first `count` positions, or fewer if the limit is inside an image."""
    prompt = keep_first(datum.prompt, count)
    count = len(prompt)
    return Datum(
        prompt=prompt,
        targets=datum.targets[:count],
        logprobs=datum.logprobs[:count],
        advantages=datum.advantages[:count],
        mask=datum.mask[:count],
    )


def episode_data(episode: Episode, advantages: NDArray[np.float64]) -> Iterator[tuple[int, Datum]]:
    """Yield leaf and datum of each path from a segment's first turn to a leaf; advantages are [turns] float64."""
    parents = {turn.parent for turn in episode.turns}
    trained = set[int]()
    for last in range(len(episode.turns)):
        if last not in parents:
            path = _path(episode, last)
            yield last, _datum(episode, path, advantages, fresh=[index not in trained for index in path])
            trained.update(path)


def sequence_lengths(episode: Episode) -> list[int]:
    """Return the number of tokens of each sequence, including the last token, which is only predicted."""
    ends = list[int]()
    for turn in episode.turns:
        start = 0 if turn.parent is None else ends[turn.parent]
        ends.append(start + len(turn.prompt) + len(turn.completion))
    parents = {turn.parent for turn in episode.turns}
    return [end for index, end in enumerate(ends) if index not in parents]


def rooted_data(episode: Episode) -> list[tuple[Datum, Turn]]:
    """Return each sequence of an episode, with advantages of 0, and its first turn."""
    data = episode_data(episode, np.zeros(len(episode.turns)))
    return [(datum, episode.turns[_path(episode, last)[0]]) for last, datum in data]


def _path(episode: Episode, last: int) -> list[int]:
    """Return the indices of the turns from the first of a segment to `last`."""
    path = [last]
    while (parent := episode.turns[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _datum(episode: Episode, path: list[int], advantages: NDArray[np.float64], *, fresh: list[bool]) -> Datum:
    """Return the sequence of a path, which trains on its fresh turns only."""
    turns = [episode.turns[index] for index in path]
    prompt = join([piece for turn in turns for piece in (turn.prompt, Prompt(turn.completion))])
    count = len(prompt)
    logprobs, weights, mask = np.zeros(count, np.float32), np.zeros(count, np.float32), np.zeros(count, np.bool_)
    end = 0
    for turn, index, is_fresh in zip(turns, path, fresh, strict=True):
        start = end + len(turn.prompt)
        end = start + len(turn.completion)
        if is_fresh:
            mask[start:end] = turn.sampled_mask
            np.copyto(logprobs[start:end], turn.logprobs, where=turn.sampled_mask)
            weights[start:end][turn.sampled_mask] = advantages[index]
    return Datum(
        prompt=Prompt(prompt.tokens[:-1], tuple([image for image in prompt.images if image.start < count - 1])),
        # a target at an image position must be a token, and is not trained
        targets=np.maximum(prompt.tokens[1:], 0) if prompt.images else prompt.tokens[1:],
        logprobs=logprobs[1:],
        advantages=weights[1:],
        mask=mask[1:],
    )
