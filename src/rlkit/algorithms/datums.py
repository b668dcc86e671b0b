"""Groups and advantages become training sequences.

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
from rlkit.algorithms.shaping import LengthPenalty, Normalization, clipped
from rlkit.errors import RunFailed
from rlkit.types import Datum, Episode, Floats, Group, Prompt, join

type Excess = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """How groups become training sequences.

    A length penalty changes the rewards that the estimator sees; its advantages are clipped, the KL penalty is added to
    them, and what comes out is normalised.

    Args:
        estimators: by name of the environment.
        every_sequence: keep those whose advantages are all 0. Under the service's own losses their gradient is 0, so
            they are left out and cost nothing.
        max_tokens: longest sequence that is trained on; None for any.
        excess: what becomes of a longer one: its beginning is kept, it is left out, or the run ends.
        length_penalty: by name of the environment; of one that is not named, nothing is subtracted.
        clip: largest absolute advantage of an episode; None for any.
        kl_penalty: added to the advantages of single tokens; with one, every sequence has something to teach.
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
        """Estimate a group's advantages and assemble its sequences; one of whole steps sees it as the step.

        Raises:
            EnvironmentFault: the estimator raised, or gave advantages of the wrong number or value.
            RunFailed: a sequence is too long, and that was to be an error.
            ServiceError: the reference of the KL penalty cannot be asked.
        """
        found = self._estimated([group])[0]
        sequences = self._sequences(group, found.advantages)
        drifts = None if self.kl_penalty is None else await self.kl_penalty.drifts(sequences.data)
        return self._assembled(group, found, sequences, drifts)

    @property
    def needs_whole_steps(self) -> bool:
        """Whether the advantages of a group may depend on the others of its step."""
        return any(as_estimator(one).sees_steps for one in self.estimators.values())

    def prepare_step(self, prepared: Sequence[PreparedGroup]) -> list[PreparedGroup]:
        """The groups of a step, those of each estimator of whole steps estimated together.

        Raises:
            EnvironmentFault: as `prepare` says.
            RunFailed: likewise.
        """
        made = list(prepared)
        for name, estimator in self.estimators.items():
            places = [place for place, one in enumerate(prepared) if one.group.env == name]
            if places and as_estimator(estimator).sees_steps:
                found = self._estimated([prepared[place].group for place in places])
                for place, one in zip(places, found, strict=True):
                    group = prepared[place].group
                    sequences = self._sequences(group, one.advantages)
                    # Its sequences have the tokens that they had, so the reference need not be asked again.
                    made[place] = self._assembled(group, one, sequences, prepared[place].drifts)
        return made

    def _estimated(self, groups: Sequence[Group]) -> list[_Estimated]:
        """The advantages of groups of one environment."""
        env = groups[0].env
        penalty = self.length_penalty.get(env)
        seen = [(group, None) if penalty is None else penalty.applied(group) for group in groups]
        found = list[_Estimated]()
        estimator = self.estimators[env]
        for rows, (given, lost) in zip(estimate_advantages(estimator, [one for one, _ in seen]), seen, strict=True):
            kept, share = (rows, None) if self.clip is None else clipped(rows, self.clip)
            found.append(_Estimated(kept, lost, share, estimate_metrics(estimator, given)))
        return found

    def _sequences(self, group: Group, advantages: Sequence[NDArray[np.float64]]) -> _Sequences:
        """Those of the episodes that are trained on, cut where they are too long."""
        data, owners, excess = list[Datum](), list[int](), 0
        for member, (episode, row) in enumerate(zip(group.episodes, advantages, strict=True)):
            for datum in episode_data(episode, row) if _taught(episode) else ():
                trained = self._every or bool(datum.advantages.any())
                fitting = self._fitted(datum, group, trained=trained)
                excess += trained and fitting is not datum
                if fitting is not None:
                    data.append(fitting)
                    owners.append(member)
        return _Sequences(data, owners, excess)

    def _assembled(
        self, group: Group, found: _Estimated, sequences: _Sequences, drifts: Drifts | None
    ) -> PreparedGroup:
        data = sequences.data
        if self.kl_penalty is not None and drifts is not None:
            data = self.kl_penalty.applied(data, drifts)
        if self.normalization is not None:
            members = [place for place, episode in enumerate(group.episodes) if _taught(episode)]
            data = _normalized(data, sequences.owners, self.normalization, members)
        return PreparedGroup(
            group,
            found.advantages,
            tuple(datum for datum in data if self._every or datum.advantages.any()),
            sequences.excess,
            found.length_penalty,
            found.clipped,
            drifts,
            found.report,
        )

    @property
    def _every(self) -> bool:
        return self.every_sequence or self.kl_penalty is not None

    def _fitted(self, datum: Datum, group: Group, *, trained: bool) -> Datum | None:
        if self.max_tokens is None or len(datum.targets) < self.max_tokens:
            return datum
        if self.excess == "error" and trained:
            raise RunFailed(
                f"a sequence of {len(datum.targets) + 1} tokens of {group.env}, task {group.task}, is longer than "
                f"batch.max_tokens = {self.max_tokens}"
            )
        cut = _cut(datum, self.max_tokens - 1)
        return None if self.excess == "drop" or not cut.mask.any() else cut


@dataclass(frozen=True, slots=True, eq=False)
class _Estimated:
    """The advantages of a group, and what `PreparedGroup` says of how they were made."""

    advantages: list[NDArray[np.float64]]
    length_penalty: float | None
    clipped: float | None
    report: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """The sequences of a group, the member of each, and how many were too long."""

    data: Sequence[Datum]
    owners: Sequence[int]
    excess: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """A group, ready to be trained on.

    Args:
        group: as it was played.
        advantages: for each episode, [turns] float64.
        data: the sequences that have something to teach.
        excess: how many sequences were too long.
        length_penalty: what was subtracted from the reward of a valid episode, in the mean; None without a penalty.
        clipped: share of the advantages that were clipped; None without a limit.
        drifts: from the reference of the KL penalty; None without one.
        report: what there is to say of how its advantages were estimated, by name.
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
        """Of its sequences, as a service counts what it trains on."""
        return sum(len(datum.targets) for datum in self.data)

    @property
    def has_signal(self) -> bool:
        """Whether its episodes have advantages; a penalty or a loss of one's own may train on others too."""
        return bool(self.data) and any(row.any() for row in self.advantages)


@dataclass(frozen=True, slots=True, eq=False)
class PlayedGroup:
    """A group as it comes out of play.

    Args:
        prepared: the group, and what it teaches.
        is_usable: enough of its episodes have a reward.
    """

    prepared: PreparedGroup
    is_usable: bool

    @property
    def has_signal(self) -> bool:
        """True where the group is usable and its episodes differ, so that there is something to learn."""
        return self.is_usable and self.prepared.has_signal


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """A group that a step got; one that does not count was replaced by another."""

    played: PlayedGroup
    is_trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """Result of a step.

    Args:
        data: that it trained on.
        logprobs: for each datum, [N] float32, the trainer's log-probabilities before the optimiser step.
        metrics: what the service reported; of several requests, sums of what is named `:sum`, and means of the rest.
        loss: of every sequence.
        learning_rate: of the step.
    """

    data: Sequence[Datum]
    logprobs: Sequence[Floats]
    metrics: Mapping[str, float]
    loss: Loss
    learning_rate: float


def _taught(episode: Episode) -> bool:
    return episode.reward is not None and not episode.masked


def _normalized(
    data: Sequence[Datum], owners: Sequence[int], normalization: Normalization, members: Sequence[int]
) -> list[Datum]:
    """The sequences of the `members` that are trained on, with their advantages divided; `owners` has one for each."""
    tokens = dict.fromkeys(members, 0)
    for datum, owner in zip(data, owners, strict=True):
        tokens[owner] += int(np.count_nonzero(datum.mask))
    weights = dict(zip(tokens, normalization.weights(np.array([*tokens.values()], np.int64)), strict=True))
    return [
        replace(datum, advantages=datum.advantages * np.float32(weights[owner]))
        for datum, owner in zip(data, owners, strict=True)
    ]


def _cut(datum: Datum, count: int) -> Datum:
    """The first `count` positions, or fewer: an image is not cut in two."""
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
    """One datum for each path from a segment's first turn to a last one.

    Args:
        episode: its turns, each naming the turn that it extends.
        advantages: [turns] float64.
    """
    turns = episode.turns
    parents = {turn.parent for turn in turns}
    trained = set[int]()
    for last in range(len(turns)):
        if last in parents:
            continue
        path = _path(episode, last)
        yield _datum(episode, path, advantages, fresh=[index not in trained for index in path])
        trained.update(path)


def trained_tokens(episode: Episode) -> int:
    """Tokens of all its sequences together, as a service counts what it trains on."""
    return sum(length - 1 for length in sequence_lengths(episode))


def sequence_lengths(episode: Episode) -> list[int]:
    """Tokens of each of its sequences, the last of which is only predicted."""
    ends = list[int]()
    for turn in episode.turns:
        before = 0 if turn.parent is None else ends[turn.parent]
        ends.append(before + len(turn.prompt) + len(turn.completion))
    extended = {turn.parent for turn in episode.turns}
    return [end for number, end in enumerate(ends) if number not in extended]


def _path(episode: Episode, last: int) -> list[int]:
    path, index = list[int](), last
    while True:
        path.append(index)
        parent = episode.turns[index].parent
        if parent is None:
            return path[::-1]
        index = parent


def _datum(episode: Episode, path: list[int], advantages: NDArray[np.float64], *, fresh: list[bool]) -> Datum:
    turns = [episode.turns[index] for index in path]
    prompt = join([piece for turn in turns for piece in (turn.prompt, Prompt(turn.completion))])
    logprobs, weights = np.zeros(len(prompt), np.float32), np.zeros(len(prompt), np.float32)
    mask = np.zeros(len(prompt), np.bool_)
    end = 0
    for turn, index, new in zip(turns, path, fresh, strict=True):
        start = end + len(turn.prompt)
        end = start + len(turn.completion)
        if new:
            mask[start:end] = turn.sampled
            np.copyto(logprobs[start:end], turn.logprobs, where=turn.sampled)
            np.copyto(weights[start:end], np.float32(advantages[index]), where=turn.sampled)
    images = tuple(image for image in prompt.images if image.start < len(prompt) - 1)
    return Datum(
        prompt=Prompt(prompt.tokens[:-1], images),
        targets=np.maximum(prompt.tokens[1:], 0),  # an image position predicts nothing, but must hold a token
        logprobs=logprobs[1:],
        advantages=weights[1:],
        mask=mask[1:],
    )
